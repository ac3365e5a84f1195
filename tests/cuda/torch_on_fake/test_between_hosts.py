"""Groups over several hosts: processes of this one pose as such, with NCCL between them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from blame import expect
from conftest import Machine
from gpu_jobs import use_gpu
from pool import Call, Died, Done, Pool, Rank
from test_gpu_calls import op_of, same

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_torch_jobs
from gpu_calls import CALLS, Site

ROUNDINGS = 1e-4  # of float32: two ways to add up the same shards, over some steps
LAYOUTS = ["ab", "abc", "aab", "aabb", "abab"]  # ranks' hosts
HIERARCHICAL = ["aabb", "abab"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = Path(tmp_path_factory.mktemp("ranks"))
    pool = Pool(folder, ["torch.multiprocessing", "torch.cuda", "pytest", "ringreduce", "gpu_jobs"])
    yield pool
    pool.close()


def start(
    pool: Pool,
    job: Any,
    layout: str,
    *args: Any,
    backend: str = "ringreduce",
    timeout: float = 60,
    fresh: bool = False,
) -> Call:
    """Runs a job on ranks of these hosts."""
    machine = Machine("four GPUs", pool)
    world = machine.world(0, backend=backend, RINGREDUCE_CUDA_OTHER="auto")
    name = pool.name("hosts")
    return pool.start(
        on_hosts, world, name, layout, timeout, job, args, ranks=len(layout), fresh=fresh
    )


def on_hosts(
    me: Rank, name: str, layout: str, timeout: float, job: Any, args: tuple[Any, ...]
) -> Any:
    me.world_size = len(layout)
    use_gpu(me)
    for variable in ("RINGREDUCE_HOSTID", "NCCL_HOSTID"):
        os.environ[variable] = layout[me.rank]
    try:
        me.init(name, timeout=timeout)
        return job(me, *args)
    finally:
        for variable in ("RINGREDUCE_HOSTID", "NCCL_HOSTID"):
            del os.environ[variable]


def error_of_two_sums(got: torch.Tensor, inputs: list[torch.Tensor], op: str) -> float:
    """As `oracle.worst_error`, where hosts round their sums before these are added."""
    dtype = got.dtype
    if dtype not in (torch.float16, torch.bfloat16) or op in ("MIN", "MAX"):
        return oracle.worst_error(got, inputs, op)
    terms = torch.stack([t.double() for t in inputs])
    if op == "PREMUL_SUM":
        terms *= torch.tensor([[oracle.factor(r)] for r in range(len(inputs))])
    wanted = terms.prod(0) if op == "PRODUCT" else terms.sum(0)
    most = wanted.abs() if op == "PRODUCT" else terms.abs().sum(0)
    if op == "AVG":
        wanted, most = wanted / len(inputs), most / len(inputs)
    bound = 2 * torch.finfo(dtype).eps * most + torch.finfo(dtype).tiny
    return float(((got.double() - wanted).abs() / bound).max())


def reduce_all(me: Rank, hierarchical: bool) -> None:
    """One ring has the core's bits; sums of hosts first are as good, or whole numbers exact."""
    device = torch.device("cuda", torch.cuda.current_device())
    for k, (dtype, op) in enumerate(oracle.PAIRS):
        for n in (1, 700):
            inputs = [oracle.make_input(dtype, op, n, r, k) for r in range(me.world_size)]
            gpu = inputs[me.rank].to(device)
            work = dist.all_reduce(gpu, op_of(op, me.rank), async_op=k % 2 == 0)
            if work is not None:
                work.wait()
            got, what = gpu.cpu(), f"{op} of {n} {dtype}"
            if not hierarchical:
                assert torch.equal(oracle.bits(got), oracle.bits(oracle.exact(inputs, op))), what
            else:
                assert error_of_two_sums(got, inputs, op) <= 1, what


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce(pool: Pool, layout: str) -> None:
    start(pool, reduce_all, layout, layout in HIERARCHICAL).results()


def large(me: Rank) -> str:
    """More than a slice, and more than goes whole along every rail."""
    n = 2_200_001
    x = oracle.make_input("bfloat16", "SUM", n, me.rank, 3).cuda()
    dist.all_reduce(x)
    if me.rank == 0:
        inputs = [oracle.make_input("bfloat16", "SUM", n, r, 3) for r in range(me.world_size)]
        assert error_of_two_sums(x.cpu(), inputs, "SUM") <= 1
    return oracle.digest(x.cpu())


