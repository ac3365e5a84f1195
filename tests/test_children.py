"""Ranks with children (DataLoader workers, forked processes): a death is noticed all the same.

A forked child keeps its parent's descriptors open, so a killed rank's sockets do not close.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from blame import expect_all
from conftest import MakeWorld
from pool import Died, Pool, Rank
from processes import alive, wait_until
from test_failures import add_up, left_over
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.ringreduce


class Squares(Dataset[torch.Tensor]):
    """Numbers, made in a worker process."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(float(i * i))


def train_with_workers(me: Rank, how: str) -> None:
    """All-reduces what a DataLoader's worker made; tells the test the pids of its children."""
    if how == "plain fork":
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        try:
            me.tell([child])
            while True:
                dist.all_reduce(torch.ones(1000))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=how)
    batches = iter(loader)
    for k, batch in enumerate(batches):
        dist.all_reduce(batch)
        if k == 2:
            me.tell([w.pid for w in batches._workers])  # type: ignore[attr-defined]
    raise AssertionError("the data ended")


@pytest.mark.parametrize(("how", "victim"), [("fork", 1), ("spawn", 0), ("plain fork", 1)])
def test_a_killed_rank_whose_child_lives_on(
    pool: Pool, world: MakeWorld, how: str, victim: int
) -> None:
    call = pool.start(train_with_workers, world(3), how)
    children = [call.heard(rank, timeout=60.0) for rank in range(3)]
    time.sleep(0.05)
    killed = call.signal(victim, signal.SIGKILL)
    call.await_end(range(3), 15.0)
    orphan = alive(children[victim][0])
    outcomes = call.outcomes()
    assert isinstance(outcomes[victim], Died)
    for raised in expect_all(outcomes, {victim}, "PeerLost", {victim}):
        assert raised.when - killed <= 10.0, f"took {raised.when - killed:.3f} s"
    if how == "plain fork":
        assert orphan, "the child was to outlive its parent: this test tests nothing"
        os.kill(children[victim][0], signal.SIGKILL)
    assert pool.run(add_up, world(3)) == [6.0] * 3
    for rank in set(range(3)) - {victim}:
        assert wait_until(lambda rank=rank: not alive(children[rank][0]), 10.0), "a child is left"
    for found in pool.start(left_over, world(0), ranks=3).results():
        assert all(state != "Z" for _, state in found["children"]), found


def feed(me: Rank, how: str) -> float:
    """Workers that are started after the group neither use it nor disturb it at their end."""
    total = torch.zeros(1)
    for _ in range(2):
        loader = DataLoader(
            Squares(), batch_size=1000, num_workers=2, multiprocessing_context=how, timeout=30
        )
        for batch in loader:
            part = batch.sum().reshape(1)
            dist.all_reduce(part)
            total += part
    return float(total)


@pytest.mark.parametrize("how", ["fork"])
def test_workers_come_and_go(pool: Pool, world: MakeWorld, how: str) -> None:
    first, second = pool.run(feed, world(2), how)
    assert first == second > 0
    assert pool.run(add_up, world(2)) == [3.0] * 2
