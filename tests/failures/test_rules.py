"""The rules of failing, for every call: killed, stopped, never there, or calling something else;
and the error classes: what they are, and how they surface from Work, Future and DDP's backward.

Rank 1 is the one that fails.  To wait for a deadline once and not once a call, all calls fail at
the same time, each in a group and a thread of its own (`fail_at_once`); the tests look at what came
of theirs.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect
from calls import CALLS, MESSAGES, REDUCING, ROOTED, Site, compressed, limited, new_site, title
from conftest import MakeWorld
from pool import Died, Done, Outcome, Pool, Raised, Rank, describe
from ranks import exception_of
from test_failures import add_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VICTIM = 1
LONG = 60.0  # for calls that must succeed, and for those that end because a rank was killed
# For the calls that must time out.  All of them run at once, and each must begin well within it on
# all ranks; between hosts a rank that has not begun is late.
TIMEOUT = 5.0 if os.environ.get("RINGREDUCE_WIRE") == "tcp" else 3.0
# Between hosts who only gives goes on until the systems' buffers are full (docs/hosts.md): then by
# more than a few elements, for that to be soon.
ONLY_GIVE = {("reduce", 1), ("gather", 1), ("scatter", 0)}
# Every call by name; those with a root twice, with the victim as the root and without.
CASES = [(name, root) for name in CALLS for root in ((0, 1) if name in ROOTED else (0,))]


def waits(name: str, root: int) -> set[int]:
    """The ranks that cannot finish the call without the victim."""
    if name in MESSAGES:
        return {0}
    if name in ROOTED:
        to_root = name in ("reduce", "gather")
        return ({0} if root == 0 else set()) if to_root else ({0, 2} if root == 1 else set())
    return {0, 2}


class Fate(threading.Thread):
    """What comes of one call on one rank."""

    def __init__(self, me: Rank, name: str, site: Site, go: threading.Event, how: str) -> None:
        super().__init__(daemon=True)
        self.me, self.name_of_call, self.site, self.go, self.how = me, name, site, go, how
        self.flowing = threading.Event()
        self.returned = False  # the call at which the victim is missing did return
        self.raised: Raised | None = None

    def run(self) -> None:
        try:
            if self.how.endswith("amid"):
                self._loop()
            else:
                self._once()
        except BaseException as error:
            self.raised = describe(self.me.rank, error)
        self.flowing.set()

    def _loop(self) -> None:
        for k in range(10**9):
            CALLS[self.name_of_call](self.site)
            if k == 2:
                if self.how.startswith("stopped"):
                    self.site = limited(self.site, TIMEOUT)
                self.flowing.set()
            time.sleep(0.002)

    def _once(self) -> None:
        CALLS[self.name_of_call](self.site)
        self.flowing.set()
        self.go.wait(LONG)
        if self.how == "never comes":
            self.site = limited(self.site, TIMEOUT)
        if self.me.rank == VICTIM:
            time.sleep(TIMEOUT + 3)  # ranks may begin apart
        CALLS[self.name_of_call](self.site)
        self.returned = True
        dist.barrier(group=self.site.group)


def fail_at_once(me: Rank, how: str) -> list[tuple[Raised | None, bool] | None]:
    go, fates = threading.Event(), []
    between_hosts = os.environ.get("RINGREDUCE_WIRE") == "tcp"
    for name, root in CASES:
        much = between_hosts and how == "stopped amid" and (name, root) in ONLY_GIVE
        site = new_site(name, LONG, root=root, **({"count": 200_000} if much else {}))
        fates.append(Fate(me, name, site, go, how) if site else None)
    mine = [fate for fate in fates if fate]
    for fate in mine:
        fate.start()
    for fate in mine:
        assert fate.flowing.wait(LONG), f"{fate.name_of_call} does not flow"
        assert fate.raised is None, fate.raised
    me.tell("flowing")
    me.hear(LONG)  # that all ranks have come so far
    if how != "killed before" or me.rank != VICTIM:
        go.set()
    until = time.monotonic() + TIMEOUT + 20
    for fate in mine:
        fate.join(max(0.1, until - time.monotonic()))
        assert not fate.is_alive(), f"{fate.name_of_call} hangs"
    for fate in mine:
        dist.destroy_process_group(fate.site.group)
    return [(fate.raised, fate.returned) if fate else None for fate in fates]


class Failures:
    """What each way to fail has led to, found out when it is first asked for."""

    def __init__(self, pool: Pool, world: MakeWorld) -> None:
        self.pool, self.world = pool, world
        self.known: dict[str, tuple[float, list[Outcome]]] = {}
        self.asked: set[str] = set()

    def of(self, how: str, case: tuple[str, int]) -> tuple[float, dict[int, Any]]:
        """When the victim failed, and by rank (Raised or None, whether the call returned)."""
        if how not in self.asked:
            self.asked.add(how)
            self.known[how] = self._find_out(how)
        assert how in self.known, f"{how}: see the first of these tests"
        when, outcomes = self.known[how]
        for outcome in outcomes:
            assert isinstance(outcome, Done | Died), outcome
        at = CASES.index(case)
        found = {o.rank: o.value[at] for o in outcomes if isinstance(o, Done)}
        return when, {rank: fate for rank, fate in found.items() if fate}

    def _find_out(self, how: str) -> tuple[float, list[Outcome]]:
        job = self.pool.start(fail_at_once, self.world(3), how)
        for rank in range(3):
            job.heard(rank, LONG)
        job.tell_all()
        time.sleep(0.1)
        when = time.monotonic()
        if how.startswith("killed"):
            job.signal(VICTIM, signal.SIGKILL)
        elif how.startswith("stopped"):
            job.signal(VICTIM, signal.SIGSTOP)
            job.await_end({0, 1, 2} - {VICTIM}, TIMEOUT + 40)
            job.signal(VICTIM, signal.SIGCONT)
        return when, job.outcomes(deadline=60.0)


@pytest.fixture(scope="module")
def failures(pool: Pool, world: MakeWorld) -> Failures:
    return Failures(pool, world)


def names(case: Any) -> str:
    return f"{case[0]} root {case[1]}" if case[0] in ROOTED else case[0]


every_call = pytest.mark.parametrize("case", CASES, ids=names)


@every_call
@pytest.mark.parametrize("how", ["killed amid", "killed before"])
def test_a_killed_rank(failures: Failures, how: str, case: tuple[str, int]) -> None:
    """PeerLost soon on all that wait for it; on others at their next call."""
    when, fates = failures.of(how, case)
    assert set(fates) == ({0} if case[0] in MESSAGES else {0, 2})
    for rank, (raised, returned) in fates.items():
        expect(raised, "PeerLost", {VICTIM}, says="process ended")
        assert raised.when - when < 10.0, f"rank {rank} took {raised.when - when:.3f} s"
        if how == "killed before" and rank in waits(*case):
            assert not returned, f"rank {rank} did not wait for rank {VICTIM}"
            other = "" if rank in waits(*case) == set(fates) else "|barrier"
            assert re.search(rf"({title(case[0])}{other})\b", raised.message), raised.message


@every_call
def test_a_stopped_rank(failures: Failures, case: tuple[str, int]) -> None:
    """Timeout that names it and says that it is stopped; it learns so when it goes on."""
    when, fates = failures.of("stopped amid", case)
    assert set(fates) == ({0, 1} if case[0] in MESSAGES else {0, 1, 2})
    for rank, (raised, _) in fates.items():
        expect(raised, "Timeout", {VICTIM}, says="stopped")
        assert rank == VICTIM or TIMEOUT / 2 < raised.when - when < TIMEOUT + 10


@every_call
def test_a_rank_that_does_not_come(failures: Failures, case: tuple[str, int]) -> None:
    """Timeout that names it, at the call or at the next; when it comes it learns the same."""
    _, fates = failures.of("never comes", case)
    says = "did not (send|receive) it" if case[0] in MESSAGES else "did not arrive"
    for rank, (raised, returned) in fates.items():
        expect(raised, "Timeout", {VICTIM}, says=says)
        if rank in waits(*case):
            assert not returned, f"rank {rank} did not wait for rank {VICTIM}"
        if rank != VICTIM and waits(*case) == set(fates) - {VICTIM}:
            assert re.search(rf"{title(case[0])}\b", raised.message), raised.message


# ---------------------------------------------------------------------------------------------
# Ranks that call something else

Change = Callable[[Site], None]


def _sparse_of(shape: tuple[int, int], sparse_dims: int) -> Change:
    """As many elements as the call has (3 x 36), in another shape."""

    def call(at: Site) -> None:
        dist.all_reduce(torch.ones(shape).to_sparse(sparse_dims), group=at.group)

    return call


def differences(name: str) -> dict[str, Change]:
    """What rank 1 may do instead of the call, by what the matter is."""
    call = CALLS[name]
    changes: dict[str, Change] = {
        "dtype": lambda at: call(replace(at, dtype=torch.float64)),
        "count": lambda at: call(replace(at, count=at.count + 1)),
        "large count": lambda at: call(replace(at, count=at.count * 1000)),
        "nothing": lambda at: call(replace(at, count=0)),
    }
    if name in ("barrier", "monitored_barrier"):
        changes = {}
    if name in REDUCING:
        changes["op"] = lambda at: call(replace(at, op=dist.ReduceOp.MAX))
    if name in ROOTED:
        changes["root"] = lambda at: call(replace(at, root=2))
    if name == "sparse all_reduce":
        changes["shape"] = _sparse_of((18, 6), 2)
        changes["sparse dimensions"] = _sparse_of((3, 36), 1)
    if name == "compressed all_reduce":
        changes["codec"] = lambda at: compressed(at, codec="int4")
        changes["schedule"] = lambda at: compressed(at, schedule="ring")
        changes["op"] = lambda at: compressed(at, op="avg")
        changes["rounding"] = lambda at: compressed(at, stochastic=True)
        del changes["dtype"]  # of float32 alone
    if name == "all_to_all_single with splits":
        changes["splits"] = lambda at: call(replace(at, splits=(3, 3, 3)))
        del changes["nothing"]  # of its own default, which has zeros
    if name not in MESSAGES:
        other = CALLS["gather" if name == "broadcast" else "broadcast"]
        changes["another call"] = lambda at: other(at)
        changes["barrier"] = CALLS["all_reduce" if "barrier" in name else "barrier"]
    return changes


def differ(me: Rank, name: str) -> dict[str, tuple[Raised | None, float]]:
    """One call at which rank 1 differs, and a next one, for each of the differences."""
    found = {}
    for what, change in differences(name).items():
        site = new_site(name, LONG)
        if site is None:
            continue
        began, raised = time.monotonic(), None
        try:
            # A rank that is still in the first call may learn here that the others disagree.
            CALLS[name](site)
            (change if me.rank == VICTIM else CALLS[name])(site)
            dist.barrier(group=site.group)
        except BaseException as error:
            raised = describe(me.rank, error)
        found[what] = raised, time.monotonic() - began
        dist.destroy_process_group(site.group)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_calls_something_else(pool: Pool, world: MakeWorld, name: str) -> None:
    """Mismatch on all ranks, at that call or the one before or after it; long before a deadline."""
    for rank, found in enumerate(pool.run(differ, world(3), name)):
        assert rank == 2 or set(found) == set(differences(name))
        for what, (raised, took) in found.items():
            assert raised is not None, f"{what}: rank {rank} raised nothing"
            assert raised.isa("Mismatch"), f"{what}: {raised}\n{raised.trace}"
            if name in MESSAGES or "sends" in raised.message:
                # Of two that disagree about what they send each other the sender is named first.
                assert re.search(rf"\brank {VICTIM}\b", raised.message), f"{what}: {raised}"
            else:
                assert blamed(raised.message) == {VICTIM}, f"{what}: {raised}"
            assert took < LONG / 2, f"{what}: rank {rank} took {took:.1f} s"


def wrong_tag(me: Rank, name: str) -> Raised | None:
    site, raised = new_site(name, LONG), None
    assert site is not None
    site = limited(site, 1.0)
    try:
        CALLS[name](replace(site, tag=me.rank, count=12))
    except BaseException as error:
        raised = describe(me.rank, error)
    dist.barrier()  # nobody leaves before
    dist.destroy_process_group(site.group)
    return raised


@pytest.mark.parametrize("name", MESSAGES)
def test_a_tag_that_is_never_sent(pool: Pool, world: MakeWorld, name: str) -> None:
    """Of what nobody receives nothing is known to be wrong: a Timeout."""
    raised = pool.run(wrong_tag, world(2), name)
    receiver = 1 if name == "send" else 0
    assert raised[1 - receiver] is None, "a small message does not wait"
    expect(raised[receiver], "Timeout", {1 - receiver}, says=f"with tag {receiver}")


# ---------------------------------------------------------------------------------------------
# The errors' classes, and where they surface

NAMES = ("PeerLost", "Timeout", "Mismatch", "Aborted")


def test_the_hierarchy() -> None:
    import ringreduce

    assert issubclass(ringreduce.Error, dist.DistBackendError)
    for name in NAMES:
        kind = getattr(ringreduce, name)
        assert kind.__mro__[1] is ringreduce.Error
        assert kind.__module__.startswith("ringreduce") and kind.__name__ == name
        assert kind.__doc__, name
        with pytest.raises(RuntimeError, match="text") as caught:
            raise kind("text")
        facts = (caught.value.rank, caught.value.reporter, caught.value.group, caught.value.final)
        assert facts == (None, None, "", None), name  # nobody's but of an error of a group
    assert re.match(r"\d+\.\d+", ringreduce.__version__)


def die_with_work_posted(me: Rank, way: str) -> list[Raised]:
    """Rank 1 dies with operations of all others in flight; returns what these saw."""
    dist.all_reduce(torch.ones(3))
    if me.rank == 1:
        me.hear()  # once the first call has ended on all ranks
        os.kill(os.getpid(), signal.SIGKILL)
    me.tell("begun")
    seen = []
    works = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(4)]
    futures = [work.get_future() for work in works]
    for work, future in zip(works, futures, strict=True):
        try:
            if way == "wait":
                work.wait()
            elif way == "future":
                future.wait()
            elif way == "value":
                while not future.done():
                    time.sleep(0.01)
                future.value()
            elif way == "exception":
                while not work.is_completed():
                    time.sleep(0.01)
                assert not work.is_success()
                told = exception_of(work)
                assert told is not None
                raise told
            else:
                future.then(lambda f: f.value()).wait()
        except (RuntimeError, dist.DistBackendError) as error:
            seen.append(describe(me.rank, error))
    try:  # later calls say the same, blocking or not
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    except dist.DistBackendError as error:
        seen.append(describe(me.rank, error))
    return seen


@pytest.mark.parametrize("way", ["wait", "future", "value", "exception", "then"])
def test_asynchronous_errors_surface(pool: Pool, world: MakeWorld, way: str) -> None:
    call = pool.start(die_with_work_posted, world(3), way)
    for rank in (0, 2):
        call.heard(rank)
    call.tell(1)
    outcomes = call.outcomes()
    assert isinstance(outcomes[1], Died), outcomes
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, Done), outcome
        assert len(outcome.value) == 5, "every operation must fail"
        for raised in outcome.value[4:] if way == "then" else outcome.value:
            assert expect(raised, "PeerLost", {1}).group
        for raised in outcome.value:  # `.then()` keeps the text, not the class
            assert raised.isa("RuntimeError")
            assert 1 in blamed(raised.message), raised.message
    assert pool.run(add_up, world(3)) == [6.0] * 3


def backward_without_a_peer(me: Rank, way: str) -> None:
    import ringreduce

    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(200, 200) for _ in range(6)]), bucket_cap_mb=0.2)
    if way == "hook":
        ringreduce.register_comm_hook(model)
    elif way == "python hook":
        model.register_comm_hook(None, ringreduce.hooks.allreduce_hook)
    for step in range(4):
        loss = model(torch.ones(2, 200)).sum()
        if me.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()


@pytest.mark.parametrize("way", ["backend", "hook", "python hook"])
def test_ddps_backward_raises(pool: Pool, world: MakeWorld, way: str) -> None:
    outcomes = pool.start(backward_without_a_peer, world(3), way).outcomes()
    assert isinstance(outcomes[1], Died), outcomes
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, Raised), outcome
        if way == "python hook":  # its future comes from `.then()`, which keeps the text alone
            assert outcome.isa("RuntimeError") and 1 in blamed(outcome.message), outcome
        else:
            expect(outcome, "PeerLost", {1})
    assert pool.run(add_up, world(3)) == [6.0] * 3


def wait_for_a_while(me: Rank) -> float:
    dist.barrier()
    if me.rank == 1:
        me.hear()  # comes only after rank 0 has given up
        dist.all_reduce(torch.ones(3))
        return 0.0
    began = time.monotonic()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(RuntimeError):
        work.wait(timeout=timedelta(seconds=0.3))
    return time.monotonic() - began


def test_wait_takes_a_timeout(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(wait_for_a_while, world(2))
    call.await_end([0], 20.0)
    call.tell(1)
    first = call.outcomes()[0]
    assert isinstance(first, Done) and first.value >= 0.2, first
