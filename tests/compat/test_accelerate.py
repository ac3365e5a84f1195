"""Hugging Face Accelerate and Transformers train on ringreduce as on gloo.

Programs run on two ranks under `accelerate launch` and torchrun; they are skipped where the
frameworks are not installed.  Refusals are shown with a made-up package in Accelerate's place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import launchers
import pytest

LOGGED = [
    "Accelerate uses the backend ringreduce on CPUs",
    "groups of the backend gloo are made by",
]

START = """
    import json
    import sys

    how = sys.argv.pop(1)
    if how == "enable":
        import ringreduce.integrations.accelerate as rr
        rr.enable()
        rr.enable()
    elif how == "init":
        import ringreduce
        ringreduce.init()
"""
ACCELERATOR = """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import gather_object, set_seed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    state, names = accelerator.state, []
    set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss).tolist())
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
"""
TRAINER = """
    from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser
    from transformers import Trainer, TrainingArguments, set_seed

    (settings,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    names = settings.__dataclass_fields__["ddp_backend"].metadata["choices"]
    import torch
    from accelerate.utils import gather_object

    set_seed(1)
    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape))
    data = [{"input_ids": t, "labels": t} for t in torch.randint(0, 32, (32, 8))]
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data[:6])
    trainer.train()
    losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history[:-1]]
    state = trainer.accelerator.state
"""
END = """
    weights = gather_object([[p.double().sum().item() for p in model.parameters()]])
    used = [state.backend, torch.distributed.get_backend()]
    main = state.is_main_process
    state.destroy_process_group()
    if how == "enable":
        from accelerate.state import AcceleratorState, PartialState
        rr.disable()
        AcceleratorState._reset_state(reset_partial_state=True)
        assert PartialState(cpu=True).backend == "gloo" and "ringreduce" not in names
        state.destroy_process_group()
    if main:
        print(json.dumps({"used": used, "losses": losses, "weights": weights}))
"""
PROGRAMS = {"accelerator": START + ACCELERATOR + END, "trainer": START + TRAINER + END}
LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
LAUNCH += " --mixed_precision no --dynamo_backend no --main_process_port 0"
SETTINGS = "--use_cpu --max_steps 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
SETTINGS += (
    " --logging_steps 1 --eval_strategy epoch --report_to none --save_strategy no --output_dir"
)


@cache
def train(program: str, how: str, backend: str = "") -> tuple[dict[str, Any], int]:
    """Runs a program on two ranks; rank 0's results, and how often a rank logged the backend."""
    pytest.importorskip("accelerate", reason="needs `pip install 'ringreduce[accelerate]'`")
    if program == "trainer":
        pytest.importorskip("transformers", reason="needs `pip install transformers`")
    with TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(textwrap.dedent(PROGRAMS[program]))
        command = [*launchers.torchrun(2), str(script), how]
        if program == "accelerator" and how != "init":
            command = [sys.executable, *LAUNCH.split(), str(script), how]
        if program == "trainer":
            command += [*SETTINGS.split(), folder]
            command += ["--ddp_backend", backend] if backend else []
        env = {"HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
        env["RINGREDUCE_REPLACE"] = "gloo" if how == "replace" else ""
        run = launchers.run(command, env)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.split("\n") if line.startswith('{"used"')]
    return json.loads(lines[0]), sum(run.stderr.count(line) for line in LOGGED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "how", "backend", "used", "logged"),
    [
        ("accelerator", "enable", "", ["ringreduce"] * 2, 1),
        # gloo is Accelerate's name for any group that it did not make.
        ("accelerator", "replace", "", ["gloo", "ringreduce"], 1),
        ("accelerator", "init", "", ["gloo", "ringreduce"], 0),
        ("trainer", "enable", "ringreduce", ["ringreduce"] * 2, 1),
        ("trainer", "replace", "gloo", ["gloo", "ringreduce"], 1),
    ],
)
def test_training_equals_gloo_bit_for_bit(
    program: str, how: str, backend: str, used: list[str], logged: int
) -> None:
    """The sum of two addends has one rounding, so both backends give the same bits."""
    gloo, _ = train(program, "plain", "gloo")
    assert gloo["used"] == ["gloo", "gloo"] and len(gloo["losses"]) > 4
    ours, count = train(program, how, backend)
    assert (ours["used"], count) == (used, logged)
    assert ours["weights"][0] == ours["weights"][1]
    assert {**ours, "used": 0} == {**gloo, "used": 0}


ENABLE = "import ringreduce.integrations.accelerate as rr\nrr.enable()"


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    def say(program: str) -> str:
        env = {**launchers.untouched(), "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        return done.stdout + done.stderr

    absent = say("import sys; sys.modules['accelerate'] = None\n" + ENABLE)
    assert "ImportError: Accelerate is not installed; install it with `pip install 'ringr" in absent

    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9.8'\nfrom accelerate import state\n")
    (package / "state.py").write_text("class PartialState:\n  def _prepare_backend(self): pass\n")
    said = say(ENABLE)
    assert "accelerate 9.8 does not choose its backend in PartialState._prepare_b" in said
    assert "Call ringreduce.init() before" in said and "install accelerate 1.15.0" in said
