"""Collectives and messages of Python objects, beside what gloo makes of the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pool import Rank, on_ranks


def objects(me: Rank, group: dist.ProcessGroup) -> list[Any]:
    p, r = me.world_size, me.rank
    own = {"rank": r, "text": "x" * (1000 * r), "tensor": torch.arange(float(r + 1))}
    every: list[Any] = [None] * p
    dist.all_gather_object(every, own, group=group)
    gathered: list[Any] | None = [None] * p if r == 1 else None
    dist.gather_object(own, gathered, dst=1, group=group)
    told: list[Any] = [own, r, None] if r == p - 1 else [None] * 3
    dist.broadcast_object_list(told, src=p - 1, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [{"for": k} for k in range(p)] if r == 0 else None, group=group)
    came: list[Any] = [None, None]
    if r == 0:
        dist.send_object_list([own, "hello"], 1, group=group)
    elif r == 1:
        dist.recv_object_list(came, 0, group=group)
    return [every, gathered, told, mine, came]


@on_ranks(3, 20.0)
def test_object_collectives(me: Rank) -> None:
    gloo = dist.new_group(backend="gloo")
    assert dist.group.WORLD is not None
    ours = repr(objects(me, dist.group.WORLD))
    assert ours == repr(objects(me, gloo)) and f"{{'for': {me.rank}}}" in ours, ours
