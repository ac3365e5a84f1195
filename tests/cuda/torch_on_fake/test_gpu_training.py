"""Training on the fake's GPUs: DDP on the backend and by the hook, and sharded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import Machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_torch_jobs as jobs

ROUNDINGS = 1e-4  # of float32: two ways to add up the same shards, over some steps


@pytest.mark.parametrize("way", ["backend", "hook", "python hook"])
def test_ddp_is_one_process_with_all_shards(machine: Machine, way: str) -> None:
    for found in machine.run(jobs.train, 2, way, "mlp", 2):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


def test_buckets_that_ddp_has_dropped_take_no_memory(machine: Machine) -> None:
    for left in machine.run(jobs.memory_beside_buckets, 2):
        assert left < 4 << 20  # a bucket


def test_ranks_that_run_out_of_inputs(machine: Machine) -> None:
    assert machine.run(jobs.train_uneven, 2) == [1, 1]


def test_the_hook_beside_gloo(machine: Machine) -> None:
    for found in machine.run(jobs.train, 2, "hook", "mlp", backend="gloo"):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


def test_half_precision(machine: Machine) -> None:
    for found in machine.run(jobs.train, 3, "hook", "mlp", 1, "bfloat16"):
        assert found["apart"] < 2e-2 and found["kinds"] == 1


def test_mixed_precision_with_a_scaler(machine: Machine) -> None:
    for found in machine.run(jobs.train, 2, "hook", "mlp", 2, "float32", True):
        assert found["finite"] and found["apart"] < 1e-2 and found["kinds"] == 1


def test_fsdp2(machine: Machine) -> None:
    assert max(machine.run(jobs.train_sharded, 2)) < 1e-3
