"""What a Work tells: completion hooks, times, its result, its sender, callbacks of its Future."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank
from processes import wait_until
from torch._C._distributed_c10d import OpType, WorkResult
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx


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
    untimed = dist.all_reduce(t, group=group, async_op=True)
    untimed.wait()
    group._enable_collectives_timing()
    try:
        untimed._get_duration()
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    short = dist.all_reduce(t, group=group, async_op=True)
    short.wait()
    if me.rank == 0:
        dist.recv(torch.ones(1), 1)  # when rank 1 has begun
        time.sleep(0.5)
    long = dist.all_reduce(t, group=group, async_op=True)
    if me.rank == 1:
        dist.send(torch.ones(1), 0)
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

    def elsewhere(k: int) -> None:
        # `then` calls back at once, in this thread, if the operation is over.  That callback would
        # wait for what this thread has yet to start.
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=callback, args=(k,)).start()
        else:
            callback(k)

    for k in range(count):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.get_future().then(lambda _, k=k: elsewhere(k))
    last.append(dist.all_reduce(torch.ones(4), async_op=True).get_future())
    started.set()
    assert ended[-1].wait(20), "a callback that waits for a Future hangs"
    return sums


@pytest.mark.ringreduce
def test_callbacks_may_wait_for_futures(pool: Pool, world: MakeWorld) -> None:
    expected = [2.0 * k for k in range(6)]
    assert pool.run(futures_in_callbacks, world(2, 20.0), 6) == [expected] * 2


def registered(me: Rank) -> list[int]:
    """How many works torch's registry for wait_tensor holds: under way, then ended."""
    size: Any = torch._C._distributed_c10d._get_work_registry_size
    found = []
    with allow_inflight_collective_as_graph_input_ctx():
        if me.rank == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            found.append(size())
        dist.send(torch.ones(1), 1) if me.rank == 0 else dist.recv(torch.ones(1), 0)
        if me.rank == 1:
            work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        dist.all_reduce(torch.ones(2))
        dist.barrier()
        found.append(size())
    return found


def test_work_that_ended_is_not_registered(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(registered, world(2, 20.0)) == [[1, 0], [0]]


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
