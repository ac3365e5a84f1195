"""ringreduce.horovod: the API of horovod.torch.  tests/horovod_programs.py runs random programs."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import logging
import operator
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod_programs
import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Died, Pool, Raised, Rank, on_ranks
from torch import nn
from torch.nn import functional

import ringreduce.horovod as hvd
import ringreduce.horovod.torch as hvd_torch
from ringreduce.horovod import _collectives, _world
from ringreduce.horovod._settings import Settings

PRELOAD = ["ringreduce.horovod"]
Tensor = torch.Tensor

# What horovod.torch 0.28 imports into its name space, by hand.
NAMES = """
    elastic Compression allgather_object broadcast_object broadcast_optimizer_state
    broadcast_parameters allreduce allreduce_async allreduce_ allreduce_async_
    grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_
    sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
    broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
    reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
    join barrier poll synchronize init shutdown is_initialized start_timeline stop_timeline
    size local_size cross_size rank local_rank cross_rank mpi_threads_supported mpi_enabled
    mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
    ProcessSet global_process_set add_process_set remove_process_set
    Average Sum Adasum Min Max Product HorovodInternalError DistributedOptimizer SyncBatchNorm
"""
# Horovod's modules that scripts import from, and what they look for there.
MODULES = {
    "mpi_ops": "allreduce_async_ synchronize rank size init shutdown is_homogeneous Average Sum",
    "compression": "Compression Compressor NoneCompressor FP16Compressor",
    "functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "optimizer": "DistributedOptimizer",
    "sync_batch_norm": "SyncBatchNorm",
    "elastic": "run TorchState ElasticSampler",
    "elastic.state": "TorchState",
    "elastic.sampler": "ElasticSampler",
}
REDUCES = "average name op prescale_factor postscale_factor process_set"
SIGNATURES = {
    **{
        f"{grouped}allreduce{way}": f"{one} {REDUCES}"
        for grouped, one in (("", "tensor"), ("grouped_", "tensors"))
        for way in ("_async", "_", "_async_")
    },
    "allreduce": "tensor " + REDUCES.replace("name", "name compression"),
    "grouped_allreduce": "tensors " + REDUCES.replace("name", "name compression"),
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    **{
        f"broadcast{way}": "tensor root_rank name process_set"
        for way in ("", "_", "_async", "_async_")
    },
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": (
        "tensors name compression op process_set prescale_factor postscale_factor"
    ),
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device",
    "barrier": "process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
    "DistributedOptimizer": (
        "optimizer named_parameters compression backward_passes_per_step op "
        "gradient_predivide_factor num_groups groups sparse_as_dense process_set"
    ),
    "init": "comm process_sets",
    "start_timeline": "file_path mark_cycles",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}


def test_names_and_parameters() -> None:
    assert [name for name in NAMES.split() if not hasattr(hvd_torch, name)] == []
    assert callable(hvd.run)
    for module, names in MODULES.items():
        imported = importlib.import_module(f"ringreduce.horovod.torch.{module}")
        assert operator.attrgetter(module)(hvd) is operator.attrgetter(module)(hvd_torch)
        assert operator.attrgetter(module)(hvd) is imported
        assert [name for name in names.split() if not hasattr(imported, name)] == [], module
    for name, parameters in SIGNATURES.items():
        found = list(inspect.signature(getattr(hvd_torch, name)).parameters)
        wanted = parameters.split()
        assert found[: len(wanted)] == wanted, name


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def job(function: Callable[..., Any]) -> Callable[..., Any]:
    """A job between init and shutdown."""

    @functools.wraps(function)
    def run(me: Rank, *args: Any) -> Any:
        hvd.init()
        try:
            return function(me, *args)
        finally:
            hvd.shutdown()

    return run


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(*tensors: Tensor) -> bool:
    """Whether all ranks have the same tensors.  Collective."""
    return len(set(hvd.allgather_object(oracle.digest(*tensors)))) == 1


# ---- ranks and process sets


@job
def ranks_and_sets(me: Rank) -> None:
    assert (hvd.rank(), hvd.size()) == (me.rank, me.world_size) == (hvd.local_rank(), 3)
    assert (hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (3, 0, 1)
    assert hvd.is_homogeneous() and hvd.is_initialized()
    hvd.init()  # without effect
    assert hvd.global_process_set.process_set_id == 0 and hvd.global_process_set.size() == 3
    some = hvd.add_process_set([2, 0])
    assert (some.ranks, some.size(), some.process_set_id) == ([0, 2], 2, 1)
    assert some.rank() == {0: 0, 1: -1, 2: 1}[me.rank] and some.included() == (me.rank != 1)
    with pytest.raises(ValueError, match="a process set of ranks"):
        hvd.add_process_set(hvd.ProcessSet([0, 2]))
    with pytest.raises(ValueError, match=r"ranks \[0, 3\] in a job of 3"):
        hvd.add_process_set([0, 3])
    if me.rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            hvd.allreduce(torch.ones(1), process_set=some)
    else:
        total = hvd.allreduce(torch.tensor([me.rank + 1]), op=hvd.Sum, process_set=some)
        assert total.item() == 4
        assert hvd.broadcast(torch.tensor([me.rank]), 2, process_set=some).item() == 2
    assert hvd.remove_process_set(some) and not hvd.remove_process_set(some)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="has not been added"):
        hvd.barrier(some)


def two_hosts(me: Rank) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_world, "_host", lambda: "ab"[me.rank // 2])
        hvd.init()
        try:
            assert hvd.allreduce(torch.ones(5), op=hvd.Sum).eq(3).all()
            found = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
            return (*found, hvd.is_homogeneous())
        finally:
            hvd.shutdown()


def before_init(me: Rank) -> None:
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()  # without effect


def test_ranks_and_process_sets(pool: Pool, world: MakeWorld) -> None:
    pool.run(before_init, world(3))
    pool.run(ranks_and_sets, world(3))
    hosts = [(0, 2, 0, 2, False), (1, 2, 0, 1, False), (0, 1, 1, 2, False)]
    assert pool.run(two_hosts, world(3)) == hosts


# ---- collectives


@job
def plain_calls(me: Rank) -> None:
    """What the random programs do not call: blocking calls, handles, compression, odd tensors."""
    r, n = me.rank, me.world_size
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool):
        ones = torch.ones(3).to(dtype)
        total = hvd.allreduce(ones, op=hvd.Sum)
        assert total.dtype == dtype and torch.equal(total, (ones.int() * n).to(dtype))
    with pytest.warns(DeprecationWarning, match="use op"):
        assert hvd.allreduce(torch.tensor([2.0 * r]), average=False).item() == n * (n - 1)
    halves = hvd.allreduce(torch.ones(3) / 3, compression=hvd.Compression.fp16)
    assert halves.dtype == torch.float32 and torch.equal(halves, (torch.ones(3) / 3).half().float())
    one, two = torch.full((2,), float(r)), torch.tensor(r)
    got = hvd.grouped_allreduce_([one, two], op=hvd.Max)
    assert got[0] is one and got[1] is two and one.eq(n - 1).all() and int(two) == n - 1
    parameter = nn.Parameter(torch.tensor([float(r)]))
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter  # a leaf that wants a gradient
    assert hvd.broadcast_(parameter, 0) is parameter and parameter.item() == n * (n - 1) / 2
    with torch.inference_mode():
        inferred = torch.tensor([1.0 + r])
        assert hvd.allreduce_(inferred, op=hvd.Min).item() == 1.0
        assert len(hvd.allgather(inferred)) == n
    received = hvd.alltoall(torch.arange(n) + 10 * r)
    assert received.tolist() == [10 * k + r for k in range(n)]
    handle = hvd.allgather_async(torch.tensor([[r]]), name="rows")
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == [[k] for k in range(n)]
    assert hvd.broadcast_object({"a": r} if r == 1 else None, root_rank=1) == {"a": 1}
    assert hvd.allgather_object("x" * r) == ["x" * k for k in range(n)]
    row = torch.tensor([[r, 1]])
    sparse = torch.sparse_coo_tensor(row, torch.ones(2, 3), (n + 2, 3))
    mean = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)()
    assert torch.allclose(mean.to_dense().sum(1), _rows_hit(n) * 3 / n)
    hvd.barrier()


def with_defaults(me: Rank) -> None:
    """Tensors of ringreduce are on CPUs, and of their own dtype, whatever torch's defaults are."""
    r, n = me.rank, me.world_size
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")  # whose tensors hold nothing, so each use would show
    try:
        hvd.init()
        cpu = functools.partial(torch.full, dtype=torch.float32, device="cpu")
        assert hvd.broadcast_object({"a": r}, root_rank=1) == {"a": 1}
        assert hvd.allgather_object("x" * r) == ["x" * k for k in range(n)]
        rows = cpu((r + 1, 2), 1.0).requires_grad_()
        hvd.allgather(rows).sum().backward()
        assert rows.grad is not None and rows.grad.eq(1).all()
        assert hvd.alltoall(cpu((n,), r), [1] * n)[1].tolist() == [1] * n
        index = torch.tensor([[r, 1]], device="cpu")
        sparse = torch.sparse_coo_tensor(index, cpu((2, 3), 1.0), (n + 2, 3), device="cpu")
        assert hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense().sum() == 6 * n
        layers = nn.Linear(2, 3), hvd.SyncBatchNorm(3)
        net = nn.Sequential(*layers).to_empty(device="cpu").float()
        for p in net.parameters():
            nn.init.constant_(p, r + 1.0)
        layers[1].reset_running_stats()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            net.named_parameters(),
            compression=hvd.Compression.int8,
        )
        state = hvd.elastic.TorchState(net, optimizer, step=r)
        state.sync()
        net(cpu((2, 2), r) * cpu((2, 1), 1.0).cumsum(0)).square().sum().backward()
        optimizer.step()
        assert not state._told_by_root(flag=False) and state.step == 0
        hvd.broadcast_optimizer_state(optimizer, 1)
        state.commit()
        told = hvd.allgather_object([p.tolist() for p in net.parameters()])
        assert told == [told[0]] * n and hvd.join() in range(n)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        hvd.shutdown()


