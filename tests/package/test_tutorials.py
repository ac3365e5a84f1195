"""The scripts of examples/tutorials with 2 and 4 ranks; what they print is compared with oracles.

Most run in ranks of the pool, whose torch is loaded, with the variables that torchrun would set.
Those that are about starting processes are started as their first lines say.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import reduce
from operator import mul
from pathlib import Path
from typing import Any

import launchers
import pytest
import scripts
import torch
from conftest import MakeWorld
from pool import Pool
from processes import free_port
from scripts import as_by_torchrun

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tutorials"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
SIZES = pytest.mark.parametrize("size", [2, 4])

Printed = list[dict[str, Any]]  # by rank: what -> value


def read(text: str, size: int) -> Printed:
    """Takes "rank R: what = value" apart; the value is JSON.

    Under torchrun (which runs `python -u`) a line is two writes, and another rank's may come
    between the text and its end.
    """
    printed: Printed = [{} for _ in range(size)]
    lines = re.findall(r"rank (\d+): ([^=\n]+) = (.+?)(?=rank \d|\n|$)", text)
    for rank, what, value in lines:
        assert what not in printed[int(rank)], text
        printed[int(rank)][what] = json.loads(value)
    return printed


def in_pool(pool: Pool, world: MakeWorld, name: str, size: int, *arguments: str) -> Printed:
    """Runs a script on ranks of the pool as if torchrun had started them."""
    given = ("--backend", "ringreduce", *arguments)
    return read("".join(as_by_torchrun(pool, world, FOLDER / name, size, *given)), size)


def launched(command: list[str], size: int) -> Printed:
    done = launchers.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(done.stdout, size)


def load(name: str) -> dict[str, Any]:
    """A script's functions, for the oracles."""
    return runpy.run_path(str(FOLDER / name), run_name="tutorial")


@SIZES
def test_send_recv(pool: Pool, world: MakeWorld, size: int) -> None:
    for rank, found in enumerate(in_pool(pool, world, "send_recv.py", size)):
        assert found == {
            # 1 from rank 0, doubled by all others.
            "token": [2.0 ** (size - 1) if rank == 0 else 2.0 ** (rank - 1)],
            "neighbours": [[float((rank - 1) % size)], [float((rank + 1) % size)]],
            "senders": list(range(1, size)) if rank == 0 else [],
        }


@SIZES
def test_collectives(pool: Pool, world: MakeWorld, size: int) -> None:
    own = [[float(r), 10.0 * r] for r in range(size)]
    more = [[a + 1, b + 1] for a, b in own]  # what the reductions of all ranks start from
    root = size - 1

    def over(ranks: list[list[float]], operation: Any) -> list[float]:
        return [operation([rank[0] for rank in ranks]), operation([rank[1] for rank in ranks])]

    for rank, found in enumerate(in_pool(pool, world, "collectives.py", size)):
        expected = {
            "broadcast": own[root],
            "all_reduce SUM": over(more, sum),
            "all_reduce MAX": over(more, max),
            "all_reduce MIN": over(more, min),
            "all_reduce PRODUCT": over(more, lambda values: reduce(mul, values)),
            "scatter": [100.0 + rank, float(rank)],
            "all_gather": own,
        }
        if rank == root:
            expected |= {"reduce": over(own, sum), "gather": own}
        if rank in (0, root):
            expected["all_reduce in a group"] = over([more[0], more[root]], sum)
        assert found == expected


@pytest.fixture(scope="module")
def on_one_process(pool: Pool, world: MakeWorld) -> dict[str, Any]:
    """What hand-written SGD gives where one process sees every batch as a whole."""
    return in_pool(pool, world, "sync_sgd.py", 1)[0]


@SIZES
def test_synchronous_sgd(
    pool: Pool, world: MakeWorld, on_one_process: dict[str, Any], size: int
) -> None:
    ranks = in_pool(pool, world, "sync_sgd.py", size)
    for found in ranks:
        for way in ("per parameter", "bucketed"):
            for what in (f"losses {way}", f"weights {way}"):
                assert found[what] == ranks[0][what]  # all ranks alike, to the last bit
                assert found[what] == pytest.approx(on_one_process[what], rel=1e-4)
        losses = found["losses per parameter"]
        assert losses[-1] < losses[0] / 2
        if size == 2:  # with more ranks an element's place in a bucket sets the order of its sum
            assert found["weights per parameter"] == found["weights bucketed"]
    per_parameter, bucketed = (
        ranks[0][f"milliseconds a step {way}"] for way in ("per parameter", "bucketed")
    )
    assert ranks[0]["ratio"] == pytest.approx(per_parameter / bucketed, rel=0.05)


