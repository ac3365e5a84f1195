"""Ranks as processes of a system: with children, becoming another program, interrupted by signals.

The end of a rank with DataLoader workers or forked children, after exec, and on kernels and in
sandboxes without pidfds, is noticed all the same; a forked child keeps its parent's descriptors
open, so a killed rank's sockets do not close.  Signal handlers may use the group whose wait they
interrupt.  Subgroups name ranks as the job does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect_all
from conftest import MakeWorld
from pool import Died, Done, Pool, Raised, Rank
from processes import alive, asleep, wait_until
from test_failures import add_up, left_over, signal_a_wait
from torch.utils.data import DataLoader, Dataset

from ringreduce.core import clock as core_clock


class Squares(Dataset[torch.Tensor]):
    """Numbers, made in a worker process."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(float(i * i))


def train_with_workers(me: Rank, how: str) -> None:
    """All-reduces what a DataLoader's worker made; tells the test the pids of its children."""
    if how == "plain fork":
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        try:
            me.tell([child])
            while True:
                dist.all_reduce(torch.ones(1000))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=how)
    batches = iter(loader)
    for k, batch in enumerate(batches):
        dist.all_reduce(batch)
        if k == 2:
            me.tell([w.pid for w in batches._workers])  # type: ignore[attr-defined]
    raise AssertionError("the data ended")


@pytest.mark.parametrize(("how", "victim"), [("fork", 1), ("spawn", 0), ("plain fork", 1)])
def test_a_killed_rank_whose_child_lives_on(
    pool: Pool, world: MakeWorld, how: str, victim: int
) -> None:
    call = pool.start(train_with_workers, world(3), how)
    children = [call.heard(rank) for rank in range(3)]
    time.sleep(0.05)
    killed = call.signal(victim, signal.SIGKILL)
    call.await_end(range(3), 15.0)
    orphan = alive(children[victim][0])
    outcomes = call.outcomes()
    assert isinstance(outcomes[victim], Died)
    for raised in expect_all(outcomes, {victim}, "PeerLost", {victim}):
        assert raised.when - killed <= 10.0, f"took {raised.when - killed:.3f} s"
    if how == "plain fork":
        assert orphan, "the child was to outlive its parent: this test tests nothing"
        os.kill(children[victim][0], signal.SIGKILL)
    assert pool.run(add_up, world(3)) == [6.0] * 3
    for rank in set(range(3)) - {victim}:
        assert wait_until(lambda rank=rank: not alive(children[rank][0]), 10.0), "a child is left"
    for found in pool.start(left_over, world(0), ranks=3).results():
        assert all(state != "Z" for _, state in found["children"]), found


def feed(me: Rank) -> float:
    """Workers that are started after the group neither use it nor disturb it at their end."""
    total = torch.zeros(1)
    for _ in range(2):
        loader = DataLoader(
            Squares(), batch_size=1000, num_workers=2, multiprocessing_context="fork", timeout=30
        )
        for batch in loader:
            part = batch.sum().reshape(1)
            dist.all_reduce(part)
            total += part
    return float(total)


def test_workers_come_and_go(pool: Pool, world: MakeWorld) -> None:
    first, second = pool.run(feed, world(2))
    assert first == second > 0
    assert pool.run(add_up, world(2)) == [3.0] * 2