def _rows_hit(n: int) -> Tensor:
    hits = torch.zeros(n + 2)
    for k in range(n):
        hits[k] += 1
        hits[1] += 1
    return hits


def test_plain_calls(pool: Pool, world: MakeWorld) -> None:
    pool.run(plain_calls, world(3))
    pool.run(with_defaults, world(2))


@job
def gradients(me: Rank) -> None:
    """By Horovod's rules: gradients of gathers and broadcasts are averaged over the ranks."""
    r, n = me.rank, me.world_size

    def weight(rank: int, *shape: int) -> Tensor:
        return drawn(*shape, seed=rank)

    def gradient(function: Callable[[Tensor], Any], *shape: int) -> Tensor:
        """Of the sum of the output times this rank's weights."""
        x = torch.ones(*shape, requires_grad=True)
        y = function(x)
        (y * weight(r, *y.shape)).sum().backward()
        assert x.grad is not None
        return x.grad

    mean = torch.stack([weight(k, 4, 2) for k in range(n)]).mean(0)
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(gradient(hvd.allreduce, 4, 2), mean)
    close(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5), 4, 2), mean * n / 2)
    close(gradient(lambda x: sum(hvd.grouped_allreduce([x, 2 * x])), 4, 2), 3 * mean)
    close(gradient(lambda x: hvd.broadcast(x, 1), 4, 2), mean if r == 1 else torch.zeros(4, 2))

    rows = sum(range(1, n + 1))
    whole = torch.stack([weight(k, rows, 2) for k in range(n)]).mean(0)
    begin = sum(range(1, r + 1))
    close(gradient(hvd.allgather, r + 1, 2), whole[begin:][: r + 1])
    close(gradient(lambda x: hvd.grouped_allgather([x, x])[1], r + 1, 2), whole[begin:][: r + 1])

    # Rank a sends a + b rows to rank b.
    splits = torch.tensor([[a + b for b in range(n)] for a in range(n)])
    sent = [weight(b, int(splits[:, b].sum()), 2).split(splits[:, b].tolist())[r] for b in range(n)]
    total = int(splits[r].sum())
    close(gradient(lambda x: hvd.alltoall(x, splits[r])[0], total, 2), torch.cat(sent))
    assert hvd.alltoall(torch.zeros(total), splits[r])[1].tolist() == splits[:, r].tolist()

    own = [7 // n + (k < 7 % n) for k in range(n)]
    gathered = torch.cat([weight(k, own[k], 2) for k in range(n)])
    close(gradient(hvd.reducescatter, 7, 2), gathered)
    close(
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=3.0), 7, 2),
        gathered * n * 3,
    )


