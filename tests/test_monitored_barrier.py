"""The group's own monitored_barrier: it passes when all come, and else names who does not."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank


def watched_barrier(me: Rank) -> list[Any]:
    group = dist.new_group()
    for wait_all in (False, True):
        group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=wait_all)
    order = torch.zeros(1)
    dist.all_reduce(order, group=group)  # the group is as whole as before
    if me.rank == me.world_size - 1:
        me.hear()
        return []
    began = time.monotonic()
    try:
        group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
    except dist.DistBackendError as error:
        said = str(error)
    else:
        said = "nothing"
    me.tell("raised")
    return [said, time.monotonic() - began]


@pytest.mark.ringreduce
def test_monitored_barrier_of_the_group(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(watched_barrier, world(3, 20.0))
    for rank in range(2):
        call.heard(rank)
    call.tell(2)
    for said, took in call.results()[:2]:
        assert "rank 2" in said and "did not arrive" in said
        assert took < 10.0
