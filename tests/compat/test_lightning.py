"""Lightning trains with the hook beside gloo and by outer steps; skipped without Lightning."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import launchers
import pytest

pytestmark = pytest.mark.slow

TRAIN = """
    import hashlib, json, os, sys
    import lightning as L, torch

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            wide = torch.nn.Linear(64, 64)
            self.net = torch.nn.Sequential(wide, torch.nn.Tanh(), torch.nn.Linear(64, 4))

        def training_step(self, x, index):
            return self.net(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_end(self):
            data = self.trainer.strategy.model._get_ddp_logging_data()
            self.called = data.get("comm_hook")

    def train(callbacks, epochs=2, keep=None, begin=None):
        torch.manual_seed(int(os.environ["RANK"]))
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs, logger=False,
            callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )
        net = Net()
        data = torch.utils.data.DataLoader(torch.randn(24, 64), batch_size=4)
        trainer.fit(net, data, ckpt_path=begin)
        if keep:
            trainer.save_checkpoint(keep)
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
        return [net.called, hashlib.sha256(weights.numpy().tobytes()).hexdigest()]

    from ringreduce.integrations.lightning import CommHook, DiLoCo

    os.environ["RINGREDUCE_HOSTID"] = os.environ.get("RANK", "0")  # two hosts
    coded = CommHook(codec="int8", start_after=1)
    told = {"gloo": train([]), "exact": train([CommHook()]), "coded": train([coded])}
    told["residuals"] = coded.state.residual_bytes() > 0
    kept = os.path.join(sys.argv[1], "checkpoint")
    sites = DiLoCo(sync_every=4)
    told["sites"] = [train([sites], keep=kept)[1], sites.diloco.step, sites.diloco.rounds]
    sites = DiLoCo(sync_every=4)
    told["later"] = [train([sites], 4, begin=kept)[1], sites.diloco.step, sites.diloco.rounds]
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
        json.dump(told, file)
"""


def test_the_hook_and_outer_steps_by_callbacks(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    done = launchers.run([*launchers.torchrun(2), str(script), str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / r).read_text()) for r in "01"]
    assert ranks[0] == ranks[1]
    gloo, exact, coded = (ranks[0][name] for name in ("gloo", "exact", "coded"))
    assert [exact[0], coded[0]] == ["ringreduce_all_reduce", "ringreduce_int8"]
    assert exact[1] == gloo[1] != coded[1]
    assert ranks[0]["residuals"]
    (at_first, *rounds), (later, *more) = ranks[0]["sites"], ranks[0]["later"]
    assert len({at_first, later, gloo[1]}) == 3
    assert (rounds, more) == ([6, 2], [12, 5])


def test_without_lightning_a_sentence_says_what_to_install() -> None:
    program = """
        import sys
        sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
        import ringreduce.integrations.lightning
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: Lightning is not installed; install it with "
        "`pip install 'ringreduce[lightning]'`"
    )