def test_gradients_of_collectives(pool: Pool, world: MakeWorld) -> None:
    pool.run(gradients, world(3))


@on_ranks(3)
@job
def test_arguments_are_refused_before_anything_is_sent(me: Rank) -> None:
    ones = torch.ones(4)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: hvd.allreduce(ones, op=9), "no reduction operation 9"),
        (lambda: hvd.allreduce(ones, average=True, op=hvd.Sum), "op or average, not both"),
        (lambda: hvd.allreduce_async(ones.view(2, 2).t()), "contiguous"),
        (lambda: hvd.allreduce_async(ones.to_sparse()), "takes dense tensors"),
        (lambda: hvd.allreduce(ones.to(torch.complex64)), "cannot take Average of torch.complex64"),
        (lambda: hvd.allreduce(ones > 0), "cannot take Average of torch.bool"),
        (lambda: hvd.reducescatter(ones.to(torch.uint16)), "cannot take Average of torch.uint16"),
        (lambda: hvd.grouped_allreduce([]), "of no tensors"),
        (lambda: hvd.allgather(torch.tensor(1)), "one dimension or more"),
        (lambda: hvd.reducescatter(torch.tensor(1)), "one dimension or more"),
        (lambda: hvd.broadcast(ones, 7), "broadcast from rank 7"),
        (lambda: hvd.broadcast(ones, True), "root_rank is an integer, not True"),
        (lambda: hvd.broadcast(ones, 1.0), "root_rank is an integer, not 1.0"),
        (lambda: hvd.alltoall(ones[:3], torch.tensor([1.5, 1.5, 0.0])), "a split is an integer"),
        (lambda: hvd.alltoall(ones[:3], [1.0, 1.0, 1.0]), "a split is an integer, not 1.0"),
        (lambda: hvd.alltoall(ones[:2], torch.tensor([True, True, False])), "integer, not True"),
        (lambda: hvd.alltoall_async(ones, [True, 2, 1]), "a split is an integer, not True"),
        (lambda: hvd.alltoall(ones, torch.ones(3, 1).int()), r"a split is an integer, not \[1\]"),
        (lambda: hvd.alltoall(ones, 4), "splits is a list of integers, not 4"),
        (lambda: hvd.alltoall(ones, [-1, 5, 0]), "cannot be negative"),
        (lambda: hvd.alltoall(ones, [1, 1, 1, 1]), "4 splits for 3 ranks"),
        (lambda: hvd.alltoall(ones, [1, 1, 1]), "add up to 3, but the first dimension"),
        (lambda: hvd.alltoall(ones), "dimension of the tensor, 4, is not a multiple of 3"),
        (lambda: hvd.broadcast_parameters(3, 0), "takes a dict or a list"),
        (lambda: hvd.init([0]) or hvd.ProcessSet([1, 1]), "can be in a ProcessSet once"),
        (lambda: hvd.ProcessSet(7), "no MPI communicators"),
        (lambda: hvd.ProcessSet([0, 1.0]), "a rank of a ProcessSet is an integer, not 1.0"),
        (lambda: hvd.allreduce(ones, op=1.0), "op is an integer, not 1.0"),
        (lambda: hvd.mpi_threads_supported(), "MPI"),
    ]
    for call, text in refused:
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(NotImplementedError, match="reducescatter has no Adasum"):
        hvd.reducescatter(ones, op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="power of 2, not 3"):
        hvd.allreduce(ones, op=hvd.Adasum)
    assert hvd.allreduce(ones).eq(1).all()
    received = hvd.alltoall(ones, np.array([4, 0, 0]))[1]  # integers of numpy are integers
    assert received.tolist() == [0 if me.rank else 4] * 3
    # A name is used by one operation at a time.
    if me.rank == 1:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
        with pytest.raises(ValueError, match=r"'allreduce.twice' and not all ranks"):
            hvd.allreduce_async(torch.ones(2), name="twice")
    hvd.barrier()
    again = first if me.rank == 1 else hvd.allreduce_async(torch.ones(2), name="twice")
    assert hvd.synchronize(again).eq(1).all()


