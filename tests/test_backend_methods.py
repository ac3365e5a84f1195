"""What c10d::Backend and Work offer besides collectives: hooks, timing, timeouts, abort, memory.

torch binds them to ProcessGroup, Backend and Work; a few (getError, options) it binds for its own
backends only, so Python cannot ask for them here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Raised, Rank, describe, wait_until
from torch._C._distributed_c10d import OpType, WorkResult
from torch.distributed.distributed_c10d import _coalescing_manager

CPU = torch.device("cpu")


def everything(me: Rank, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """A call of each kind through the group's own methods; returns what came of them."""
    p, r = group.size(), group.rank()
    t = torch.arange(6.0) + r
    summed, sent, rooted = t.clone(), t.clone(), t.clone()
    group.allreduce([summed]).wait()
    group.broadcast([sent]).wait()
    group.reduce(rooted, 0).wait()
    lists = [[torch.empty(6) for _ in range(p)]]
    group.allgather(lists, [t]).wait()
    whole, part = torch.empty(6 * p), torch.empty(6)
    group._allgather_base(whole, t).wait()
    group._reduce_scatter_base(part, torch.arange(6.0 * p) + r).wait()
    listed = torch.empty(6)
    group.reduce_scatter([listed], [[t + k for k in range(p)]]).wait()
    swapped = torch.empty(6 * p)
    group.alltoall_base(swapped, torch.arange(6.0 * p) + 100 * r, [], []).wait()
    turned = [torch.empty(3) for _ in range(p)]
    group.alltoall(turned, [torch.full((3,), 10.0 * r + k) for k in range(p)]).wait()
    gathered = [torch.empty(6) for _ in range(p)] if r == 0 else []
    group.gather(gathered, t, 0).wait()
    taken = torch.empty(6)
    group.scatter(taken, [t + k for k in range(p)] if r == 0 else [], 0).wait()
    both = [t.clone(), t[:3] * 2]
    group.allreduce_coalesced(both).wait()
    pair = [torch.empty(6 * p), torch.empty(2 * p)]
    group.allgather_into_tensor_coalesced(pair, [t, t[:2].contiguous()]).wait()
    halves = [torch.empty(6), torch.empty(3)]
    group.reduce_scatter_tensor_coalesced(
        halves, [torch.arange(6.0 * p), torch.arange(3.0 * p)]
    ).wait()
    came = torch.empty(6)
    if p > 1:
        work = group.send([t], (r + 1) % p, 9)
        group.recv([came], (r - 1) % p, 9).wait()
        work.wait()
    group.barrier().wait()
    kept = [summed, sent, *lists[0], whole, part, listed, swapped, *turned, taken, *both]
    kept += [*pair, *halves, *gathered]
    return [*kept, *([rooted] if r == 0 else []), *([came] if p > 1 else [])]


def like_gloo(me: Rank) -> int:
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert world is not None
    ours, theirs = everything(me, world), everything(me, gloo)
    assert len(ours) == len(theirs)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype, k
        assert torch.equal(a, b), (k, a, b)
    return len(ours)


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_gives_what_gloo_gives(pool: Pool, world: MakeWorld, size: int) -> None:
    counts = pool.run(like_gloo, world(size, 20.0))
    assert min(counts) > 15


def hooked(me: Rank) -> list[tuple[str, int, bool]]:
    group = dist.new_group()
    seen: list[Any] = []

    def hook(info: Any) -> None:
        # The operation it tells of is over, so the hook may use its group.
        seen.append((info.op_type, info.seq, info.time_started, info.time_finished, info))

    group._register_on_completion_hook(hook)
    assert group._has_hooks()
    with pytest.raises(RuntimeError):
        group._register_on_completion_hook(hook)
    began = time.monotonic()
    dist.all_reduce(torch.ones(100), group=group)
    dist.broadcast(torch.ones(4), 0, group=group, async_op=True)
    if me.rank == 0:
        dist.send(torch.ones(3), 1, group=group)
    else:
        dist.recv(torch.ones(3), 0, group=group)
    dist.barrier(group=group, async_op=True)
    dist.destroy_process_group(group)  # waits until the hooks have run
    took = time.monotonic() - began
    found = []
    for kind, seq, started, finished, info in seen:
        assert timedelta(0) <= finished - started <= timedelta(seconds=took + 1)
        assert info.active_duration.total_seconds() == pytest.approx(
            (finished - started).total_seconds(), abs=1e-3
        )
        found.append((OpType(kind).name if isinstance(kind, int) else kind.name, seq))
    return sorted(found)


