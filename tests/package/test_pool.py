"""The harness itself: it must tell which rank died, hung or raised, and go on after that."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Died, Done, Hung, Pool, Raised, Rank, RanksFailed


def sum_of_ranks(me: Rank) -> float:
    t = torch.full((3,), float(me.rank))
    dist.all_reduce(t)
    return float(t[0])


def misbehave(me: Rank, how: str) -> int:
    me.tell("here")
    if me.rank == 1:
        if how == "raise":
            raise LookupError("lost")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(60)
    return me.rank


def test_ranks_are_kept_between_jobs(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(sum_of_ranks, world(3)) == [3.0] * 3
    pids = [pool.workers[r].pid for r in range(3)]
    key = pool.workers[0].key
    assert pool.run(sum_of_ranks, world(3)) == [3.0] * 3
    assert [pool.workers[r].pid for r in range(3)] == pids
    assert pool.workers[0].key == key
    assert pool.run(sum_of_ranks, world(2)) == [1.0] * 2


def leave(me: Rank, leavers: tuple[int, ...]) -> None:
    if me.rank in leavers:
        dist.destroy_process_group()


@pytest.mark.parametrize("leavers", [(0, 1, 2), (1,)])
def test_a_group_that_a_job_destroyed_is_made_again(
    pool: Pool, world: MakeWorld, leavers: tuple[int, ...]
) -> None:
    assert pool.run(sum_of_ranks, world(3)) == [3.0] * 3
    pool.run(leave, world(3), leavers)
    assert pool.run(sum_of_ranks, world(3)) == [3.0] * 3


@pytest.mark.parametrize("how", ["raise", "die", "hang"])
def test_a_bad_rank_is_reported_and_replaced(
    pool: Pool, world: MakeWorld, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.shutil.which", lambda name: None)  # gdb takes seconds
    call = pool.start(misbehave, world(2), how)
    assert call.heard(1) == "here"
    call.await_end([0], 20.0)
    good, bad = call.outcomes(deadline=2.0 if how == "hang" else 20.0)
    assert good == Done(0, 0)
    if how == "raise":
        assert isinstance(bad, Raised) and bad.isa("KeyError") is False and bad.isa("LookupError")
        assert "lost" in bad.message and "misbehave" in bad.trace
    elif how == "die":
        assert bad == Died(1, -signal.SIGKILL)
    else:
        assert isinstance(bad, Hung) and "misbehave" in bad.stack
    with pytest.raises(RanksFailed, match="rank 1"):
        pool.start(misbehave, world(2), "raise").results()
    assert pool.run(sum_of_ranks, world(2)) == [1.0] * 2


def test_a_rank_that_dies_between_jobs_fails_one_job(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(sum_of_ranks, world(2)) == [1.0] * 2
    os.kill(pool.workers[1].pid, signal.SIGKILL)
    pool.workers[1].process.join(10)
    with pytest.raises(RanksFailed, match="rank 1 died after its last job"):
        pool.run(sum_of_ranks, world(2))
    assert pool.run(sum_of_ranks, world(2)) == [1.0] * 2


def differ(me: Rank) -> bool:
    try:
        dist.all_reduce(torch.ones(10 + me.rank))
    except dist.DistBackendError:
        return True
    return False


def test_a_group_that_failed_is_not_met_again(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(differ, world(2)) == [True] * 2
    assert pool.run(sum_of_ranks, world(2)) == [1.0] * 2
