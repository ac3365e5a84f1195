"""Every call of torch.distributed that waits for other ranks, by name, each made in one way.

For what must hold of all of them alike.  `CALLS[name](at)` makes the call on this rank, with the
arguments that a `Site` holds; the ranks' calls fit each other if their sites do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Site:
    """Where a call is made, and with what.  In a group of all ranks, where the two kinds of rank
    numbers are the same, or of the first few."""

    group: dist.ProcessGroup
    timeout: timedelta
    count: int = 12  # elements that a rank gives, or gives each other rank
    dtype: torch.dtype = torch.float32
    op: Any = dist.ReduceOp.SUM
    root: int = 0  # of a message: who does what the call is named after
    tag: int = 0
    splits: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def full(self, parts: int = 1) -> torch.Tensor:
        return torch.ones(parts * self.count, dtype=self.dtype)

    def each(self) -> list[torch.Tensor]:
        return [self.full() for _ in range(self.size)]


def _coalesced(at: Site) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced([at.full(), at.full(3)], op=at.op, group=at.group)


def _sparse(at: Site) -> None:
    t = torch.eye(3, dtype=at.dtype).repeat(1, at.count).to_sparse()
    dist.all_reduce(t, op=at.op, group=at.group)


def _reduce_scatter(at: Site) -> None:
    dist.reduce_scatter(at.full(), at.each(), op=at.op, group=at.group)


def _reduce_scatter_tensor(at: Site) -> None:
    dist.reduce_scatter_tensor(at.full(), at.full(at.size), op=at.op, group=at.group)


def _gather(at: Site) -> None:
    outputs = at.each() if at.rank == at.root else None
    dist.gather(at.full(), outputs, dst=at.root, group=at.group)


def _scatter(at: Site) -> None:
    inputs = at.each() if at.rank == at.root else None
    dist.scatter(at.full(), inputs, src=at.root, group=at.group)


def _all_to_all_single(at: Site) -> None:
    """With splits: `splits[r]` is what this rank and rank r send each other."""
    splits = list(at.splits) or None
    t = at.full(at.size) if not splits else replace(at, count=sum(splits)).full()
    dist.all_to_all_single(torch.empty_like(t), t, splits, splits, group=at.group)


def _splits(at: Site) -> None:
    default = tuple((at.rank + r) * at.count for r in range(at.size))
    _all_to_all_single(replace(at, splits=at.splits or default))


def _message(at: Site, send: bool, receive: Callable[[Site, torch.Tensor, int], None]) -> None:
    """Rank `root` sends to the other of two (or receives from it)."""
    t, peer = at.full(), 1 - at.rank
    if (at.rank == at.root) == send:
        dist.send(t, peer, group=at.group, tag=at.tag)
    else:
        receive(at, t, peer)


def _receive(at: Site, t: torch.Tensor, peer: int) -> None:
    dist.recv(t, peer, group=at.group, tag=at.tag)


def _receive_any(at: Site, t: torch.Tensor, peer: int) -> None:
    assert dist.recv(t, group=at.group, tag=at.tag) == peer


def compressed(at: Site, **how: Any) -> None:
    from ringreduce import backend_of, extension

    backend, t = backend_of(at.group), at.full()
    extension().compressed_all_reduce(backend, t, t, **{"codec": "int8", "op": "sum", **how}).wait()


CALLS: dict[str, Callable[[Site], Any]] = {
    "all_reduce": lambda at: dist.all_reduce(at.full(), op=at.op, group=at.group),
    "all_reduce_coalesced": _coalesced,
    "sparse all_reduce": _sparse,
    "compressed all_reduce": compressed,
    "reduce": lambda at: dist.reduce(at.full(), at.root, op=at.op, group=at.group),
    "broadcast": lambda at: dist.broadcast(at.full(), at.root, group=at.group),
    "all_gather": lambda at: dist.all_gather(at.each(), at.full(), group=at.group),
    "all_gather_into_tensor": lambda at: dist.all_gather_into_tensor(
        at.full(at.size), at.full(), group=at.group
    ),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": lambda at: dist.all_to_all(at.each(), at.each(), group=at.group),
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single with splits": _splits,
    "barrier": lambda at: dist.barrier(group=at.group),
    # torch's own function takes gloo alone.
    "monitored_barrier": lambda at: at.group.monitored_barrier(  # type: ignore[attr-defined]
        at.timeout, wait_all_ranks=True
    ),
    "send": lambda at: _message(at, True, _receive),
    "recv": lambda at: _message(at, False, _receive),
    "recv from any": lambda at: _message(at, False, _receive_any),
}
REDUCING = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
ROOTED = ("reduce", "broadcast", "gather", "scatter")
MESSAGES = ("send", "recv", "recv from any")
# Calls that have another name in messages.
TITLES = {
    "all_reduce_coalesced": "all_reduce",
    "sparse all_reduce": "sparse all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_to_all_single with splits": "all_to_all",
    "send": "send",
    "recv": "receive",
    "recv from any": "receive",
}


def title(name: str) -> str:
    return TITLES.get(name, name)


def limited(at: Site, seconds: float) -> Site:
    """The same site, with another timeout for the calls from now on."""
    limit = timedelta(seconds=seconds)
    at.group.set_timeout(limit)  # type: ignore[attr-defined]
    return replace(at, timeout=limit)


def new_site(name: str, timeout: float, size: int = 0, **arguments: Any) -> Site | None:
    """A group of its own for a call; None on ranks that it does without.  All ranks call this."""
    size = 2 if name in MESSAGES else size or dist.get_world_size()
    limit = timedelta(seconds=timeout)
    group = dist.new_group(list(range(size)), timeout=limit)
    if dist.get_rank() >= size:
        return None
    if name == "send":  # more than anybody takes before it is wanted
        arguments.setdefault("count", 100_000)
    return Site(group, limit, **arguments)