@pytest.mark.ringreduce
def test_on_completion_hook(pool: Pool, world: MakeWorld) -> None:
    for rank, found in enumerate(pool.run(hooked, world(2, 20.0))):
        names = [name for name, _ in found]
        assert names == ["ALLREDUCE", "BARRIER", "BROADCAST", "RECV" if rank else "SEND"], found
        numbers = dict(found)
        assert numbers["ALLREDUCE"] < numbers["BROADCAST"] < numbers["BARRIER"], found


def hook_that_raises(me: Rank) -> list[str]:
    group = dist.new_group()

    def hook(info: Any) -> None:
        raise ValueError("from the hook")

    group._register_on_completion_hook(hook)
    said = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2), group=group),
        lambda: dist.all_reduce(torch.ones(2), group=group, async_op=True).wait(),
    ):
        try:
            call()
            said.append("")
        except Exception as error:
            said.append(str(error))
    t = torch.ones(1)
    dist.all_reduce(t)
    assert float(t) == me.world_size
    return said


@pytest.mark.ringreduce
def test_a_hook_that_raises_harms_no_operation(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(hook_that_raises, world(2, 20.0), fresh=True)
    assert call.results() == [["", ""]] * 2
    assert "from the hook" in call.log(0)


def timed(me: Rank) -> tuple[float, float, str]:
    group = dist.new_group()
    t = torch.ones(1000)
    try:
        dist.all_reduce(t, group=group, async_op=True)._get_duration()
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    dist.barrier(group=group)
    group._enable_collectives_timing()
    short = dist.all_reduce(t, group=group, async_op=True)
    short.wait()
    if me.rank == 0:
        time.sleep(0.3)
    long = dist.all_reduce(t, group=group, async_op=True)
    long.wait()
    return short._get_duration(), long._get_duration(), refused


@pytest.mark.ringreduce
def test_collective_timing(pool: Pool, world: MakeWorld) -> None:
    results = pool.run(timed, world(2, 20.0))
    for short, long, refused in results:
        assert "timing" in refused
        assert short >= 0.0
        assert long >= 0.0
    assert results[1][1] >= 250.0, "milliseconds; rank 1 waited for rank 0, which slept"


def outcomes_of_work(me: Rank) -> list[Any]:
    """Work of an operation that goes well, and of one that a rank never joins."""
    group = dist.new_group()
    good = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    code = good.get_future_result().wait()
    assert good.is_completed() and good.is_success() and good.exception() is None
    group.set_timeout(timedelta(seconds=0.4))
    found: list[Any] = [WorkResult(code).name]
    if me.rank == 0:
        began = time.monotonic()
        bad = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        future = bad.get_future_result()
        wait_until(bad.is_completed, 10.0)
        found.append(time.monotonic() - began)
        found += [bad.is_completed(), bad.is_success(), str(bad.exception())]
        found.append(WorkResult(future.wait()).name)
        try:
            bad.wait()
        except dist.DistBackendError as error:
            found.append(type(error).__name__)
    me.tell("over")
    me.hear()
    return found


@pytest.mark.ringreduce
def test_work_of_what_goes_well_and_what_fails(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(outcomes_of_work, world(2, 20.0))
    for rank in range(2):
        call.heard(rank)
    for rank in range(2):
        call.tell(rank)
    found, other = call.results()
    good, waited, completed, success, error, result, raised = found
    assert other == ["SUCCESS"]
    assert (good, completed, success, result, raised) == (
        "SUCCESS",
        True,
        False,
        "TIMEOUT",
        "Timeout",
    )
    assert 0.3 < waited < 8.0, "set_timeout holds for what is started after it"
    assert "rank 1" in error


def from_anybody(me: Rank) -> list[int]:
    sources = []
    if me.rank == 0:
        for _ in range(2 * (me.world_size - 1)):
            t = torch.empty(3)
            work = dist.group.WORLD.recv_anysource([t], 4)  # type: ignore[union-attr]
            work.wait()
            assert work.source_rank() == work._source_rank() == float(t[0])
            assert torch.equal(t, torch.full((3,), float(t[0])))
            sources.append(int(t[0]))
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(me.rank)), 0, tag=4)
    return sorted(sources)


