"""What a Work tells: hooks, records, times, its result, its sender, callbacks of its Future."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Raised, Rank, on_ranks
from processes import wait_until
from ranks import exception_of
from torch import nn
from torch._C._distributed_c10d import OpType, WorkResult
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.distributed.distributed_c10d import _coalescing_manager

c10d: Any = torch._C._distributed_c10d
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
PATCH = Path(__file__).resolve().parents[2] / "docs/upstream/pytorch-2.14-torchfrtrace.patch"
needs_hooks = pytest.mark.skipif(
    not hasattr(c10d, "FlightRecorderHook"), reason="torch has no hooks on collectives before 2.14"
)


@on_ranks(2, 20.0)
def test_on_completion_hook(me: Rank) -> None:
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
    found: dict[str, int] = {}
    for kind, seq, started, finished, info in seen:
        assert timedelta(0) <= finished - started <= timedelta(seconds=took + 1)
        assert info.active_duration.total_seconds() == pytest.approx(
            (finished - started).total_seconds(), abs=1e-3
        )
        name = OpType(kind).name if isinstance(kind, int) else kind.name
        assert name not in found
        found[name] = seq
    message = "RECV" if me.rank else "SEND"
    assert sorted(found) == ["ALLREDUCE", "BARRIER", "BROADCAST", message], found
    assert found["ALLREDUCE"] < found["BROADCAST"] < found["BARRIER"], found


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


def test_a_hook_that_raises_harms_no_operation(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(hook_that_raises, world(2, 20.0), fresh=True)
    assert call.results() == [["", ""]] * 2
    assert "from the hook" in call.log(0)


@on_ranks(2, 20.0)
def test_collective_timing(me: Rank) -> None:
    group = dist.new_group()
    t = torch.ones(1000)
    untimed = dist.all_reduce(t, group=group, async_op=True)
    untimed.wait()
    group._enable_collectives_timing()
    with pytest.raises(RuntimeError, match="timing"):
        untimed._get_duration()
    short = dist.all_reduce(t, group=group, async_op=True)
    short.wait()
    if me.rank == 0:
        dist.recv(torch.ones(1), 1)  # when rank 1 has begun
        time.sleep(0.5)
    long = dist.all_reduce(t, group=group, async_op=True)
    if me.rank == 1:
        dist.send(torch.ones(1), 0)
    long.wait()
    assert short._get_duration() >= 0.0 and long._get_duration() >= 0.0
    # Milliseconds; rank 1 waited for rank 0, which slept.
    assert me.rank == 0 or long._get_duration() >= 250.0


def outcomes_of_work(me: Rank) -> list[Any]:
    """Work of an operation that goes well, and of one that a rank never joins."""
    group = dist.new_group()
    good = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    code = good.get_future_result().wait()
    assert good.is_completed() and good.is_success() and exception_of(good) is None
    group.set_timeout(timedelta(seconds=0.4))
    found: list[Any] = [WorkResult(code).name]
    if me.rank == 0:
        began = time.monotonic()
        bad = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        future = bad.get_future_result()
        wait_until(bad.is_completed, 10.0)
        found.append(time.monotonic() - began)
        found += [bad.is_completed(), bad.is_success(), str(exception_of(bad))]
        found.append(WorkResult(future.wait()).name)
        try:
            bad.wait()
        except dist.DistBackendError as error:
            found.append(type(error).__name__)
    me.tell("over")
    me.hear()
    return found


def test_work_of_what_goes_well_and_what_fails(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(outcomes_of_work, world(2, 60.0))
    call.hear_all()
    call.tell_all()
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
    assert 0.3 < waited < 40.0, "set_timeout holds for what is started after it"
    assert "rank 1" in error


@on_ranks(2, 20.0)
def test_callbacks_may_wait_for_futures(me: Rank) -> None:
    """Callbacks that wait for Futures: of what they start, and of what is behind them."""
    count = 6
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
    assert sums == [2.0 * k for k in range(count)]


@on_ranks(2, 20.0)
def test_only_works_that_succeeded_leave_the_registry(me: Rank) -> None:
    """Of torch's registry for wait_tensor."""
    size: Any = torch._C._distributed_c10d._get_work_registry_size
    with allow_inflight_collective_as_graph_input_ctx():
        if me.rank == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            assert size() == 1
        dist.send(torch.ones(1), 1) if me.rank == 0 else dist.recv(torch.ones(1), 0)
        if me.rank == 1:
            work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        dist.all_reduce(torch.ones(2))
        dist.barrier()
        assert size() == 0
        t, group = torch.ones(2), dist.new_group()
        work = dist.all_reduce(t if me.rank == 0 else torch.ones(3), group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="ranks disagree"):
            work.wait()
        if me.rank == 0:
            with pytest.raises(dist.DistBackendError, match="ranks disagree"):
                torch.ops._c10d_functional.wait_tensor(t)