# Of a call by rank 1 and the others, what the error must say.
MISMATCHES: dict[str, tuple[Callable[[bool], Any], Sequence[str]]] = {
    "dtype": (
        lambda is_other: hvd.allreduce(torch.ones(2).to((torch.float32, torch.float64)[is_other])),
        ("data types", "float32", "float64"),
    ),
    "shape": (lambda is_other: hvd.allreduce(torch.ones(2 + is_other)), ("shapes", "(2,)", "(3,)")),
    "dimensions": (
        lambda is_other: hvd.allgather(torch.ones([2, 1][: 2 - is_other])),
        ("ALLGATHER tensor ranks", "has 2", "has 1"),
    ),
    "columns": (
        lambda is_other: hvd.alltoall(torch.ones(3, 2 + is_other)),
        ("ALLTOALL tensor shapes", "(2,)", "(3,)"),
    ),
    "op": (
        lambda is_other: hvd.reducescatter(torch.ones(3), op=hvd.Max if is_other else hvd.Min),
        ("reduction operation", "Min", "Max"),
    ),
    "scale": (
        lambda is_other: hvd.allreduce(torch.ones(3), postscale_factor=1.0 + is_other),
        ("postscale", "(1.0, 1.0)", "(1.0, 2.0)"),
    ),
    "root": (lambda is_other: hvd.broadcast(torch.ones(3), int(is_other)), ("root ranks",)),
    "number": (
        lambda is_other: hvd.grouped_allreduce([torch.ones(3)] * (2 + is_other)),
        ("numbers of tensors", "has 2", "has 3"),
    ),
    "codec": (
        lambda is_other: hvd.allreduce(
            torch.ones(3), compression=(hvd.Compression.none, hvd.Compression.int8)[is_other]
        ),
        ("compression", "none", "int8"),
    ),
}


@on_ranks(3)
@job
def test_mismatches_name_ranks_and_values(me: Rank) -> None:
    for name, (call, parts) in MISMATCHES.items():
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call(me.rank == 1)
        text = str(caught.value)
        assert "rank 0 has" in text and "but rank 1 has" in text, (name, text)
        assert all(part in text for part in parts), (name, text)
    assert hvd.allreduce(torch.ones(2)).eq(1).all()  # and the job goes on


# ---- ranks that are lost, leave, are late, or have no more data


@job
def until_lost(me: Rank) -> str:
    pair = hvd.add_process_set([1, 2])
    hvd.allreduce(torch.ones(5), name="known")
    if me.rank == 2:
        me.tell("ready")
        time.sleep(100)
    pending = [hvd.allreduce_async(torch.ones(5), name=name) for name in ("known", "new")]
    if me.rank == 1:
        pending.append(hvd.allgather_async(torch.ones(5), process_set=pair))
    me.tell("ready")
    told = []
    for handle in pending:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.synchronize(handle)
        told.append(str(caught.value))
    for call in (lambda: hvd.allreduce(torch.ones(5)), hvd.join, hvd.barrier):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        told.append(str(caught.value))
    return "\n".join(told)


