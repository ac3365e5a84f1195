"""GPU operations leave records, which all that observes shows beside those of CPU tensors."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Machine
from gpu_jobs import Gate, use_gpu
from pool import Rank

import ringreduce
from ringreduce.core.backend import backend_of, extension
from ringreduce.observe import recorder, report
from ringreduce.observe.files import Operation, load, operations
from ringreduce.observe.metrics import Totals
from ringreduce.observe.record import Record, parse


def gpu_records() -> list[Record]:
    return parse(extension().gpu_records(backend_of(dist.group.WORLD), [])[0])


def finished() -> list[Record]:
    """The same once all are over, which a thread notices soon."""
    torch.cuda.synchronize()
    until = time.monotonic() + 60
    while True:
        found = gpu_records()
        if all(one.state not in ("queued", "running") for one in found):
            return found
        assert time.monotonic() < until, found
        time.sleep(0.001)


def calls(me: Rank) -> None:
    device = use_gpu(me)
    x = torch.ones(1000, device=device)
    for call in range(4):
        dist.all_reduce(x)
        parts = torch.empty(1000 * me.world_size, device=device)
        dist.all_gather_into_tensor(parts, x, async_op=call % 2 == 0)
        dist.broadcast(x, src=1)
    found = finished()
    assert [one.kind for one in found] == ["all_reduce", "all_gather", "broadcast"] * 4
    assert [one.sequence for one in found] == list(range(12))
    for one in found:
        assert one.state == "done"
        assert one.dtype == "float32"
        assert one.bytes == (4000 * me.world_size if one.kind == "all_gather" else 4000)
        assert one.root == (1 if one.kind == "broadcast" else -1)
        assert one.posted_ns <= one.done_ns
        assert one.arrived_ns <= one.done_ns
        assert one.clock_error_ns >= 0
    # Those of CPU tensors are not among them.
    dist.all_reduce(torch.ones(3))
    assert len(gpu_records()) == 12


def test_gpu_operations_leave_records(machine: Machine) -> None:
    machine.run(calls, 2)


def held(me: Rank) -> None:
    """A call behind work that does not end is queued, and begins when that ends."""
    device = use_gpu(me)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    gpu_records()  # who reads them wants to know when calls begin
    gate = Gate()
    dist.all_reduce(x)
    queued = gpu_records()[-1]
    assert queued.state == "queued"
    assert queued.arrived_ns == 0
    gate.open()
    done = finished()[-1]
    assert done.sequence == queued.sequence
    assert done.state == "done"
    assert done.arrived_ns > queued.posted_ns


def test_a_call_behind_other_work_is_queued(machine: Machine) -> None:
    machine.run(held, 2)


def late(me: Rank, folder: Path) -> None:
    """Rank 1 comes late to a call by work in its stream, though its host calls in time."""
    device = use_gpu(me)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    finished()  # this one is not for the timeline
    dist.barrier()
    with ringreduce.timeline(folder):
        dist.all_reduce(torch.ones(3))
        gate = Gate() if me.rank == 1 else None
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(3))  # all have called
        if gate is not None:
            time.sleep(0.5)
            gate.open()
        finished()


def test_the_timeline_shows_who_came_late_to_a_gpu_operation(
    machine: Machine, tmp_path: Path
) -> None:
    machine.run(late, 2, tmp_path)
    job = load(tmp_path).job()
    found: list[Operation] = [one for one in operations(job) if one.group.on_gpus]
    (operation,) = found
    assert "on GPUs" in str(operation.group)
    assert operation.any_record.kind == "all_reduce"
    assert len(operation.records) == 2
    assert operation.last() == 1
    assert operation.wait(0) > 300e6
    assert any(not one.group.on_gpus for one in operations(job))
    assert "on GPUs" in report.summary_text(job, [])


def totals() -> list[Totals]:
    """The sums of the group, then of its GPU operations."""
    return Totals.of(dist.group.WORLD, backend_of(dist.group.WORLD))


def straggle(me: Rank) -> None:
    """The stream of rank 1 comes late to one of many calls, and its host in time."""
    device = use_gpu(me)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    with ringreduce.straggler_detection(log=False) as sd:
        finished()  # this reads records, so the next calls tell when they begin
        before = totals()  # the group has run other tests
        for _ in range(80):
            dist.all_reduce(x)
            torch.cuda.synchronize()
        dist.all_reduce(torch.ones(3))
        gate = Gate() if me.rank == 1 else None
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(3))  # all have called
        if gate is not None:
            time.sleep(2)
            gate.open()
        last = finished()[-1]
    after = totals()
    assert (last.known, last.last_rank) == (me.world_size, 1)
    assert last.late_ms > 1000
    named = [one for one in sd.late + sd._judge.starved if one.record.sequence == last.sequence]
    assert [one.rank for one in named if "on GPUs" in one.group] == [1], sd.summary()
    done = [
        [
            b - a
            for a, b in zip(
                one.kinds.get("all_reduce", (0, 0, 0)), two.kinds["all_reduce"], strict=True
            )
        ]
        for one, two in zip(before, after, strict=True)
    ]
    assert [one[:2] for one in done] == [[2, 24], [81, 81 * 4000]]
    assert done[1][2] > 1 or me.rank == 1
    for rank in range(me.world_size):
        waited = after[1].waited.get(rank, 0) - before[1].waited.get(rank, 0)
        assert (waited > 1) == (rank == 1 and me.rank != 1)


@pytest.mark.parametrize("size", [2, 3])
def test_the_late_rank_is_named_while_the_job_runs(machine: Machine, size: int) -> None:
    machine.run(straggle, size)


def stay_away(me: Rank, folder: Path) -> None:
    """Rank 1 has not called when both dump; in the end all have."""
    device = use_gpu(me)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    finished()
    if me.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        until = time.monotonic() + 60
        while gpu_records()[-1].state != "running":
            assert time.monotonic() < until
            time.sleep(0.001)
    dist.all_reduce(torch.ones(3))
    ringreduce.dump_records(folder / "away")
    dist.all_reduce(torch.ones(3))
    if me.rank == 0:
        work.wait()  # type: ignore[union-attr]
    else:
        dist.all_reduce(x)
    finished()
    ringreduce.dump_records(folder / "ended")


def test_dumps_name_a_rank_that_did_not_call(machine: Machine, tmp_path: Path) -> None:
    machine.run(stay_away, 2, tmp_path)
    dumps = recorder.load(tmp_path / "away")
    name = f"{next(iter(dumps[0]['ringreduce']['groups']))}, on GPUs"
    finding = recorder.find(dumps)
    assert finding is not None
    assert (finding.group, finding.ranks) == (name, (1,))
    said = rf"Rank 1 did not come to operation #\d+ of group '{name}' .*: rank 0 called all_reduce"
    assert re.match(said, finding.what), finding.what
    # The same of a rank that has never used a GPU.
    groups = dumps[1]["ringreduce"]["groups"]
    dumps[1]["entries"] = [e for e in dumps[1]["entries"] if e["ringreduce"]["group"] != name]
    del groups[name]
    finding = recorder.find(dumps)
    assert finding is not None
    assert (finding.group, finding.ranks) == (name, (1,))
    ended = recorder.load(tmp_path / "ended")
    assert recorder.find(ended) is None
    of_gpus = [e for e in ended[1]["entries"] if e["ringreduce"]["group"] == name]
    assert len(of_gpus) >= 2
    assert {entry["state"] for entry in of_gpus} == {"completed"}