@on_ranks(2, 20.0)
def test_wait_for_pending_works(me: Rank) -> None:
    group = dist.new_group()
    t, told = torch.ones(50_000), threading.Event()
    for _ in range(20):
        dist.all_reduce(t, op=dist.ReduceOp.AVG, group=group, async_op=True)
    last = dist.all_reduce(t, group=group, async_op=True)
    last.get_future().then(lambda _: told.set())
    group._wait_for_pending_works()
    assert last.is_completed() and told.is_set()
    assert t.eq(2).all(), t


def hooked_model() -> nn.Module:
    import ringreduce

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    ringreduce.register_comm_hook(model)
    return model


def dump() -> bytes:
    options = {"backend": "ringreduce"} if TORCH >= (2, 15) else {}
    found: bytes = c10d._dump_fr_trace(**options)
    return found


def recorded(me: Rank, path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records of calls that have ended, and of one that another rank never makes."""
    group = dist.group.WORLD
    assert group is not None
    alone = dist.new_group(timeout=timedelta(seconds=1))
    # Since 2.15 torch attaches one to every group.
    hooks = [c10d.FlightRecorderHook.attach(g) for g in (group, alone) if TORCH < (2, 15)]
    group._enable_collectives_timing()
    p, r, t = me.world_size, me.rank, torch.ones(4, 3)
    dist.all_reduce(t)
    dist.all_reduce(t, async_op=True).wait()
    dist.broadcast(t, 0)
    dist.all_gather([torch.empty(4, 3) for _ in range(p)], t)
    dist.reduce_scatter(torch.empty(4, 3), [t] * p)
    dist.all_to_all_single(torch.empty(2 * p), torch.ones(2 * p))
    with _coalescing_manager(group, torch.device("cpu")):
        dist.all_reduce(t)
        dist.all_reduce(t)
    if r < 2:
        (dist.recv if r else dist.send)(t, 1 - r)
    model = hooked_model()
    model(torch.ones(1, 4)).sum().backward()
    dist.barrier()
    if TORCH >= (2, 15):  # an asynchronous operation is told of by another thread
        wait_until(lambda: all(e["retired"] for e in pickle.loads(dump())["entries"]), 10.0)
    (Path(path) / f"trace_{r}").write_bytes(dump())
    ended = pickle.loads(dump())["entries"]
    if r == 0:
        with pytest.raises(dist.DistBackendError):
            dist.barrier(group=alone)
    dist.barrier()
    for hook in hooks:
        hook.remove()
    return ended, pickle.loads(dump())["entries"][-2 if r == 0 else -1]


READ_TRACES = """
import sys, torch.distributed.flight_recorder as package
package.__path__.insert(0, sys.argv[1])
from torch.distributed.flight_recorder import fr_trace
fr_trace.main(["-p", "trace_", "-o", sys.argv[2] + "/db", sys.argv[2]])
"""


@needs_hooks
@pytest.mark.parametrize("size", [2, 3])
def test_flight_recorder(pool: Pool, world: MakeWorld, size: int, tmp_path: Path) -> None:
    traces, tool = tmp_path / "traces", tmp_path / "torch/distributed/flight_recorder"
    traces.mkdir()
    call = pool.start(recorded, world(size, 20.0), str(traces), fresh=True)
    for rank, (entries, last) in enumerate(call.results()):
        names = [e["profiling_name"].split(":")[1].split()[0].replace("_", "") for e in entries]
        expected = ["allreduce", "allreduce", "broadcast", "allgather", "reducescatter"]
        assert names[:5] == expected, names
        assert names[5].startswith("alltoall") and names[6].startswith("allreduce"), names
        assert names[-2:] == ["allreduce", "barrier"], "the bucket of DDP is recorded"
        assert ("recv" if rank else "send") in names or rank > 1
        for entry in entries:
            assert entry["retired"] and entry["timeout_ms"] >= 20_000, entry
            assert any("test_work" in f["filename"] for f in entry["frames"]), entry
        assert entries[1]["input_sizes"] == [[4, 3]] and entries[1]["input_dtypes"] == ["Float"]
        numbers = [e["collective_seq_id"] for e in entries if not e["is_p2p"]]
        assert numbers == sorted(set(numbers)), numbers
        if TORCH >= (2, 15):
            assert all(e["state"] == "completed" for e in entries)
            assert all(0 <= e.get("duration_ms", 0) < 20_000 for e in entries), entries
        if rank == 0:
            assert last["state"] == "scheduled" and not last["retired"], last
    shutil.copytree(Path(torch.__file__).parent / "distributed/flight_recorder", tool)
    if TORCH < (2, 15):
        subprocess.run(["patch", "-p1", "-i", PATCH], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-c", READ_TRACES, tool, traces], check=True)
    _, found = pickle.loads((traces / "db").read_bytes())
    assert len(found.collectives) >= 9
    assert all(c.pass_check for c in found.collectives), found.collectives


def failed(me: Rank, path: str, how: str) -> None:
    """A group of two fails after an all-reduce."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{path}/trace_"
    group: Any = dist.group.WORLD
    assert group.supports_abort_hooks
    assert group._get_backend(torch.device("cpu")).supports_abort_hooks
    dist.all_reduce(torch.ones(2))
    assert not Path(f"{path}/trace_{me.rank}").exists()
    if how == "abort":
        group.abort()
    elif me.rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.broadcast(torch.ones(3), 1)
        with pytest.raises(dist.DistBackendError):
            dist.broadcast(torch.ones(4), 1)  # of which no second dump is written
    elif how == "lost":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        me.hear()


@pytest.mark.skipif(TORCH < (2, 15), reason="torch writes no dump for other backends before 2.15")
@pytest.mark.parametrize("how", ["abort", "timeout", "lost"])
def test_flight_recorder_writes_its_dump(
    pool: Pool, world: MakeWorld, how: str, tmp_path: Path
) -> None:
    call = pool.start(failed, world(2, 2.0), str(tmp_path), how, fresh=True)
    call.await_end([0], 60.0)
    if how == "timeout":
        call.tell(1)
    ended = call.outcomes()
    assert not isinstance(ended[0], Raised), ended[0]
    dumps = {path.name: pickle.loads(path.read_bytes()) for path in tmp_path.iterdir()}
    assert set(dumps) == ({"trace_0", "trace_1"} if how == "abort" else {"trace_0"})
    for found in dumps.values():
        *_, last = found["entries"]
        unfinished = how != "abort"
        assert last["input_sizes"] == ([[3]] if unfinished else [[2]])
        assert last["retired"] != unfinished, last
        assert (last["state"] == "completed") != unfinished, last


@needs_hooks
@on_ranks(2, 20.0)
def test_nan_check(me: Rank) -> None:
    hook = c10d.NanCheckHook.attach(dist.group.WORLD)
    nan, ones = torch.full((4,), float("nan")), torch.ones(4)
    model = hooked_model()
    for call in (
        lambda: dist.all_reduce(nan),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), nan),
        lambda: dist.send(nan, 1 - me.rank),
        lambda: model(nan).sum().backward(),
    ):
        with pytest.raises(RuntimeError, match="NaN"):
            call()
    # What is only received may hold anything.
    dist.broadcast(nan if me.rank else ones, 0)
    dist.all_gather([torch.full((4,), float("nan")) for _ in range(me.world_size)], ones)
    hook.remove()
    dist.all_reduce(torch.full((4,), float("nan")))