def test_a_killed_rank_is_named(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(until_lost, world(3, 20.0), fresh=True)
    call.hear_all("ready")
    call.signal(2, signal.SIGKILL)
    outcomes = call.outcomes()
    assert outcomes[2] == Died(2, -signal.SIGKILL)
    for outcome in outcomes[:2]:
        assert not isinstance(outcome, Raised | Died), outcome
        for line in getattr(outcome, "value", "").splitlines():
            assert "rank 2 " in line, line


def until_another_leaves(me: Rank) -> str:
    """Rank 0 waits in a set that the lost rank is not in, and rank 1 leaves because of it."""
    hvd.init()
    try:
        pair = hvd.add_process_set([0, 1])
        handle = hvd.allreduce_async(torch.ones(1), process_set=pair) if me.rank == 0 else None
        me.tell("ready")
        if me.rank == 2:
            time.sleep(100)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.synchronize(handle) if handle is not None else hvd.barrier()
        return str(caught.value)
    finally:
        hvd.shutdown()


def test_a_rank_that_leaves_tells_why(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(until_another_leaves, world(3, 20.0), fresh=True)
    call.hear_all("ready")
    call.signal(2, signal.SIGKILL)
    told = [getattr(outcome, "value", outcome) for outcome in call.outcomes()[:2]]
    assert all("rank 2 " in str(text) for text in told), told
    assert "rank 1 called hvd.shutdown() or exited, after an error: " in str(told[0])


@pytest.mark.slow
def test_a_rank_killed_at_a_random_moment() -> None:
    assert all(horovod_programs.kill_one(2 + seed % 3, seed) for seed in range(30))


@job
def fails_in_a_cycle(me: Rank) -> None:
    """An operation of the cache was found ready in the cycle that fails."""
    coordinator = _world.coordinator_of(hvd.global_process_set)
    hvd.allreduce(torch.ones(1), name="known")

    def fail(*_: Any) -> str:
        raise RuntimeError("rank 7 is lost")

    with coordinator._changed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "_exchange", fail)
        handles = [hvd.allreduce_async(torch.ones(1), name=name) for name in ("known", "new")]
        while coordinator._failure is None:
            coordinator._changed.wait(0.01)
    for handle in handles:
        with pytest.raises(hvd.HorovodInternalError, match="rank 7 is lost"):
            hvd.synchronize(handle)


def out_of_memory(me: Rank) -> str:
    hvd.init()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if me.rank == 1:

                def fail(*_: Any) -> None:
                    raise MemoryError("no memory for rows")

                patch.setattr(_collectives.Runner, "_all_gather", fail)
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allgather(torch.ones(3))
        return str(caught.value)
    finally:
        hvd.shutdown()


def test_no_operation_is_forgotten_in_a_failure(pool: Pool, world: MakeWorld) -> None:
    pool.run(fails_in_a_cycle, world(1))
    told = pool.run(out_of_memory, world(3))
    assert told[1] == "no memory for rows"
    assert "rank 1 " in told[0] and "rank 1 " in told[2], told


def one_leaves(me: Rank) -> str:
    hvd.init()
    try:
        hvd.allreduce(torch.ones(1), name="known")
        if me.rank == 1:
            return ""
        for name in ("known", "new"):
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(torch.ones(1), name=name)
        return str(caught.value)
    finally:
        hvd.shutdown()


def test_a_rank_that_shuts_down_is_named(pool: Pool, world: MakeWorld) -> None:
    told = pool.run(one_leaves, world(3))
    assert told[0] == told[2] and "rank 1 called hvd.shutdown() or exited" in told[0]
    pool.run(plain_calls, world(3))  # and can all start again


@on_ranks(3)
@job
def test_join(me: Rank) -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), named_parameters=net.named_parameters()
    )
    for step in range(4 + 3 * me.rank):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert net.weight.grad is not None
        there = [3, 3, 3, 3, 2, 2, 2, 1, 1, 1][step]
        assert torch.allclose(net.weight.grad, torch.full((1, 2), there / 3)), step
    if me.rank == 2:
        for _ in range(2):  # the second time it is known
            for call in (hvd.allgather, lambda t: hvd.broadcast(t, 2), hvd.reducescatter):
                with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
                    call(torch.ones(3))
        time.sleep(0.1)
    assert (last := hvd.join()) == 2
    # Unnamed operations are counted, and rank 2 has had more.
    assert hvd.allgather(torch.tensor([last]), name="after").tolist() == [2, 2, 2]


def late_rank(me: Rank) -> list[str]:
    lines: list[str] = []
    store = dist.distributed_c10d._get_default_store()

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        store.set(f"logged {len(lines)}", "1")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("ringreduce.horovod").addHandler(handler)
    given = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"} if me.rank == 0 else {}
    try:
        with environment(**given):
            hvd.init()
        for turn in range(2):  # the second time the name is in the cache
            if me.rank == 1:
                store.wait([f"logged {turn + 1}"])
            if me.rank == 2 and turn == 1:  # asked for its request before it would tell it itself
                time.sleep(0.6)
            hvd.allreduce(torch.ones(1), name="late")
        return lines
    finally:
        logging.getLogger("ringreduce.horovod").removeHandler(handler)
        hvd.shutdown()


def never_comes(me: Rank) -> str:
    given = {"CHECK": "0.1", "SHUTDOWN": "0.5"} if me.rank == 0 else {}
    with environment(**{f"HOROVOD_STALL_{k}_TIME_SECONDS": v for k, v in given.items()}):
        hvd.init()
    try:
        hvd.allreduce(torch.ones(1), name="known")
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name=("known", "other")[me.rank])
        return str(caught.value)
    finally:
        hvd.shutdown()


def test_a_stall_is_logged_and_can_end_the_job(pool: Pool, world: MakeWorld) -> None:
    found = pool.run(late_rank, world(3))
    lines = [line for lines in found for line in lines]
    late = [line for line in lines if "'allreduce.late' has waited" in line]
    assert len(late) == 2 and all("for ranks [1]" in line for line in late), lines
    for told in pool.run(never_comes, world(2)):  # the one or the other waits for longer
        waited = "'allreduce.known' of ranks [1]", "'allreduce.other' of ranks [0]"
        assert (
            any(text in told for text in waited) and "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)" in told
        )


# ---- DistributedOptimizer

