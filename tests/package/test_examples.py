"""The examples as a user runs them, with gloo and with ringreduce, and the demos.

Losses of both backends are compared bit for bit.  The scripts run in ranks of the pool, as if
torchrun had started them: test_launchers.py and test_net_torchrun.py have the real one.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import launchers
import pytest
from conftest import MakeWorld
from pool import Pool
from scripts import as_by_torchrun

pytestmark = pytest.mark.slow

pytest.importorskip("tqdm")
pytest.importorskip("sklearn")

PRELOAD = ("sklearn.datasets", "sklearn.model_selection", "torch._dynamo", "tqdm")
PRELOAD += ("torch.distributed.tensor.parallel", "torch.testing._internal.distributed.fake_pg")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MLP = ("train_mlp.py", "--steps", "6")
GPT = ("train_gpt.py", "--steps", "4", "--layers", "1", "--width", "32")
GPT += ("--sync-pairs", "2", "--sample", "20")


def run(command: list[str], seconds: float) -> None:
    done = launchers.run(command, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr


Records = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def train(pool: Pool, world: MakeWorld) -> Callable[..., Records]:
    """Trains an example on two ranks; what each rank recorded."""

    @cache
    def records(*example: str) -> Records:
        with TemporaryDirectory() as folder:
            arguments = (*example[1:], "--record", folder)
            as_by_torchrun(pool, world, EXAMPLES / example[0], 2, *arguments)
            first, second = (json.loads(Path(folder, f"rank{r}.json").read_text()) for r in (0, 1))
        return first, second

    return records


@pytest.mark.parametrize("example", [MLP, GPT], ids=["mlp", "gpt"])
def test_ranks_have_equal_weights_and_learn(
    train: Callable[..., Records], example: tuple[str, ...]
) -> None:
    first, second = train(*example, "--backend", "gloo")
    assert first["weights_hash"] == second["weights_hash"]
    assert first["losses"] != second["losses"]  # each rank has its own share of the data
    for rank in (first, second):
        assert rank["losses"][-1] < rank["losses"][0]


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        pytest.param(MLP, ("--backend", "ringreduce"), id="mlp-backend"),
        pytest.param(MLP, ("--backend", "gloo", "--hook"), id="mlp-hook"),
        pytest.param(GPT, ("--backend", "ringreduce"), id="gpt-backend"),
    ],
)
def test_ringreduce_gives_the_bits_of_gloo(
    train: Callable[..., Records], example: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    base = train(*example, "--backend", "gloo")
    ours = train(*example, *arguments)
    for rank in (0, 1):
        # By way of hex: a list of floats would call 0.0 and -0.0 equal.
        assert [x.hex() for x in ours[rank]["losses"]] == [x.hex() for x in base[rank]["losses"]]
        assert ours[rank]["weights_hash"] == base[rank]["weights_hash"]


def test_outer_steps_in_small(train: Callable[..., Records]) -> None:
    size = ("--layers", "1", "--width", "32", "--steps", "8", "--ddp-steps", "2")
    first, second = train("train_diloco.py", *size, "--sync-every", "3", "--fragments", "2")
    for way in ("DDP", "DiLoCo"):
        assert first[way]["weights_hash"] == second[way]["weights_hash"]
    assert first["DDP"]["weights_hash"] != first["DiLoCo"]["weights_hash"]


@pytest.mark.parametrize(
    ("ranks", "compiler", "dtype"), [(2, "aot_eager", "float32"), (4, "none", "bfloat16")]
)
def test_tensor_parallel_text(
    pool: Pool, world: MakeWorld, ranks: int, compiler: str, dtype: str
) -> None:
    """The program compares the scores with those of one rank, and with gloo's bits."""
    layers = "2" if compiler == "none" else "1"  # compiling each takes seconds
    size = ("--layers", layers, "--prompt", "8", "--tokens", "4", "--rounds", "2")
    program = (EXAMPLES / "tensor_parallel.py", ranks, "--compiler", compiler, "--dtype", dtype)
    as_by_torchrun(pool, world, *program, *size)


@pytest.mark.parametrize("options", [(), ("--fp16-allreduce",), ("--use-adasum",)])
def test_horovod_script(train: Callable[..., Records], options: tuple[str, ...]) -> None:
    first, second = train("horovod/mnist.py", "--epochs", "2", *options)
    assert first == second  # losses are averaged over the ranks
    assert first["losses"][-1] < first["losses"][0]
    assert first["accuracy"] > 0.3  # of 10 digits


def test_demo_in_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    demo = [sys.executable, str(EXAMPLES / "demo.py"), "--backends", "gloo,gloo"]
    small = ["--gpt-steps", "3", "--mlp-rounds", "1", "--mlp-width", "256"]
    run([*demo, *small, "--out", str(tmp_path)], seconds=900)
    results = json.loads((tmp_path / "demo.json").read_text())
    for part in ("gpt", "mlp"):
        runs = results[part]["runs"]
        assert runs["gloo-again"]["differs"] == ""
        assert runs["gloo-again"]["step_ms"] > 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_demo_of_a_lost_rank(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    demo = [sys.executable, str(EXAMPLES / "demo_survive.py"), "--ranks", "3", "--steps", "480"]
    run([*demo, "--out", str(tmp_path)], seconds=900)
    results = json.loads((tmp_path / "survive.json").read_text())
    lost, joined = results["lost_in_step"], results["joined_in_step"]
    assert 160 <= lost < 320 < joined < 480
    assert results["losses"][-1] < results["losses"][0]
    assert (tmp_path / "survive.png").read_bytes().startswith(b"\x89PNG")


def processes_naming(text: str) -> list[int]:
    """The processes with `text` in their command line, zombies not among them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it ended between the listing and the look
                continue
            if text.encode() in command:
                found.append(int(entry.name))
    return found


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    demo = [sys.executable, str(EXAMPLES / "demo.py"), "--backends", "gloo,gloo"]
    process = subprocess.Popen(
        [*demo, "--out", str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        limit = time.monotonic() + 240
        while len(processes_naming(str(tmp_path))) < 3:  # the demo and two ranks
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert processes_naming(str(tmp_path)) == []
