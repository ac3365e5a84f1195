"""torchrun --nnodes=2 between two hosts: training by DDP has the bits of the same world on one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import MakeWorld
from hosts import ROOT, Hosts, why_not
from pool import Pool
from scripts import as_by_torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
pytest.importorskip("tqdm")
pytest.importorskip("sklearn")

PRELOAD = ("torch._dynamo", "tqdm")

SCRIPT = [str(ROOT / "examples" / "train_gpt.py"), "--backend", "ringreduce", "--steps", "4"]
SCRIPT += ["--layers", "1", "--width", "32", "--sync-pairs", "1", "--sample", "1"]
FLAT = {"RINGREDUCE_ALGORITHM": "ring"}  # of 2 x 2 ranks hierarchical states its own order
# How the two find each other: the first host's address given, or a rendezvous.
GIVEN = "--node-rank=$RANK --master-addr=10.88.0.1 --master-port=29500"
# These hosts have no names, by which torchrun would know that the endpoint is its own.
RENDEZVOUS = "--rdzv-backend=c10d --rdzv-id=job1 --rdzv-endpoint=10.88.0.1:29400 "
RENDEZVOUS += "--rdzv-conf=is_host=$((1 - RANK)) --local-addr=10.88.0.$((RANK + 1))"


def records(folder: str, ranks: int) -> list[dict[str, Any]]:
    """Of each rank, what must not differ from run to run."""
    found = [json.loads(Path(folder, f"rank{r}.json").read_text()) for r in range(ranks)]
    return [{key: record[key] for key in ("losses", "weights_hash")} for record in found]


def on_one_host(pool: Pool, world: MakeWorld, ranks: int) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        script = (Path(SCRIPT[0]), ranks, *SCRIPT[1:], "--record", folder)
        as_by_torchrun(pool, world, *script, **FLAT)
        return records(folder, ranks)


def on_two(per_host: int, meeting: str, more: dict[str, str]) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder, Hosts(2, delay_ms=0.1, rate_mbit=1000) as hosts:
        launcher = f"{sys.executable} -m torch.distributed.run --nnodes=2 {meeting}"
        script = " ".join([*SCRIPT, "--record", folder])
        command = f"exec {launcher} --nproc-per-node={per_host} {script}"
        job = hosts.start(["sh", "-c", command], environment=more)
        for outcome in job.wait(400):
            assert outcome.code == 0, outcome.output
        return records(folder, 2 * per_host)


@pytest.mark.parametrize(
    ("per_host", "meeting"), [(1, GIVEN), (2, RENDEZVOUS)], ids=["2x1", "2x2-rendezvous"]
)
def test_two_hosts_train_the_bits_of_one(
    pool: Pool, world: MakeWorld, per_host: int, meeting: str
) -> None:
    assert on_two(per_host, meeting, FLAT) == on_one_host(pool, world, 2 * per_host)