STEPS, BATCH = 4, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(drawn(*p.shape, seed=k) / 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


def loss_of(net: nn.Module, step: int, ranks: Sequence[int]) -> Tensor:
    """Of the batches of some ranks."""
    x = torch.cat([drawn(BATCH, 6, seed=100 * step + r) for r in ranks])
    y = torch.cat([drawn(BATCH, 3, seed=10_000 + 100 * step + r) for r in ranks])
    return functional.mse_loss(net(x), y)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def expected(ranks: Sequence[int], passes: int = 1, factor: float = 1.0) -> list[Tensor]:
    """Parameters of one process with the batches of all ranks."""
    net = Net()
    optimizer = sgd(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(passes):
            (loss_of(net, step * passes + k, ranks) * factor).backward()
        optimizer.step()
    return list(net.parameters())


@on_ranks(3)
@job
def test_an_optimizer_trains_as_one_process_with_all_batches(me: Rank) -> None:
    everyone = list(range(me.world_size))
    pair = hvd.add_process_set([0, 1])
    makes: dict[str, Callable[[Net], dict[str, Any]]] = {
        "plain": lambda net: {},
        "two passes": lambda net: {"backward_passes_per_step": 2},
        "groups": lambda net: {"groups": 3},
        "lists": lambda net: {"groups": [list(net.second.parameters()), [net.first.bias]]},
        "predivide": lambda net: {"gradient_predivide_factor": 4.0},
        "sum": lambda net: {"op": hvd.Sum},
        "grouped sum": lambda net: {"op": hvd.Sum, "groups": 1},
        "some ranks": lambda net: {"process_set": pair},
    }
    for name, make in makes.items():
        net = Net()
        options = make(net)
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **options)
        passes = options.get("backward_passes_per_step", 1)
        assert optimizer.backward_passes_per_step == passes
        for step in range(STEPS):
            optimizer.zero_grad()
            for k in range(passes):
                loss_of(net, step * passes + k, [me.rank]).backward()
            optimizer.step()
        ranks = everyone
        if name == "some ranks":
            ranks = [0, 1] if me.rank < 2 else [me.rank]
        factor = me.world_size if "sum" in name else 1.0
        for a, b in zip(net.parameters(), expected(ranks, passes, factor), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
        assert name == "some ranks" or same_bits(*net.parameters()), name


@on_ranks(3)
@job
def test_sparse_and_missing_gradients(me: Rank) -> None:
    r, n = me.rank, me.world_size
    for as_dense in (False, True):
        table = nn.Embedding(5, 2, sparse=True)
        with torch.no_grad():
            table.weight.zero_()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense
        )
        table(torch.tensor([r, 4])).sum().backward()
        optimizer.step()
        rows = [-1 / n] * n + [0.0] * (4 - n) + [-1.0]
        torch.testing.assert_close(table.weight.detach()[:, 0], torch.tensor(rows))
    # A layer that one rank does not use.
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    hidden = net.first(torch.ones(2, 6))
    (net.second(hidden) if r else hidden).sum().backward()
    optimizer.step()
    assert net.second.bias.grad is not None
    assert torch.allclose(net.second.bias.grad, torch.full((3,), 2 * (n - 1) / n))
    assert same_bits(*net.parameters())


@job
def around_a_step(me: Rank) -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    loss_of(net, 0, [me.rank]).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    whole = Net()
    loss_of(whole, 0, range(me.world_size)).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.01), rtol=1e-4)
    with optimizer.skip_synchronize():
        optimizer.step()
    with torch.no_grad():
        for a, b in zip(net.parameters(), whole.parameters(), strict=True):
            assert b.grad is not None
            torch.testing.assert_close(a, b - 0.2 * b.grad, rtol=1e-5, atol=1e-6)
    optimizer.zero_grad()
    loss_of(net, 1, [me.rank]).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    loss_of(net, 1, [me.rank]).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(net, 2, [me.rank]).backward()
    optimizer.synchronize()
    assert same_bits(*net.parameters())


@job
def keeps_state_and_schedulers(me: Rank) -> None:
    net = Net()
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    loss_of(net, 0, [0]).backward()
    adam.step()
    before = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    wanted = adam.state_dict()
    optimizer = hvd.DistributedOptimizer(adam, net.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    found = optimizer.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert torch.equal(found["state"][0]["exp_avg"], wanted["state"][0]["exp_avg"])
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, step, [me.rank]).backward()
        optimizer.step()
        after.step()
        assert same_bits(*net.parameters())
    assert calls == [1, 1]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.01)
    assert before.get_last_lr() == [0.1]


@job
def rare_steps(me: Rank) -> None:
    # A scheduler from before drives all ranks, also after a state was loaded.
    net = Net()
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    loss_of(net, 0, [me.rank]).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 and calls == [1]

    # Gradients of a closure, of parameters that are added, and of those that are trained later.
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 1, [me.rank])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same_bits(*net.parameters())
    added, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer.add_param_group({"params": [added, frozen], "lr": 0.5})
    for step in range(2):
        optimizer.zero_grad()
        (loss_of(net, step, [me.rank]) + (added + frozen).sum() * me.rank).backward()
        optimizer.step()
        frozen.requires_grad_(True)
    assert added.tolist() == [-0.5, -0.5] and frozen.tolist() == [-0.25, -0.25]
    assert same_bits(*net.parameters())

    # A mismatch of one gradient leaves the others, and the next step, as they are.
    one, other = nn.Parameter(torch.zeros(2 + me.rank)), nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, other], lr=1.0))
    for _ in range(2):
        (one.sum() + other.sum()).backward()
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
            optimizer.step()
        assert other.grad is not None and other.grad.eq(1).all()
        optimizer.zero_grad()
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


