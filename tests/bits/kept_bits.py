"""Records the bits of every call's results in kept_bits.json, to compare other versions with.

    python tests/bits/kept_bits.py COMMIT > tests/bits/kept_bits.json

COMMIT is built, and its bits are to be kept.
test_kept_bits.py compares.  A hash covers the results of one call with one dtype on all ranks, over
all ops and sizes.  It is the same over shared memory and over sockets, on one host and on two, and
by every algorithm but `hierarchical`, which has an order of addition (and a line) of its own.

Inputs are made of integers, so that no version of torch makes others.  Sums cancel, so that another
order of addition gives other numbers.  Computed NaNs count as one: their payload is the CPU's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program
import oracle
import torch
import torch.distributed as dist
from pool import Pool, Rank, World
from test_bits import reduce_op

Tensor = torch.Tensor
Record = dict[str, dict[str, str]]  # by call, by dtype or codec
FILE = Path(__file__).with_suffix(".json")
SLOT = 16384  # bytes; the default depends on the number of cores
LARGE = 1 << 20  # bytes, of a part of the cases
# The largest addend and the spread of the small ones: they lose bits of theirs when added.
SPREAD = {
    "float64": (2.0**60, 2.0**12),
    "float32": (2.0**30, 2.0**9),
    "float16": (2.0**15, 2.0**-5),
    "bfloat16": (2.0**30, 2.0**9),
}


@dataclass(frozen=True)
class Setting:
    """A group: a letter for each rank's host, RINGREDUCE_WIRE and RINGREDUCE_ALGORITHM."""

    hosts: str
    wire: str = "auto"
    algorithm: str = "auto"
    whole: bool = True  # every call, or all-reduces alone

    def __str__(self) -> str:
        return f"{self.hosts}-{self.wire}-{self.algorithm}"


def settings() -> Iterator[Setting]:
    for hosts in ("aa", "ab", "aaa", "aab", "aaaa", "aabb", "abab", "aaaaa", "aaabb"):
        for wire in ("auto", "tcp"):
            between = wire == "tcp" or "b" in hosts
            # Left to itself, a group of several hosts may choose the hierarchy.
            yield Setting(hosts, wire, "ring" if between else "auto")
            others = ("twoshot", "bruck" if between else "ring", "direct")
            for algorithm in others if len(hosts) in (3, 4) else ():
                yield Setting(hosts, wire, algorithm, whole=False)
    for hosts in ("aabb", "aabbcc", "aaabbb"):
        yield Setting(hosts, "auto", "hierarchical", whole=False)


def words(n: int, seed: int) -> Tensor:
    """64 arbitrary bits each."""
    z = (torch.arange(n) + seed * 1_000_003 + 1) * -7046029254386353131
    return (z ^ (z >> 29)) * -4658895280553007687 >> 3