CHANGES: dict[str, Any] = {
    "set_": lambda t: t.set_(torch.zeros(4).untyped_storage(), 0, (4,), (1,)),
    ".data": lambda t: setattr(t, "data", torch.zeros(4)),
    "resize_": lambda t: t.resize_(1 << 22),
    "storage": lambda t: t.untyped_storage().resize_(0),
}


def changed_in_flight(me: Rank, change: str, strided: bool) -> None:
    """Rank 0 changes its tensors while operations wait for rank 1, and then uses the allocator."""
    n, p, group = 300_000, me.world_size, dist.group.WORLD
    assert group is not None

    def make(rows: int = 1) -> torch.Tensor:
        made = torch.full((rows * n, 2 if strided else 1), float(me.rank + 1))
        return made[:, 0]

    def whole(rows: int = 1) -> torch.Tensor:
        return torch.full((rows * n,), float(me.rank + 1))

    held = {
        name: make() for name in ("sum", "least", "root", "part", "sent", "got", "two", "three")
    }
    into, parts, shares = whole(p), [make() for _ in range(p)], [make() for _ in range(p)]
    one = whole()
    if me.rank == 1:
        me.hear()
    works = [
        dist.all_reduce(held["sum"], async_op=True),
        dist.reduce(held["least"], 0, op=dist.ReduceOp.MIN, async_op=True),
        dist.broadcast(held["root"], 1, async_op=True),
        dist.all_gather_into_tensor(into, one, async_op=True),
        dist.all_gather(parts, held["part"], async_op=True),
        dist.all_to_all(shares, [whole() for _ in range(p)], async_op=True),
        group.allreduce_coalesced([held["two"], held["three"]]),
        dist.isend(held["sent"], 1 - me.rank),
        dist.irecv(held["got"], 1 - me.rank),
    ]
    if me.rank == 0:
        for tensor in (*held.values(), into, one, *parts, *shares):
            CHANGES[change](tensor)
        junk = [torch.full((n,), -1.0) for _ in range(50)]  # where freed memory would be
        me.tell("changed")
    for work in works:
        work.wait()
    if me.rank == 1:
        for name, value in {"sum": 3.0, "root": 2.0, "got": 1.0, "two": 3.0, "three": 3.0}.items():
            assert held[name].eq(value).all(), (name, held[name])
        for rank in range(p):
            assert parts[rank].eq(rank + 1).all() and shares[rank].eq(rank + 1).all()
            assert into[rank * n : (rank + 1) * n].eq(rank + 1).all()
    else:
        assert all(t.eq(-1).all() for t in junk), "results went to memory that is another's"
    own = torch.ones(3)
    dist.all_reduce(own, async_op=True).wait()
    own.resize_(300_000).fill_(1)
    dist.all_reduce(own)
    assert own.eq(2).all()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_memory_in_flight_is_held(pool: Pool, world: MakeWorld, change: str, strided: bool) -> None:
    call = pool.start(changed_in_flight, world(2, 20.0), change, strided)
    call.heard(0)
    call.tell(1)
    call.results()