@pytest.mark.parametrize("layout", ["abc", "aabb"])
def test_large_messages(pool: Pool, layout: str) -> None:
    assert len(set(start(pool, large, layout).results())) == 1


def on_the_cpu(me: Rank, later: bool) -> list[list[torch.Tensor]]:
    return [call(Site(me.rank, me.world_size, torch.device("cpu"), later)) for call in CALLS]


def calls(me: Rank, wanted: list[list[list[torch.Tensor]]]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for later in (False, True):
        for call, results in zip(CALLS, wanted[me.rank], strict=True):
            gpu = call(Site(me.rank, me.world_size, device, later))
            same(gpu, results, f"{call.__name__}, asynchronous: {later}")


@pytest.mark.parametrize("layout", ["ab", "aabb"])
def test_every_call(pool: Pool, layout: str) -> None:
    size = len(layout)
    wanted = pool.run(on_the_cpu, Machine("four GPUs", pool).world(size), False)
    start(pool, calls, layout, wanted).results()


@pytest.mark.parametrize("layout", ["ab", "aabb"])
@pytest.mark.parametrize("way", ["backend", "hook"])
def test_ddp(pool: Pool, layout: str, way: str) -> None:
    call = start(pool, gpu_torch_jobs.train, layout, way, "mlp", backend="cpu:gloo,cuda:ringreduce")
    for found in call.results():
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


@pytest.mark.parametrize("layout", ["abc", "aabb"])
def test_graphs_and_streams(pool: Pool, layout: str) -> None:
    assert start(pool, gpu_torch_jobs.replay, layout, 10).results() == [[]] * len(layout)
    assert start(pool, gpu_torch_jobs.two_streams, layout, 5).results() == [[]] * len(layout)


def ended_by_another_thread(me: Rank) -> str:
    x = torch.ones(100, device="cuda")
    dist.all_reduce(x)
    dist.reduce(x, 0)
    torch.cuda.synchronize()
    if me.rank == 1:
        me.hear(60)
        return ""
    dist.all_reduce(x)
    group: Any = dist.distributed_c10d._get_default_group()
    threading.Timer(0.3, group.abort).start()
    torch.cuda.synchronize()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(x)
    return type(caught.value).__name__


@pytest.mark.parametrize("layout", ["ab", "aabb"])
def test_an_abort_ends_what_waits_in_a_stream(pool: Pool, layout: str) -> None:
    call = start(pool, ended_by_another_thread, layout, fresh=True)
    others = [rank for rank in range(len(layout)) if rank != 1]
    call.await_end(others, 120)
    call.tell(1)
    for outcome in call.outcomes():
        assert outcome == Done(outcome.rank, "Aborted" if outcome.rank != 1 else "")


def until_one_dies(me: Rank, synchronize: bool) -> None:
    x = torch.ones(10_000, device="cuda")
    for k in range(10**9):
        dist.all_reduce(x, dist.ReduceOp.MAX)
        if synchronize:
            torch.cuda.synchronize()
        if k == 2:
            me.tell("flowing")


# Without synchronize() a loss is most often noticed by NCCL, in a call that it refuses.
@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.parametrize("layout", ["ab", "aabb"])
def test_a_killed_rank(pool: Pool, layout: str, synchronize: bool) -> None:
    call = start(pool, until_one_dies, layout, synchronize, fresh=True)
    call.hear_all()
    call.signal(1, signal.SIGKILL)
    outcomes = call.outcomes()
    assert isinstance(outcomes[1], Died)
    for outcome in outcomes:
        if outcome.rank != 1:
            expect(outcome, "PeerLost", [1])


def late(me: Rank) -> None:
    x = torch.ones(100, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if me.rank == 1:
        me.hear(60)
        return
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert bool(x.isnan().all())
    dist.all_reduce(x)


def test_a_late_rank_is_named(pool: Pool) -> None:
    call = start(pool, late, "abc", timeout=2, fresh=True)
    call.await_end([0, 2], 120)
    for rank in (0, 2):
        expect(call.ended[rank], "Timeout", [1])
    call.tell(1)
    call.outcomes()