def test_ddp_by_spawn(size: int = 2) -> None:
    script = [str(FOLDER / "ddp_spawn.py"), "--backend", "ringreduce"]
    options = ["--world-size", str(size), "--port", str(free_port())]
    ranks = launched([sys.executable, *script, *options], size)
    for found in ranks:
        assert found["initial"] == ranks[0]["initial"] != found["trained"]
        assert found["trained"] == ranks[0]["trained"]
        assert found["loaded"] == found["trained"]


@SIZES
def test_ddp_by_torchrun(pool: Pool, world: MakeWorld, tmp_path: Path, size: int) -> None:
    """With two ranks one of them dies on the way, and training resumes from the snapshot."""
    arguments = ["--epochs", "3"]
    (alone,) = in_pool(
        pool, world, "ddp_torchrun.py", 1, *arguments, "--snapshot", str(tmp_path / "alone.pt")
    )
    arguments += ["--snapshot", str(tmp_path / "snapshot.pt"), "--backend", "ringreduce"]
    if size == 2:
        arguments += ["--fail-in", "1"]
    script = str(FOLDER / "ddp_torchrun.py")
    ranks = launched(launchers.torchrun(size, "--max-restarts", "1", script, *arguments), size)
    for found in ranks:
        # As on one process that sees every batch as a whole.
        assert found["weights"] == pytest.approx(alone["weights"], abs=1e-4)
        assert found["weights"] == ranks[0]["weights"]
        assert found["loss of epoch 2"] < 0.1
        assert found.get("resumed after") == (1 if size == 2 else None)
    snapshot = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    assert snapshot["epochs"] == 3
    assert snapshot["model"]["weight"].flatten().tolist() == ranks[0]["weights"]


@SIZES
def test_distributed_sampler(pool: Pool, world: MakeWorld, size: int) -> None:
    ranks = in_pool(pool, world, "sampler.py", size)
    samples = load("sampler.py")["SIZE"]
    for epoch in range(3):
        shares = [found[f"epoch {epoch}"] for found in ranks]
        assert {len(share) for share in shares} == {-(-samples // size)}
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        order += order[: -samples % size]
        assert shares == [order[rank::size] for rank in range(size)]
        for found in ranks:
            assert found[f"seen in epoch {epoch}"] == list(range(samples))
    for found in ranks:
        assert found["epoch 0"] != found["epoch 1"]
        assert found["without set_epoch"] == found["epoch 2"]


@SIZES
@pytest.mark.parametrize("method", ["env", "tcp", "file"])
def test_init_methods(pool: Pool, world: MakeWorld, tmp_path: Path, method: str, size: int) -> None:
    options = ["--method", method, "--rank", "{rank}", "--world-size", str(size)]
    options += ["--port", str(free_port()), "--file", str(tmp_path / "meeting")]
    script = (FOLDER / "init_methods.py", size, "--backend", "ringreduce", *options)
    printed = read("".join(scripts.in_pool(pool, world, *script)), size)
    assert printed == [{"sum": size * (size + 1) // 2}] * size


@SIZES
def test_any_launcher_under_mpirun(size: int) -> None:
    script = [str(FOLDER / "any_launcher.py"), "--backend", "ringreduce"]
    for rank, found in enumerate(launched(launchers.mpirun(size, *script), size)):
        assert found.pop("launcher") in ("Open MPI", "PMI")
        assert found == {"sum": size * (size + 1) // 2, "local rank": rank}


@SIZES
def test_any_launcher_under_torchrun(pool: Pool, world: MakeWorld, size: int) -> None:
    for rank, found in enumerate(in_pool(pool, world, "any_launcher.py", size)):
        assert found == {
            "sum": size * (size + 1) // 2,
            "local rank": rank,
            "launcher": "environment",  # torchrun's variables, but not its own id
        }


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a README or a script's head, which are indented lines."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = shlex.split(line) if re.match(r"\s+\S.*\.py", line) else []
        if words:
            yield words


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_says_how_to_run_it(name: str) -> None:
    """In its head and in the README, by a path that is there and options that it has."""
    source = (FOLDER / name).read_text()
    head = source.split('"""')[1]
    for text in (head, (FOLDER / "README.md").read_text()):
        found = [words for words in commands(text) if any(w.endswith(f"/{name}") for w in words)]
        assert found, f"{name} is not there"
        for words in found:
            at = next(i for i, word in enumerate(words) if word.endswith(f"/{name}"))
            assert (FOLDER.parent.parent / words[at]).exists()
            for option in words[at + 1 :]:
                assert not option.startswith("--") or f'"{option}"' in source
    assert '"--backend", default="ringreduce"' in source