@on_ranks(2, 20.0)
def test_shared_memory_stays_shared(me: Rank) -> None:
    t = torch.full((100,), float(me.rank)).share_memory_()
    dist.all_reduce(t, async_op=True).wait()
    assert t.is_shared() and t.eq(1).all()
    for _ in range(2):
        if me.rank == 0:
            dist.isend(t, 1).wait()
            dist.recv(t, 1)
        else:
            dist.recv(t, 0)
            dist.send(t, 0)
        assert t.is_shared()


def negative(me: Rank) -> dict[str, str]:
    """What is said to negative timeouts and tags; rank 1 comes later to rank 0's operation."""
    import ringreduce

    group, said = dist.group.WORLD, {}
    assert group is not None
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=-1)
    part = dist.new_group(backend="ringreduce")
    late = dist.all_reduce(torch.ones(1), group=part if me.rank else None, async_op=True)
    calls = {
        "all_reduce": lambda: group.allreduce([torch.ones(1)], options),
        "wait": lambda: late.wait(timedelta(seconds=-5)),
        "set_timeout": lambda: group.set_timeout(timedelta(seconds=-5)),
        "monitored_barrier": lambda: group.monitored_barrier(timedelta(seconds=-5)),
        "new_group": lambda: dist.new_group(timeout=timedelta(seconds=-5)),
        "send": lambda: dist.send(torch.ones(1), 1 - me.rank, tag=-1),
        "recv": lambda: dist.recv(torch.ones(1), 1 - me.rank, tag=-2),
        "recv from any": lambda: dist.recv(torch.ones(1), tag=-2),
    }
    for name, call in calls.items():
        try:
            call()
            said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)
    with pytest.raises(ringreduce.Timeout, match="timeout of 20 ms"):
        late.wait(timedelta(milliseconds=20))
    me.tell("has waited")
    me.hear()
    options.timeout = timedelta(milliseconds=-1)  # c10d's kUnsetTimeout: the group's
    last = group.allreduce([torch.ones(1)], options)
    dist.all_reduce(torch.ones(1), group=None if me.rank else part)
    last.wait()
    late.wait(timedelta(milliseconds=-1))
    return said


def test_negative_timeouts_and_tags(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(negative, world(2, 20.0))
    call.hear_all()
    call.tell_all()
    for said in call.results():
        assert len(said) == 8
        assert all("cannot be negative" in text for text in said.values()), said