@job
def refused_options(me: Rank) -> None:
    net = Net()
    named = list(net.named_parameters())
    wrap = functools.partial(hvd.DistributedOptimizer, sgd(net))
    for options, text in (
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=hvd.Average"),
        ({"op": hvd.Max}, "takes hvd.Average"),
        ({"groups": 0}, "positive number or lists"),
        ({"groups": [[net.first.bias], [net.first.bias]]}, "a parameter twice"),
        ({"groups": [[3]]}, "no tensor"),
        ({"backward_passes_per_step": 0}, "must be at least 1, not 0"),
        ({"backward_passes_per_step": 1.5}, "per_step is an integer, not 1.5"),
        ({"named_parameters": [*named, named[0]]}, "more than once: first.weight"),
        ({"named_parameters": named[1:]}, "leaves out 1 of"),
        ({"named_parameters": list(net.parameters())}, "takes pairs"),
    ):
        with pytest.raises(ValueError, match=text):
            wrap(**options)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrap(num_groups=2)


def test_what_surrounds_a_step(pool: Pool, world: MakeWorld) -> None:
    pool.run(around_a_step, world(2))
    pool.run(keeps_state_and_schedulers, world(2))
    pool.run(rare_steps, world(2))
    pool.run(refused_options, world(2))


@on_ranks(2)
@job
def test_compressed_gradients_train(me: Rank) -> None:
    for compression in ("fp16", "bf16", "int8", "int4"):
        net = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.2),
            net.named_parameters(),
            compression=getattr(hvd.Compression, compression),
        )
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = loss_of(net, 0, [me.rank])
            loss.backward()
            optimizer.step()
            losses.append(float(hvd.allreduce(loss.detach())))
        assert losses[-1] < 0.7 * losses[0], (compression, losses)
        assert same_bits(*net.parameters()), compression


@job
def adasum(me: Rank) -> None:
    """Steps of the ranks are combined as the paper has it, in pairs, and pairs of pairs."""
    net, starts = Net(), list(Net().parameters())
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Adasum)
    steps = []
    for rank in range(me.world_size):
        other = Net()
        own = sgd(other)
        loss_of(other, 0, [rank]).backward()
        own.step()
        changes = zip(other.parameters(), starts, strict=True)
        steps.append([(a - b).detach().double() for a, b in changes])
    loss_of(net, 0, [me.rank]).backward()
    optimizer.step()
    for k, p in enumerate(net.parameters()):
        level = [changes[k] for changes in steps]
        while len(level) > 1:
            level = [
                horovod_programs.adasum(a, b) for a, b in zip(level[::2], level[1::2], strict=True)
            ]
        change = p.detach().double() - starts[k].detach()
        torch.testing.assert_close(change, level[0], rtol=1e-3, atol=1e-6)
    before = loss_of(net, 0, range(me.world_size)).item()
    optimizer.param_groups[0].update(lr=0.05, momentum=0.0)
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(net, 0, [me.rank]).backward()
        optimizer.step()
    assert loss_of(net, 0, range(me.world_size)).item() < before and same_bits(*net.parameters())
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass


@pytest.mark.parametrize("size", [2, 4])
def test_adasum_of_steps(pool: Pool, world: MakeWorld, size: int) -> None:
    pool.run(adasum, world(size))


# ---- parameters, state, batch normalization, timeline


@on_ranks(3)
@job
def test_broadcast_of_parameters_and_state(me: Rank) -> None:
    net = Net()
    adam = torch.optim.Adam(net.parameters(), lr=0.1 * (me.rank + 1), amsgrad=True)
    if me.rank == 1:
        for _ in range(3):
            loss_of(net, 0, [0]).backward()
            adam.step()
    optimizer = hvd.DistributedOptimizer(adam, net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.2 and state["state"][0]["step"] == 3
    assert same_bits(*net.parameters(), *[s["exp_avg_sq"] for s in state["state"].values()])
    optimizer.zero_grad()
    loss_of(net, 1, [me.rank]).backward()
    optimizer.step()
    assert same_bits(*net.parameters())
    # Without a state yet, gradients are zeros after it, and not None; those that are there stay.
    table, dense = nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1, bias=False)
    model = nn.Sequential(table, dense)
    if me.rank == 2:
        dense.weight.grad = torch.ones(1, 2)
    hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=1.0), 0, model)
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert dense.weight.grad is not None and dense.weight.grad.eq(float(me.rank == 2)).all()
    # Lists, non-contiguous tensors, values that are no tensors.
    t = torch.full((2, 3), float(me.rank)).t()
    hvd.broadcast_parameters([("t", t), ("n", 3), ("b", torch.tensor(me.rank))], root_rank=2)
    assert t.eq(2).all()
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0)


