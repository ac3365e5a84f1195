"""Ranks that disagree about an operation: all are told, and told who differs.

What may differ of each call is in test_rules.py; here it is who differs, and how many.

A rank that did not have to wait for the others learns it at its next operation.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect
from conftest import MakeWorld
from pool import Done, Pool, Rank, on_ranks
from test_failures import add_up

import ringreduce


def _reduce(n: int = 100, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Any:
    return lambda p: dist.all_reduce(torch.ones(n, dtype=dtype), op=op)


def _coalesced(sizes: list[int], dtypes: str = "float32", manager: bool = False) -> Any:
    """An all-reduce of several tensors, which become one message if their dtypes are the same."""
    kinds = [getattr(torch, dtype) for dtype in dtypes.split()] * len(sizes)

    def call(p: int) -> None:
        tensors = [torch.ones(n, dtype=kind) for n, kind in zip(sizes, kinds, strict=False)]
        if not manager:
            dist.group.WORLD.allreduce_coalesced(tensors).wait()  # type: ignore[union-attr]
            return
        with dist._coalescing_manager(device=torch.device("cpu")):
            for tensor in tensors:
                dist.all_reduce(tensor)

    return call


def _gathered(sizes: list[int]) -> Any:
    def call(p: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        outputs = [torch.empty(p * n) for n in sizes]
        group.allgather_into_tensor_coalesced(outputs, [torch.ones(n) for n in sizes]).wait()

    return call


def _scattered(sizes: list[int]) -> Any:
    def call(p: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        inputs = [torch.ones(p * n) for n in sizes]
        group.reduce_scatter_tensor_coalesced([torch.empty(n) for n in sizes], inputs).wait()

    return call


def _averaged(sizes: list[int], codec: str = "") -> Any:
    """A bucket of DDP with parameters of these sizes, whose shapes no rank has compared."""

    def call(p: int) -> None:
        model = torch.nn.Module()
        for k, n in enumerate(sizes):
            model.register_parameter(str(k), torch.nn.Parameter(torch.ones(n)))
        model.forward = lambda: sum(t.sum() for t in model.parameters())  # type: ignore[method-assign]
        ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
        ringreduce.register_comm_hook(ddp)
        ddp().backward()

    return call


# Calls by name: what the right ranks do comes first, what the others do second.
DISAGREEMENTS: dict[str, tuple[Any, Any]] = {
    "size": (_reduce(100), _reduce(101)),
    "large size": (_reduce(300_000), _reduce(900_000)),
    "nothing": (_reduce(100), _reduce(0)),
    "dtype": (_reduce(100), _reduce(100, torch.int32)),
    "op": (_reduce(100), _reduce(100, op=dist.ReduceOp.MAX)),
    "collective": (_reduce(100), lambda p: dist.broadcast(torch.ones(100), 0)),
    "root": (
        lambda p: dist.broadcast(torch.ones(9), 0),
        lambda p: dist.broadcast(torch.ones(9), 1),
    ),
    # Messages of several tensors: as many elements, cut elsewhere.
    "borders": (_coalesced([2, 3]), _coalesced([3, 2])),
    "borders, managed": (_coalesced([2, 3], manager=True), _coalesced([3, 2], manager=True)),
    "two for one": (_coalesced([4]), _coalesced([2, 2])),
    "three for two": (_coalesced([3, 3]), _coalesced([2, 2, 2])),
    "order of dtypes": (_coalesced([2, 2], "float32 int32"), _coalesced([2, 2], "int32 float32")),
    "gathered": (_gathered([2, 3]), _gathered([3, 2])),
    "scattered": (_scattered([2, 3]), _scattered([3, 2])),
    "parameters of a bucket": (_averaged([2, 3]), _averaged([3, 2])),
}
BORDERS = list(DISAGREEMENTS)[list(DISAGREEMENTS).index("borders") :]


def disagree(me: Rank, what: str, others: list[int], style: str) -> str:
    """One operation on which `others` differ, then a next one; returns what was raised."""
    dist.all_reduce(torch.ones(2))
    call = DISAGREEMENTS[what][me.rank in others]
    time.sleep(0.02 * ((me.rank * 7) % 3))
    if style == "async" and what in ("size", "dtype", "op"):
        n, kind, op = 100, torch.float32, dist.ReduceOp.SUM
        if me.rank in others:
            n, kind = 100 + (what == "size"), torch.int32 if what == "dtype" else kind
            op = dist.ReduceOp.MAX if what == "op" else op
        dist.all_reduce(torch.ones(n, dtype=kind), op=op, async_op=True).wait()
    else:
        call(me.world_size)
    dist.all_reduce(torch.ones(2))
    return "no error"


def check(
    pool: Pool, group: Any, what: str, others: list[int], named: set[int], style: str
) -> None:
    call = pool.start(disagree, group, what, others, style, remade=True)
    outcomes = call.outcomes()
    for outcome in outcomes:
        raised = expect(outcome, "Mismatch", named)
        assert re.search(r"#1\b", raised.message), raised.message
        # Both sides' calls are told, so that a reader sees the difference.
        assert re.search(r"(?s)called .* called ", raised.message), raised.message


@pytest.mark.parametrize("style", ["blocking", "async"])
@pytest.mark.parametrize(
    ("size", "others", "named"),
    [(2, [1], {1}), (3, [0], {0}), (4, [3], {3}), (4, [1, 3], {1, 3})],
)
def test_the_minority_is_named(
    pool: Pool, world: MakeWorld, size: int, others: list[int], named: set[int], style: str
) -> None:
    """Of two halves that without the lowest rank differs."""
    for what in ("size", "dtype", "op", "collective", "root"):
        check(pool, world(size, timeout=8.0), what, others, named, style)
    assert pool.run(add_up, world(size)) == [float(sum(range(1, size + 1)))] * size


def test_borders_of_messages(pool: Pool, world: MakeWorld) -> None:
    """Ranks that put other tensors into a message of as many elements."""
    for what in BORDERS:
        check(pool, world(3, timeout=8.0), what, [1], {1}, "blocking")


def out_of_order(me: Rank) -> None:
    a, b = torch.ones(10), torch.ones(10)
    dist.all_reduce(a)
    if me.rank == 1:
        dist.broadcast(b, 0)
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.broadcast(b, 0)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_another_order(pool: Pool, world: MakeWorld, size: int) -> None:
    for outcome in pool.start(out_of_order, world(size, timeout=8.0)).outcomes():
        raised = expect(outcome, "Mismatch", {1})
        assert "all_reduce" in raised.message and "broadcast" in raised.message


def three_ways(me: Rank) -> None:
    dist.all_reduce(torch.ones(10 + me.rank))
    dist.barrier()


def test_everybody_differs(pool: Pool, world: MakeWorld) -> None:
    for outcome in pool.start(three_ways, world(3, timeout=8.0)).outcomes():
        raised = expect(outcome, "Mismatch", {1, 2})
        for count in ("10 elements", "11 elements", "12 elements"):
            assert count in raised.message


def one_more(me: Rank) -> str:
    """Rank 1 calls once more than the others, who then end normally."""
    dist.all_reduce(torch.ones(10))
    said = ""
    if me.rank == 1:
        try:
            dist.all_reduce(torch.ones(10))
        except dist.DistBackendError as error:
            said = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return said


def test_a_call_that_the_others_never_make(pool: Pool, world: MakeWorld) -> None:
    """They left the group: that is said, not waited out."""
    began = time.monotonic()
    outcomes = pool.start(one_more, world(3)).outcomes()
    assert time.monotonic() - began < 15
    said = [o.value for o in outcomes if isinstance(o, Done)]
    assert len(said) == 3, outcomes
    assert said[0] == said[2] == ""
    assert said[1].startswith("PeerLost") and "left" in said[1], said[1]
    assert blamed(said[1]) <= {0, 2} and blamed(said[1]), said[1]


@pytest.mark.parametrize("algorithm", ["ring", "direct", "twoshot"])
def test_by_every_algorithm(pool: Pool, world: MakeWorld, algorithm: str) -> None:
    for what in ("size", "large size", "dtype", "op", "nothing"):
        group = world(3, timeout=8.0, ALGORITHM=algorithm)
        check(pool, group, what, [1], {1}, "blocking")


@on_ranks(2, 20.0)
def test_threads_that_share_a_group_are_told_so(me: Rank) -> None:
    """As async_save in the group of the training: the ranks' threads come in another order."""
    said: list[str] = []

    def call(start: Any) -> None:
        try:
            works.append(start())
        except dist.DistError as error:
            said.append(str(error))

    works: list[Any] = []
    group = dist.new_group()
    starts = [
        lambda: dist.all_reduce(torch.ones(4), group=group, async_op=True),
        lambda: dist.broadcast(torch.ones(4), 0, group=group, async_op=True),
    ]
    thread = threading.Thread(target=call, args=(starts[me.rank],))
    thread.start()
    thread.join()
    call(starts[1 - me.rank])
    for work in works:
        call(work.wait)
    assert said and all("disagree on operation" in text for text in said), said
    assert any("give each thread a group of its own" in text for text in said), said