def without_pidfds() -> None:
    """From now on the kernel refuses them to this thread, as old kernels and sandboxes do."""
    pidfd_open, solsocket_peerpidfd = 434, 77
    getsockopt = {"x86_64": 55, "aarch64": 209}[platform.machine()]
    load, jump_if, give = 0x20, 0x15, 0x06  # BPF: a word of seccomp_data; if equal; the verdict
    refuse, allow = 0x00050000, 0x7FFF0000
    steps = [
        (load, 0, 0, 0),
        (jump_if, 3, 0, pidfd_open),
        (jump_if, 0, 3, getsockopt),
        (load, 0, 0, 16 + 2 * 8),  # the option
        (jump_if, 0, 1, solsocket_peerpidfd),
        (give, 0, 0, refuse | errno.EPERM),
        (give, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())  # seccomp
    with pytest.raises(PermissionError):
        os.pidfd_open(os.getpid())


def reduce_until_lost(me: Rank, prefix: str, ending: str, pidfds: str) -> float:
    """Rank 0 ends amid all-reduces.  Where the others go on, returns when they did."""
    if pidfds == "refused":
        without_pidfds()
    me.init(prefix, size=3)
    for k in range(10**9):
        t = torch.ones(1000)
        dist.all_reduce(t)
        if t[0] < 3:
            return time.monotonic()
        if k == 3:
            me.tell(time.monotonic())
            if me.rank == 0 and ending == "exec":
                os.execv("/bin/sleep", ["sleep", "1.5"])
    raise AssertionError("rank 0 was not missed")


@pytest.mark.parametrize(
    ("ending", "pidfds", "on_loss"),
    [
        ("kill", "refused", "error"),
        ("exec", "there", "error"),
        ("exec", "refused", "continue"),
    ],
)
def test_the_end_of_a_program_is_noticed_without_a_pidfd(
    pool: Pool, world: MakeWorld, ending: str, pidfds: str, on_loss: str
) -> None:
    unled = world(0, ON_LOSS=on_loss)
    call = pool.start(reduce_until_lost, unled, pool.name(), ending, pidfds, ranks=3, fresh=True)
    ended = max(call.heard(rank) for rank in range(3))
    if ending == "kill":
        ended = call.signal(0, signal.SIGKILL)
    outcomes = call.outcomes()
    assert isinstance(outcomes[0], Died), outcomes
    if on_loss == "continue":
        noticed = [o.value for o in outcomes if isinstance(o, Done)]
        assert len(noticed) == 2, outcomes
    else:
        says = r"called exec \(" if ending == "exec" else "its process ended"
        noticed = [r.when for r in expect_all(outcomes, {0}, "PeerLost", {0}, says)]
    assert max(noticed) - ended <= 5.0, f"took {max(noticed) - ended:.3f} s"


# ---- signal handlers, and subgroups


def wait_with_a_handler(me: Rank, does: str) -> str:
    if me.rank == 1:
        me.hear()
        return ""
    said: list[str] = []

    def handler(number: int, frame: object) -> None:
        if does == "destroy":
            dist.destroy_process_group()
        else:
            said.append("in the handler")
            try:
                dist.all_reduce(torch.ones(1), async_op=does == "async")
                said.append("went on")
            except dist.DistBackendError as error:
                said.append(f"{type(error).__name__} there")

    before = signal.signal(signal.SIGTERM, handler)
    me.tell("waiting")
    try:
        dist.all_reduce(torch.ones(8))
    except dist.DistBackendError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        signal.signal(signal.SIGTERM, before)
    return " / ".join(said)


@pytest.mark.parametrize("does", ["destroy", "all_reduce", "async"])
def test_a_signal_handler_uses_the_group(pool: Pool, world: MakeWorld, does: str) -> None:
    """Never a deadlock: the handler waits for the call and fails with it, or ends it."""
    job = pool.start(wait_with_a_handler, world(2, timeout=3.0), does, remade=True)
    _, (outcome, _) = signal_a_wait(job, signal.SIGTERM)
    assert isinstance(outcome, Done), outcome
    if does == "destroy":
        assert "Aborted" in outcome.value and "signal handler" in outcome.value
    elif does == "all_reduce":  # it waits for the call, and both fail
        start = "in the handler / Timeout there / Timeout: "
        assert outcome.value.startswith(start), outcome.value
    else:
        assert outcome.value.startswith("in the handler / went on / Timeout"), outcome.value


class Preempted(Exception):
    pass


def save_amid_a_call(me: Rank, call: str, ends: str) -> list[object]:
    """Rank 0 comes late; the signal of all others comes in the call, in which they wait for it."""
    saved: list[object] = []
    other = dist.new_group() if call == "two groups" else None

    def save(number: int, frame: object) -> None:
        """As schedulers ask for: a checkpoint that all ranks know to be complete."""
        saved.append("begun")
        own = torch.full((3,), float(me.rank))
        work = dist.all_reduce(own, async_op=True)
        work.get_future().wait()  # of torch, which polls nothing
        saved.append(own[0].item())
        every: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(every, me.rank)
        dist.barrier()
        saved.append(every)
        if ends == "raises":
            raise Preempted

    def make() -> torch.Tensor:
        if call == "backward":
            ddp(torch.full((1, 300), me.rank + 1.0)).sum().backward()
            assert module.weight.grad is not None
            return module.weight.grad * dist.get_world_size()
        given = torch.full((300, 300), me.rank + 1.0)
        if call == "async":
            works = [dist.all_reduce(t, async_op=True) for t in (given, given.clone())]
            works[1].wait()
            works[0].wait()
        else:
            dist.all_reduce(given, group=other)
        return given

    signal.signal(signal.SIGUSR1, save)
    module = torch.nn.Linear(300, 300, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(module) if call == "backward" else module
    me.tell("waiting")
    if me.rank == 0:
        me.hear()
    try:
        found = make()
        if me.rank == 0:
            save(signal.SIGUSR1, None)
    except Preempted:
        saved.append("raised")
        found = None
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    right = found is None or found.eq(expected).all().item()
    after = torch.full((5,), float(me.rank))
    dist.all_reduce(after)
    return [saved, right, after[0].item()]


@pytest.mark.parametrize("ends", ["returns", "raises"])
@pytest.mark.parametrize("call", ["all_reduce", "async", "backward", "two groups"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_signal_handler_calls_collectives_after_the_call(
    pool: Pool, world: MakeWorld, size: int, call: str, ends: str
) -> None:
    job = pool.start(save_amid_a_call, world(size), call, ends, remade=True)
    job.hear_all("waiting")
    time.sleep(0.3)
    for rank in range(1, size):
        assert wait_until(lambda rank=rank: asleep(job.workers[rank].pid), 20.0)
        job.signal(rank, signal.SIGUSR1)
    time.sleep(0.3)
    job.tell(0)
    for saved, right, after in job.results():
        every = list(range(size))
        assert saved == ["begun", sum(every), every, *(["raised"] if ends == "raises" else [])]
        assert right and after == sum(every)


def raise_amid_a_call(me: Rank) -> str:
    """A handler has stepped aside for the call when another raises."""
    if me.rank == 1:
        me.hear()
        return ""

    def save(number: int, frame: object) -> None:
        me.tell("in the handler")
        dist.barrier()

    def stop(number: int, frame: object) -> None:
        raise Preempted

    signal.signal(signal.SIGUSR1, save)
    signal.signal(signal.SIGALRM, stop)
    me.tell("waiting")
    try:
        dist.all_reduce(torch.ones(8))
    except Preempted:
        return "raised"
    return "went on"


def test_a_handler_that_raises_ends_the_call_at_once(pool: Pool, world: MakeWorld) -> None:
    job = pool.start(raise_amid_a_call, world(2), remade=True)
    assert job.heard(0) == "waiting"
    time.sleep(0.3)
    job.signal(0, signal.SIGUSR1)
    assert job.heard(0) == "in the handler"
    job.signal(0, signal.SIGALRM)
    job.await_end([0], 20.0)
    job.tell(1)
    outcome, _ = job.outcomes()
    assert isinstance(outcome, Done) and outcome.value == "raised", outcome


def test_a_signal_handler_reads_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that calls hvd does, and waits for 20 s, while the clock is read."""
    now, read = 100.0, []
    time = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(core_clock, "time", time)
    clock = core_clock.ProcessClock()

    def interrupted() -> float:
        nonlocal now
        time.monotonic = lambda: now
        for _ in range(20):
            now += 1
            clock.now()
        return 100.0

    time.monotonic = interrupted
    reader = threading.Thread(target=lambda: read.append(clock.now()), daemon=True)
    reader.start()
    reader.join(10)
    now += 1
    assert read == [100.0] and clock.now() == 121.0


def in_a_subgroup(me: Rank, what: str) -> None:
    sub = dist.new_group([1, 3], use_local_synchronization=True) if me.rank in (1, 3) else None
    if sub is None:
        return
    dist.all_reduce(torch.ones(1), group=sub)
    if me.rank == 3:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(2), group=sub)
    else:
        dist.all_reduce(torch.ones(1), group=sub)


@pytest.mark.parametrize(("what", "error"), [("kill", "PeerLost"), ("mismatch", "Mismatch")])
def test_a_subgroup_names_global_ranks(pool: Pool, world: MakeWorld, what: str, error: str) -> None:
    outcomes = pool.start(in_a_subgroup, world(4), what, remade=True).outcomes()
    assert isinstance(outcomes[0], Done) and isinstance(outcomes[2], Done)
    raised = outcomes[1]
    assert isinstance(raised, Raised) and raised.isa(error), raised
    assert blamed(raised.message) == {3}, raised.message
    assert isinstance(outcomes[3], Died if what == "kill" else Raised)