@functools.cache
def table(dtype: str, op: str, rank: int) -> Tensor:
    """A rank's addends, more than any case takes."""
    kind = getattr(torch, dtype)
    z = words(LARGE // kind.itemsize + SLOT, rank)
    if dtype == "bool":
        return (z & 3) < (3 if op in ("PRODUCT", "MIN", "BAND") else 1)
    if dtype in oracle.INTEGERS:
        # Small: whether a sum that overflows is divided before or after is open.
        return (z.remainder(15) - 7 * (dtype != "uint8") if op == "AVG" else z).to(kind)
    share = ((z & 0xFFFF | 1) - 0x8000).double() / 0x8000  # in (-1, 1), never 0
    if op == "PRODUCT":
        return (1 + share / 2).to(kind)
    most, few = SPREAD[dtype]
    ends = torch.where(z & 0x10000 == 0, most, -most)
    return torch.where(z & 0x20000 == 0, ends, share * few).to(kind)


@functools.cache
def noise(rank: int) -> Tensor:
    return words((LARGE + 64 * SLOT) // 8, 100 + rank).view(torch.uint8)


@dataclass(frozen=True)
class Case:
    rank: int
    size: int
    dtype: str
    n: int
    op: str = ""

    @property
    def root(self) -> int:
        return self.n % self.size

    @property
    def part(self) -> int:
        return -(-self.n // self.size)

    def addends(self, n: int, begin: int = 0) -> Tensor:
        op = self.op if self.op in ("AVG", "PRODUCT", "MIN", "BAND") else "SUM"
        return table(self.dtype, op, self.rank)[begin : begin + n].clone()

    def sent(self, to: int, n: int) -> Tensor:
        """What this rank sends to another."""
        kind = getattr(torch, self.dtype)
        begin, width = 64 * to, kind.itemsize
        raw = noise(self.rank)[begin : begin + n * width]
        return (raw & 1).bool() if self.dtype == "bool" else raw.clone().view(kind)

    def room(self, n: int) -> Tensor:
        kind = getattr(torch, self.dtype)
        return torch.zeros(n * kind.itemsize, dtype=torch.uint8).view(kind)


def all_reduce(c: Case) -> list[Tensor]:
    t = c.addends(c.n)
    dist.all_reduce(t, op=reduce_op(c.op, c.rank))
    return [t]


def all_reduce_coalesced(c: Case) -> list[Tensor]:
    both = [c.addends(c.n), c.addends(c.n + 3, begin=5)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = reduce_op(c.op, c.rank)
    dist.group.WORLD.allreduce_coalesced(both, options).wait()  # type: ignore[union-attr]
    return both


def reduce(c: Case) -> list[Tensor]:
    t = c.addends(c.n)
    dist.reduce(t, c.root, op=reduce_op(c.op, c.rank))
    return [t]


def reduce_scatter(c: Case) -> list[Tensor]:
    counts = [c.part + r for r in range(c.size)]
    out = c.room(counts[c.rank])
    dist.reduce_scatter(out, list(c.addends(sum(counts)).split(counts)), op=reduce_op(c.op, c.rank))
    return [out]


def reduce_scatter_tensor(c: Case) -> list[Tensor]:
    out = c.room(c.part)
    dist.reduce_scatter_tensor(out, c.addends(c.part * c.size), op=reduce_op(c.op, c.rank))
    return [out]


def broadcast(c: Case) -> list[Tensor]:
    t = c.sent(0, c.n)
    dist.broadcast(t, c.root)
    return [t]


def all_gather(c: Case) -> list[Tensor]:
    outs = [c.room(c.n + r) for r in range(c.size)]
    dist.all_gather(outs, c.sent(0, c.n + c.rank))
    return outs


def all_gather_into_tensor(c: Case) -> list[Tensor]:
    out = c.room(c.n * c.size)
    dist.all_gather_into_tensor(out, c.sent(0, c.n))
    return [out]


def gather(c: Case) -> list[Tensor]:
    outs = [c.room(c.n) for _ in range(c.size)] if c.rank == c.root else []
    dist.gather(c.sent(0, c.n), outs or None, dst=c.root)
    return outs


def scatter(c: Case) -> list[Tensor]:
    out = c.room(c.n)
    parts = [c.sent(r, c.n) for r in range(c.size)] if c.rank == c.root else None
    dist.scatter(out, parts, src=c.root)
    return [out]


def all_to_all(c: Case) -> list[Tensor]:
    outs = [c.room(c.part + r + c.rank) for r in range(c.size)]
    dist.all_to_all(outs, [c.sent(r, c.part + r + c.rank) for r in range(c.size)])
    return outs


def all_to_all_single(c: Case) -> list[Tensor]:
    """Even, and with splits: between ranks a and b, one or two parts, or none."""
    even, uneven = c.room(c.part * c.size), [(c.rank + r) % 3 * c.part for r in range(c.size)]
    dist.all_to_all_single(even, c.sent(0, c.part * c.size))
    out = c.room(sum(uneven))
    dist.all_to_all_single(out, c.sent(1, sum(uneven)), uneven, uneven)
    return [even, out]


def send(c: Case) -> list[Tensor]:
    """To the next rank and, by batch_isend_irecv, to the one before."""
    after, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    one, other = c.room(c.n), c.room(c.n)
    work = dist.isend(c.sent(0, c.n), after)
    dist.recv(one, before)
    work.wait()  # type: ignore[union-attr]
    ops = [(dist.isend, c.sent(1, c.n), before), (dist.irecv, other, after)]
    for each in dist.batch_isend_irecv([dist.P2POp(*op) for op in ops]):
        each.wait()
    return [one, other]


Call = Callable[[Case], list[Tensor]]
REDUCING: tuple[Call, ...] = (
    all_reduce,
    all_reduce_coalesced,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
)
MOVING: tuple[Call, ...] = (
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    send,
)
# Every rank has the same results.
ALIKE = ("all_reduce", "all_reduce_coalesced", "broadcast", "all_gather", "all_gather_into_tensor")


def counts(dtype: str, large: bool) -> list[int]:
    width = getattr(torch, dtype).itemsize
    slot = SLOT // width
    return [1, 7, slot - 1, slot + 1, *([LARGE // width] if large else [])]


def cases(me: Rank, call: Call, dtype: str) -> Iterator[Case]:
    if call in MOVING:
        for n in counts(dtype, dtype in ("uint8", "complex128")):
            yield Case(me.rank, me.world_size, dtype, n)
        return
    for op in [o for d, o in oracle.PAIRS if d == dtype]:
        for n in counts(dtype, op == "SUM"):
            yield Case(me.rank, me.world_size, dtype, n, op)


def compressed(me: Rank, codec: str, schedule: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Results, and what this rank's encodings lost."""
    from ringreduce import backend_of, extension

    for n in (1, 129, 4097, 70_001):
        for op, stochastic in (("sum", False), ("avg", True)):
            mine = table("float32", "SUM", me.rank)[:n]
            out, error = torch.zeros(n), torch.zeros(n)
            extension().compressed_all_reduce(
                backend_of(dist.group.WORLD), mine, out, codec=codec, op=op, schedule=schedule,
                stochastic=stochastic, seed=n, error=error,
            ).wait()  # fmt: skip
            yield out, error


def results_of(me: Rank, setting: Setting) -> Iterator[tuple[str, str, list[Tensor], list[Tensor]]]:
    """Call, dtype, results that all ranks have, results that are this rank's."""
    for call in (*REDUCING, *MOVING) if setting.whole else (all_reduce,):
        name = call.__name__
        for dtype in oracle.REDUCIBLE + (oracle.MOVED if call in MOVING else ()):
            for case in cases(me, call, dtype):
                outs = call(case)
                if call in REDUCING:
                    outs = [oracle.bits(out) for out in outs]
                yield (name, dtype, outs, []) if name in ALIKE else (name, dtype, [], outs)
    for schedule in ("owner", "ring") if setting.whole else ():
        for codec in ("bfloat16", "float16", "int8", "int4"):
            for out, error in compressed(me, codec, schedule):
                yield f"compressed {schedule}", codec, [out], [error]


def measure(me: Rank, name: str, setting: Setting) -> dict[tuple[str, str], tuple[str, str]]:
    """A rank's part: hashes by call and dtype, of what all ranks have and of what is its own."""
    os.environ |= {
        "RINGREDUCE_HOSTID": f"bits {setting.hosts[me.rank]}",
        "RINGREDUCE_WIRE": setting.wire,
        "RINGREDUCE_ALGORITHM": setting.algorithm,
        "RINGREDUCE_SLOT_BYTES": str(SLOT),
    }
    me.world_size = len(setting.hosts)
    me.init(name)
    try:
        states: dict[tuple[str, str], tuple[Any, Any]] = {}
        for call, dtype, alike, own in results_of(me, setting):
            new = hashlib.blake2b(digest_size=4), hashlib.blake2b(digest_size=4)
            both = states.setdefault((call, dtype), new)
            for state, tensors in zip(both, (alike, own), strict=True):
                for t in tensors:
                    state.update(t.view(torch.uint8).numpy())
        return {key: (a.hexdigest(), b.hexdigest()) for key, (a, b) in states.items()}
    finally:
        dist.destroy_process_group()


def found(pool: Pool, setting: Setting) -> Record:
    """What the installed version gives."""
    world = World(0, "ringreduce")
    size, name = len(setting.hosts), pool.name("bits")
    by_rank = pool.start(measure, world, name, setting, ranks=size).results(150.0)
    record: Record = {}
    for call, dtype in by_rank[0]:
        both = [each[call, dtype] for each in by_rank]
        assert len({a for a, _ in both}) == 1, f"{call} {dtype}, {setting}: ranks differ"
        own = f" hierarchical {setting.hosts}" if setting.algorithm == "hierarchical" else ""
        digest = hashlib.blake2b("".join(a + b for a, b in both).encode(), digest_size=4)
        record.setdefault(f"{call}{own}, {size} ranks", {})[dtype] = digest.hexdigest()
    return record


def main() -> None:
    command = f"python tests/bits/kept_bits.py {sys.argv[1]}"
    record: Record = {"made by": {"command": command, "torch": torch.__version__}}
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder), ["ringreduce", "oracle"])
        try:
            for setting in settings():
                for line, hashes in found(pool, setting).items():
                    kept = record.setdefault(line, hashes)
                    differing = [dtype for dtype in hashes if hashes[dtype] != kept[dtype]]
                    assert not differing, f"{line}: other bits of {differing} with {setting}"
        finally:
            pool.close()
    lines = [f"{json.dumps(line)}: {json.dumps(hashes)}" for line, hashes in record.items()]
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