@on_ranks(3)
@job
def test_sync_batch_norm_is_batch_norm_of_all_batches(me: Rank) -> None:
    sizes = [2, 5, 1]
    whole, own = slice(0, 8), slice(sum(sizes[: me.rank]), sum(sizes[: me.rank + 1]))
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    for momentum, shape in ((0.1, (4, 3, 2)), (None, (4,))):
        x = drawn(8, *shape, seed=0) * torch.arange(1.0, 9.0).view(8, *[1] * len(shape)) + 2
        weights = drawn(8, *shape, seed=1)
        plain: Any = nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d
        layers = [hvd.SyncBatchNorm(4, momentum=momentum), plain(4, momentum=momentum)]
        results = []
        for layer, rows in zip(layers, (own, whole), strict=True):
            with torch.no_grad():
                layer.weight.copy_(drawn(4, seed=2))
                layer.bias.copy_(drawn(4, seed=3))
            batch = x[rows].clone().requires_grad_()
            layer(batch + 1)
            y = layer(batch)
            (y * weights[rows]).sum().backward()
            results.append((y.detach(), batch.grad))
        for ours, theirs in zip(*results, strict=True):
            close(ours, theirs[own])
        for name in ("running_mean", "running_var"):
            close(getattr(layers[0], name), getattr(layers[1], name))
        for name in ("weight", "bias"):
            ours, theirs = (getattr(layer, name).grad for layer in layers)
            close(hvd.allreduce(ours, op=hvd.Sum), theirs)
        close(layers[0].eval()(x), layers[1].eval()(x))


@job
def timeline(me: Rank, path: str) -> None:
    hvd.start_timeline(f"{path}.first")
    hvd.allreduce(torch.ones(3), name="first")
    hvd.start_timeline(path, mark_cycles=True)  # takes the place of the first one
    for _ in range(2):
        hvd.allreduce(torch.ones(3), name="one")
        hvd.start_timeline(path)  # goes on
        assert me.rank or "allreduce.one" in Path(path).read_text()
    hvd.broadcast_object("x", name="two")
    hvd.barrier()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="later")
    if me.rank == 0:
        with pytest.raises(OSError, match="no such folder"):
            hvd.start_timeline("no such folder/x")


def dynamic_timeline(me: Rank, path: str) -> None:
    with environment(HOROVOD_TIMELINE="DYNAMIC"):
        hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    hvd.shutdown()
    assert not Path("DYNAMIC").exists()
    timeline(me, path)


def test_settings_name_the_variable_that_makes_no_sense() -> None:
    assert Settings.read({"HOROVOD_FUSION_THRESHOLD": "1e6"}).fusion_bytes == 1_000_000
    for name, value in {
        "HOROVOD_FUSION_THRESHOLD": "0.5",
        "HOROVOD_CACHE_CAPACITY": "many",
        "HOROVOD_CYCLE_TIME": "-1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "nan",
    }.items():
        with pytest.raises(ValueError, match=f"^{name}={value} "):
            Settings.read({name: value})


@on_ranks(2, deadline=60.0)
def test_a_bad_variable_of_rank_0_is_an_error_on_all_ranks(me: Rank) -> None:
    for name, value in ("HOROVOD_CYCLE_TIME", "soon"), ("HOROVOD_TIMELINE", "no such folder/x"):
        with environment(**({name: value} if me.rank == 0 else {})):
            with pytest.raises(ValueError, match=f"^rank 0 cannot start: .*{value}"):
                hvd.init()
            assert not hvd.is_initialized()
    hvd.init()
    hvd.barrier()
    hvd.shutdown()


def timeline_of_init(me: Rank, path: str) -> None:
    with environment(HOROVOD_TIMELINE=path):
        hvd.init()
    hvd.allreduce(torch.ones(3), name="one")
    hvd.shutdown()


def test_timeline(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    for function in (timeline, timeline_of_init, dynamic_timeline):
        path = tmp_path / function.__name__
        pool.run(function, world(2), str(path))
        events = json.loads(path.read_text())
        names = {event.get("name") for event in events}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names
        # When times are 0, which lets traces of other programs be laid beside it.
        began = events[0]["args"]["start_time_since_epoch_in_micros"]
        assert 0 < time.time() - began / 1e6 < 600
        rows = {e["args"]["name"]: e["pid"] for e in events[1:] if e.get("ph") == "M"}
        assert "allreduce.one" in rows and "allreduce.later" not in rows
        spans = [e for e in events if e.get("pid") == rows["allreduce.one"] and e["ph"] == "X"]
        assert all(e["dur"] >= 0 and e["args"]["shape"] == [[3]] for e in spans)
        assert len(spans) == (2 if function is timeline_of_init else 4)
        assert ("CYCLE_START" in names) == (function is not timeline_of_init)
        if function is not timeline_of_init:
            first = json.loads(Path(f"{path}.first").read_text())
            assert "allreduce.first" in str(first) and "allreduce.one" not in str(first)


# ---- random programs


def play(me: Rank, seeds: Sequence[int]) -> int:
    return horovod_programs.play(me.rank, me.world_size, seeds, lambda seed: print("seed", seed))


@pytest.mark.parametrize(
    "count", [20, pytest.param(170, marks=pytest.mark.nightly)], ids=["few", "many"]
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs(pool: Pool, world: MakeWorld, size: int, count: int) -> None:
    first = int(os.environ.get("RINGREDUCE_SEED", "0"))
    seeds = list(range(first, first + count))
    assert min(pool.run(play, world(size), seeds, deadline=300.0)) > count
