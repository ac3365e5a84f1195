"""Every call of torch.distributed on one device, for what a GPU gives beside what the CPU gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Tensor = torch.Tensor


@dataclass(frozen=True)
class Site:
    """Where a call is made, and how.  Sizes are in units of `unit` elements."""

    rank: int
    size: int
    device: torch.device
    later: bool  # asynchronously
    dtype: torch.dtype = torch.float32
    unit: int = 1

    def mine(self, n: int) -> Tensor:
        """Whole numbers, of which those of four ranks have exact sums in every type."""
        values = torch.arange(self.unit * n) * 7 % 23 + 23 * self.rank
        return values.to(self.dtype).to(self.device)

    def zeros(self, n: int) -> Tensor:
        return torch.zeros(self.unit * n, dtype=self.dtype, device=self.device)

    def each(self, n: int) -> list[Tensor]:
        return [self.zeros(n) for _ in range(self.size)]

    def done(self, work: dist.Work | None, *results: Tensor) -> list[Tensor]:
        assert (work is not None) == self.later
        if work is not None:
            work.wait()
        return list(results)


def all_reduce_of_a_view(at: Site) -> list[Tensor]:
    whole = at.mine(60).view(6, -1)
    return at.done(dist.all_reduce(whole[:, 1:4], async_op=at.later), whole)


def broadcast(at: Site) -> list[Tensor]:
    a = at.mine(1000)
    return at.done(dist.broadcast(a, at.size - 1, async_op=at.later), a)


def all_gather(at: Site) -> list[Tensor]:
    parts = at.each(7)
    return at.done(dist.all_gather(parts, at.mine(7), async_op=at.later), *parts)


def all_gather_of_uneven_parts(at: Site) -> list[Tensor]:
    parts = [at.zeros(3 + r) for r in range(at.size)]
    return at.done(dist.all_gather(parts, at.mine(3 + at.rank), async_op=at.later), *parts)


def all_gather_into_tensor(at: Site) -> list[Tensor]:
    whole = at.zeros(at.size * 9)
    return at.done(dist.all_gather_into_tensor(whole, at.mine(9), async_op=at.later), whole)


def reduce_scatter(at: Site) -> list[Tensor]:
    part, parts = at.zeros(5), [at.mine(5) + r for r in range(at.size)]
    return at.done(dist.reduce_scatter(part, parts, async_op=at.later), part)


def reduce(at: Site) -> list[Tensor]:
    a = at.mine(33)
    return at.done(dist.reduce(a, 1, async_op=at.later), *([a] if at.rank == 1 else []))


def gather(at: Site) -> list[Tensor]:
    parts = at.each(4) if at.rank == 0 else []
    work = dist.gather(at.mine(4), parts or None, dst=0, async_op=at.later)
    return at.done(work, *parts)


def scatter(at: Site) -> list[Tensor]:
    part, parts = at.zeros(4), [at.mine(4) + r for r in range(at.size)]
    work = dist.scatter(part, parts if at.rank == 0 else None, async_op=at.later)
    return at.done(work, part)


def all_to_all(at: Site) -> list[Tensor]:
    outputs, inputs = at.each(6), [at.mine(6) + 10 * r for r in range(at.size)]
    return at.done(dist.all_to_all(outputs, inputs, async_op=at.later), *outputs)


def all_to_all_with_splits(at: Site) -> list[Tensor]:
    gives, takes = [1 + r for r in range(at.size)], [1 + at.rank] * at.size
    output, given = at.zeros(sum(takes)), at.mine(sum(gives))
    takes, gives = ([at.unit * n for n in splits] for splits in (takes, gives))
    work = dist.all_to_all_single(output, given, takes, gives, async_op=at.later)
    return at.done(work, output)


def messages(at: Site) -> list[Tensor]:
    got = at.zeros(800)
    ops = [
        dist.P2POp(dist.isend, at.mine(800), (at.rank + 1) % at.size),
        dist.P2POp(dist.irecv, got, (at.rank - 1) % at.size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [got]


def coalesced(at: Site) -> list[Tensor]:
    a, b = at.mine(5), at.mine(4000)
    with dist._coalescing_manager(device=at.device, async_ops=at.later) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    if at.later:
        manager.wait()
    return [a, b]


def barrier(at: Site) -> list[Tensor]:
    return at.done(dist.barrier(async_op=at.later))


def in_one_memory(at: Site) -> list[Tensor]:
    """Calls whose outputs overlap their inputs, each on memory of its own."""
    p, n, after = at.size, at.unit * 6, (at.rank + 1) % at.size
    own, other = slice(at.rank * n, (at.rank + 1) * n), slice(after * n, (after + 1) * n)
    group, results = dist.group.WORLD, [at.mine(6 * (p + 1)) for _ in range(9)]
    assert group is not None
    a, b, c, d, e, f, g, h, k = results
    works = [
        dist.all_gather_into_tensor(a[: p * n], a[own], async_op=at.later),
        dist.all_gather_into_tensor(b[: p * n], b[other], async_op=at.later),
        dist.reduce_scatter_tensor(c[own], c[: p * n], async_op=at.later),
        dist.reduce_scatter_tensor(d[3 : n + 3], d[: p * n], async_op=at.later),
        dist.all_to_all_single(e[: p * n], e[: p * n], async_op=at.later),
        dist.all_to_all_single(f[3 : p * n + 3], f[: p * n], async_op=at.later),
        dist.all_gather(list(g[: p * n].chunk(p)), g[other], async_op=at.later),
    ]
    for work in works:
        at.done(work)
    group.allreduce_coalesced([h[: p * n], h[n:]]).wait()
    first, second = k[: p * n], at.zeros(6 * p)
    group.allgather_into_tensor_coalesced([first, second], [k[own], k[other]]).wait()
    return [*results, second]


CALLS: list[Callable[[Site], list[Tensor]]] = [
    all_reduce_of_a_view,
    broadcast,
    all_gather,
    all_gather_of_uneven_parts,
    all_gather_into_tensor,
    reduce_scatter,
    reduce,
    gather,
    scatter,
    all_to_all,
    all_to_all_with_splits,
    messages,
    coalesced,
    in_one_memory,
    barrier,
]


# Beside those, where each is a call of its own.


def all_reduces(at: Site) -> list[Tensor]:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    ops += [dist.ReduceOp.AVG] if at.dtype.is_floating_point else []
    results = [at.mine(1000) for _ in ops]
    for op, result in zip(ops, results, strict=True):
        dist.all_reduce(result, op)
    return results


def all_reduce_in_strides(at: Site) -> list[Tensor]:
    whole = torch.stack([at.mine(1000), at.mine(1000) + 1], dim=1)
    dist.all_reduce(whole.t())  # not contiguous, but dense
    return [whole]


def reduce_scatter_tensor(at: Site) -> list[Tensor]:
    part = at.zeros(5)
    dist.reduce_scatter_tensor(part, at.mine(5 * at.size))
    return [part]


def all_to_all_single(at: Site) -> list[Tensor]:
    output = at.zeros(6 * at.size)
    dist.all_to_all_single(output, at.mine(6 * at.size))
    return [output]


def send_and_recv(at: Site) -> list[Tensor]:
    got, after, before = at.zeros(800), (at.rank + 1) % at.size, (at.rank - 1) % at.size
    if at.rank % 2 == 0:
        dist.send(at.mine(800), after)
    dist.recv(got, before)
    if at.rank % 2:
        dist.send(at.mine(800), after)
    return [got]


MORE = [all_reduces, all_reduce_in_strides, reduce_scatter_tensor, all_to_all_single, send_and_recv]