def test_source_rank(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(from_anybody, world(3, 20.0))[0] == [1, 1, 2, 2]


def coalesced(me: Rank) -> None:
    p, r = me.world_size, me.rank
    group = dist.group.WORLD
    assert group is not None
    # torch's own manager: of a kind, and as one call where torch has one.
    many = [torch.full((n,), float(r + n)) for n in (1, 10, 5000)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for t in many:
            dist.all_reduce(t)
    manager.wait()
    for t in many:
        assert bool((t == p * t.numel() + p * (p - 1) / 2).all())
    wholes = [torch.empty(p * n) for n in (2, 7)]
    with _coalescing_manager(group, CPU):
        for whole in wholes:
            n = whole.numel() // p
            dist.all_gather_into_tensor(whole, torch.full((n,), float(r)))
    for whole in wholes:
        assert torch.equal(whole, torch.arange(float(p)).repeat_interleave(whole.numel() // p))
    parts = [torch.empty(n) for n in (2, 7)]
    with _coalescing_manager(group, CPU, async_ops=True) as manager:
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.arange(float(p * part.numel())))
    manager.wait()
    for part in parts:
        n = part.numel()
        assert torch.equal(part, p * torch.arange(float(n * r), float(n * (r + 1))))
    # The group's own: whatever comes between start and end, messages too.
    t, s, came = torch.full((9,), float(r)), torch.full((4,), float(r)), torch.empty(5)
    group._start_coalescing(CPU)
    group.allreduce([t])
    group.broadcast([s])
    group.send([torch.full((5,), float(r))], (r + 1) % p, 1)
    group.recv([came], (r - 1) % p, 1)
    work = group._end_coalescing(CPU)
    assert work.wait()
    assert work.is_completed() and work.is_success()
    assert float(t[0]) == p * (p - 1) / 2
    assert float(s[0]) == 0.0
    assert float(came[4]) == (r - 1) % p
    assert [x.data_ptr() for x in work.get_future().wait()][:2] == [t.data_ptr(), s.data_ptr()]
    # Empty, and again.
    group._start_coalescing(CPU)
    assert group._end_coalescing(CPU).wait()
    with pytest.raises(RuntimeError):
        group._end_coalescing(CPU)


@pytest.mark.ringreduce
@pytest.mark.parametrize("size", [2, 3])
def test_coalescing(pool: Pool, world: MakeWorld, size: int) -> None:
    pool.run(coalesced, world(size, 20.0))


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


def objects_like_gloo(me: Rank) -> tuple[str, str]:
    gloo = dist.new_group(backend="gloo")
    assert dist.group.WORLD is not None
    return repr(objects(me, dist.group.WORLD)), repr(objects(me, gloo))


def test_object_collectives(pool: Pool, world: MakeWorld) -> None:
    for rank, (ours, theirs) in enumerate(pool.run(objects_like_gloo, world(3, 20.0))):
        assert ours == theirs
        assert f"{{'for': {rank}}}" in ours


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


def ended(me: Rank, how: str) -> list[Any]:
    """Rank 0 ends the group with operations under way; everybody's waits end, and name rank 0."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    waiting = dist.all_reduce(torch.ones(2), group=group, async_op=True) if me.rank else None
    errors: list[Any] = []
    if me.rank == 0:
        time.sleep(0.2)
        getattr(group, how)()
    if waiting is not None:
        try:
            waiting.wait()
        except dist.DistBackendError as error:
            errors.append((type(error).__name__, str(error)))
    try:
        dist.all_reduce(torch.ones(2), group=group)
    except dist.DistBackendError as error:
        errors.append((type(error).__name__, str(error)))
    if how == "abort":
        group.abort()  # again does nothing
    dist.destroy_process_group(group)
    t = torch.ones(1)
    dist.all_reduce(t)
    return [float(t), *errors]


@pytest.mark.ringreduce
@pytest.mark.parametrize(("how", "kinds"), [("abort", {"Aborted"}), ("shutdown", {"PeerLost"})])
def test_abort_and_shutdown(pool: Pool, world: MakeWorld, how: str, kinds: set[str]) -> None:
    first, *others = pool.run(ended, world(3, 20.0), how)
    assert first[0] == 3.0
    assert first[1][0] == "Aborted"
    for found in others:
        assert found[0] == 3.0
        assert len(found) == 3
        for kind, said in found[1:]:
            assert kind in kinds, (kind, said)
            assert "rank 0" in said, said


def memory(me: Rank) -> dict[str, int]:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    assert backend.mem_allocator is not None
    dtype = torch.float32
    kept = [backend.allocate_tensor(n, dtype=dtype, device=CPU) for n in (0, 1, 1000, 3_000_000)]
    for t in kept:
        assert t.dtype == dtype and t.dim() == 1
        assert t.data_ptr() % 4096 == 0
        t.fill_(float(me.rank))
        dist.all_reduce(t)
        assert bool((t == me.world_size * (me.world_size - 1) / 2).all())
    halves = backend.allocate_tensor(64, dtype=torch.bfloat16, device=CPU)
    halves.copy_(torch.arange(64.0))
    dist.broadcast(halves, 0)
    assert torch.equal(halves, torch.arange(64.0).bfloat16())
    # It is ordinary memory: it may be viewed, saved for backward, and outlive its group.
    part = dist.new_group()
    w = part._get_backend(CPU).allocate_tensor(10, dtype=dtype, device=CPU).fill_(2.0)
    dist.destroy_process_group(part)
    del part
    w.requires_grad_()
    (w * w).sum().backward()
    assert w.grad is not None and bool((w.grad == 4.0).all())
    with pytest.raises(ValueError):
        backend.allocate_tensor(-1, dtype=dtype, device=CPU)
    import ringreduce

    stats: dict[str, int] = backend.memory_stats()
    assert stats["staging_bytes"] == ringreduce.staging_bytes()
    return stats


@pytest.mark.ringreduce
def test_memory(pool: Pool, world: MakeWorld) -> None:
    stats = pool.run(memory, world(2, 20.0))
    assert stats[0] == stats[1]
    assert stats[0]["staging_bytes"] > 0


def refused(me: Rank) -> list[Raised | str]:
    """What only other kinds of backends can do says so, in words of torch's."""
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(CPU)
    assert not backend.supports_time_estimate
    calls: list[Callable[[], Any]] = [backend.suspend, backend.resume]
    calls.append(lambda: backend.shrink([me.rank]))
    found: list[Raised | str] = []
    for call in calls:
        try:
            found.append(str(call()))
        except Exception as error:
            found.append(describe(me.rank, error))
    dist.barrier()
    return found


@pytest.mark.ringreduce
def test_what_is_not_offered(pool: Pool, world: MakeWorld) -> None:
    for found in pool.run(refused, world(2, 20.0)):
        assert all(isinstance(f, Raised) for f in found), found
        assert "excludes itself" in found[2].message


def futures_in_callbacks(me: Rank, count: int) -> list[float]:
    """Callbacks that wait for Futures: of what they start, and of what is behind them."""
    ended = [threading.Event() for _ in range(count)]
    sums = [0.0] * count
    last: list[torch.futures.Future[Any]] = []
    started = threading.Event()

    def callback(k: int) -> None:
        assert started.wait(20)
        t = torch.full((3,), float(k))
        if k == 0:
            last[0].wait()
        # In one order on all ranks: one callback after the other, each told by the one before.
        if k:
            assert ended[k - 1].wait(20)
        dist.all_reduce(t, async_op=True).get_future().wait()
        sums[k] = float(t[0])
        ended[k].set()

    for k in range(count):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.get_future().then(lambda _, k=k: callback(k))
    last.append(dist.all_reduce(torch.ones(4), async_op=True).get_future())
    started.set()
    assert ended[-1].wait(20), "a callback that waits for a Future hangs"
    return sums


@pytest.mark.ringreduce
def test_callbacks_may_wait_for_futures(pool: Pool, world: MakeWorld) -> None:
    expected = [2.0 * k for k in range(6)]
    assert pool.run(futures_in_callbacks, world(2, 20.0), 6) == [expected] * 2


def waits_for_pending(me: Rank) -> float:
    group = dist.new_group()
    t, told = torch.ones(50_000), threading.Event()
    for _ in range(20):
        dist.all_reduce(t, op=dist.ReduceOp.AVG, group=group, async_op=True)
    last = dist.all_reduce(t, group=group, async_op=True)
    last.get_future().then(lambda _: told.set())
    group._wait_for_pending_works()
    assert last.is_completed() and told.is_set()
    return float(t[0])


@pytest.mark.ringreduce
def test_wait_for_pending_works(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(waits_for_pending, world(2, 20.0)) == [2.0, 2.0]
