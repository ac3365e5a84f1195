"""Groups whose members change in place: reconfigure() of torch 2.14 and newer.

Ranks are named by the number that they were started with; their rank in the group changes.
RINGREDUCE_TEST_RECONFIGURES is the number of random reconfigures: 10 if not given.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import blamed
from conftest import MakeWorld
from pool import Call, Died, Pool, Raised, Rank, describe

import ringreduce
from ringreduce import extension

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"), reason="this torch has no reconfigure()"
)
CPU = torch.device("cpu")
HOSTS = {"one host": "aaaa", "two hosts": "aabb"}
PATIENCE = 60.0  # seconds, where no deadline is tested


class Member:
    """A rank that can be reconfigured; `store` is for what the test's ranks tell each other."""

    def __init__(
        self, me: Rank, prefix: str, number: int, hosts: str = "", wrap: Any = None
    ) -> None:
        os.environ.pop("RINGREDUCE_HOSTID", None)
        if hosts:
            os.environ["RINGREDUCE_HOSTID"] = f"{hosts[number]} of {prefix}"
        self.number, self.store = number, me.store(f"{prefix}/test")
        self.meeting = wrap(me.store(prefix)) if wrap else me.store(prefix)
        dist.init_process_group(
            me.backend,
            store=self.meeting,
            rank=number,
            world_size=4,
            timeout=timedelta(seconds=PATIENCE),
            enable_reconfigure=True,
        )
        group = dist.group.WORLD
        assert group is not None and group.supports_reconfigure
        self.group: Any = group
        self.backend: Any = group._get_backend(CPU)

    def handles(self, key: str, numbers: Iterable[int]) -> list[str]:
        """The handles of ranks that all call this, in the order of `numbers`."""
        self.store.set(f"{key}/{self.number}", self.group.get_reconfigure_handle())
        return [self.store.get(f"{key}/{n}").decode() for n in numbers]

    def reconfigure(self, uuid: int, handles: Any, timeout: float = PATIENCE) -> None:
        dist._reconfigure(uuid, handles, timeout=timedelta(seconds=timeout)).wait()

    def join(self, uuid: int, numbers: list[int], **options: Any) -> None:
        self.reconfigure(uuid, self.handles(f"join {uuid}", numbers), **options)
        self.check(numbers)

    def check(self, numbers: list[int]) -> None:
        """The group is that of these ranks, in this order, and works."""
        own, size = numbers.index(self.number), len(numbers)
        assert (dist.get_rank(), dist.get_world_size()) == (own, size)
        assert self.backend._get_sequence_number_for_group() == 0
        t = torch.full((1000,), float(self.number + 1))
        dist.all_reduce(t)
        assert bool((t == sum(numbers) + size).all()), (numbers, float(t[0]))
        t = torch.full((3,), float(self.number))
        dist.broadcast(t, group_src=size - 1)
        assert float(t[2]) == numbers[-1]
        if size > 1:
            sent = self.backend.send([torch.full((7,), float(self.number))], (own + 1) % size, 5)
            t = torch.empty(7)
            self.backend.recv([t], (own - 1) % size, 5).wait()
            sent.wait()
            assert float(t[6]) == numbers[own - 1]
        assert self.backend._get_sequence_number_for_group() == (2 if size == 1 else 4)

    def meet(self, key: str, count: int = 4) -> None:
        """A barrier beside the group."""
        self.store.add(key, 1)
        while self.store.add(key, 0) < count:
            time.sleep(0.01)


def caught(me: Rank, call: Any) -> Raised:
    try:
        call()
    except Exception as error:
        return describe(me.rank, error)
    raise AssertionError("it raised no error")


# Each step lists the groups that exist after it, by numbers; a rank in none of them is left out.
STEPS = [
    [[0, 1, 2, 3]],
    [[0, 1, 2]],  # without the last, then without one in the middle
    [[0, 2]],
    [[0, 2], [1, 3]],
    [[2, 0, 3, 1]],  # merged, in another order
    [[2, 0, 3, 1]],  # the same again
    [[0], [1], [2], [3]],
    [[1, 3], [2, 0]],
    [[3, 2, 1, 0]],
]


def all_steps(me: Rank, prefix: str, hosts: str, as_set: bool) -> None:
    member = Member(me, prefix, me.rank, hosts)
    for k, step in enumerate(STEPS):
        everybody = member.handles(f"step {k}", range(4))
        for g, numbers in enumerate(step):
            if me.rank not in numbers:
                continue
            handles = [everybody[n] for n in numbers]
            member.reconfigure(100 * k + g, set(handles) if as_set else handles)
            member.check(sorted(numbers) if as_set else numbers)
    if dist.get_rank() != 1:  # a group can still be made of this one
        t = torch.ones(1)
        member.backend.shrink([1]).allreduce([t]).wait()
        assert float(t) == 3.0
    dist.destroy_process_group()


@pytest.mark.parametrize("as_set", [False, True], ids=["list", "set"])
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_members_change(pool: Pool, world: MakeWorld, hosts: str, as_set: bool) -> None:
    call = pool.start(all_steps, world(0), pool.name(), hosts, as_set, ranks=4)
    call.results()


def refusals(me: Rank, prefix: str) -> list[Raised]:
    member = Member(me, prefix, me.rank)
    found = [caught(me, lambda: dist.all_reduce(torch.ones(1)))]  # it has no members yet
    stale = member.handles("stale", range(2))
    member.join(1, [0, 1])
    handles = member.handles("refused", range(2))
    own = handles[me.rank]
    for uuid, bad in (
        (1, handles),
        (2, stale),
        (2, [handles[1 - me.rank]]),
        (2, [own, own]),
        (2, [own, "gloo:1:2:3:"]),
    ):
        found.append(caught(me, partial(member.reconfigure, uuid, bad)))
    # Another group has used it.
    member.meet("ready", 2)
    if me.rank == 0:
        member.reconfigure(3, [own])
    member.meet("taken", 2)
    handles = member.handles("again", range(2))
    if me.rank == 1:
        found.append(caught(me, lambda: member.reconfigure(3, [handles[1]])))
    # The ranks do not agree on the order.
    differing = member.handles("differing", [me.rank, 1 - me.rank])
    found.append(caught(me, lambda: member.reconfigure(5, differing)))
    member.join(4, [0, 1])  # nothing of that has harmed the group
    dist.destroy_process_group()
    options = dist.distributed_c10d.ReconfigureOptions()
    options.uuid, options.handles = 6 + me.rank, [member.group.get_reconfigure_handle()]
    found.append(caught(me, lambda: member.group.reconfigure(options)))
    return found


def test_what_is_refused_harms_nothing(pool: Pool, world: MakeWorld) -> None:
    results = pool.start(refusals, world(0), pool.name(), ranks=2).results()
    for error in [found.pop() for found in results]:
        assert error.isa("Aborted") and "its group was destroyed" in error.message, error
    disagreed = [found.pop() for found in results]
    for error in disagreed:  # neither waits for its timeout
        assert "gave other handles" in error.message and not error.isa("Timeout"), disagreed
    for found in results:
        unconnected, used, stale, absent, twice, foreign, *by_others = found
        assert "call reconfigure() first" in unconnected.message
        for error in (used, *by_others):
            assert error.isa("RuntimeError") and "already used" in error.message
        for error in (stale, absent, twice, foreign):
            assert error.isa("ValueError"), error
        assert "collect all handles again" in stale.message
        assert "twice" in twice.message and "for ranks 0 and 1" in twice.message
        assert "'gloo:1:2:3:', given for rank 1" in foreign.message
    assert len(by_others) == 1


def ended_and_renewed(me: Rank, prefix: str, how: str) -> tuple[list[str], str, Raised | None]:
    """The group fails by abort() or a timeout; a reconfigure of all its ranks makes it whole."""
    member = Member(me, prefix, me.rank)
    member.join(1, [0, 1, 2])
    member.meet("made", 3)
    ran: list[str] = []
    member.backend.register_abort_hook(7, lambda: ran.append("hook"))
    member.backend.register_abort_hook(8, lambda: ran.append("removed"))
    member.backend.unregister_abort_hook(8)
    error = None
    if how == "abort":
        member.backend.abort()
        member.backend.abort()
    else:
        member.backend.set_timeout(timedelta(seconds=1))
        if me.rank != 2:
            error = caught(me, lambda: dist.all_reduce(torch.ones(4)))
            caught(me, lambda: dist.all_reduce(torch.ones(4), async_op=True))  # when it is issued
        member.backend.set_timeout(timedelta(seconds=PATIENCE))
    member.meet("over", 3)
    state = str(member.backend.get_error())
    member.join(2, [2, 1, 0])
    assert str(member.backend.get_error()).endswith("SUCCESS")
    member.meet("renewed", 3)
    member.backend.abort()
    return ran, state, error


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_a_group_that_failed_is_renewed(pool: Pool, world: MakeWorld, how: str) -> None:
    call = pool.start(ended_and_renewed, world(0), pool.name(), how, ranks=3)
    for rank, (ran, state, error) in enumerate(call.results()):
        late = how == "timeout" and rank == 2  # it made no call that could fail
        assert ran == ["hook"] * (1 if late else 2), "once for each group"
        if how == "abort":
            assert state.endswith("SUCCESS"), "as of torch's Gloo"
        else:
            assert state.endswith("TIMEOUT")
        assert (error is not None) == (how == "timeout" and rank != 2)
        if error:
            assert error.isa("Timeout") and "rank 2" in error.message


def ended_outside(me: Rank, prefix: str, how: str, ender: int) -> Raised | None:
    """Number 0 does not come.  One of the others ends the reconfigure for both."""
    member = Member(me, prefix, me.rank)
    member.join(1, [0, 1, 2])
    handles = member.handles("next", [2, 1, 0])
    end = {
        "abort": member.backend.abort,
        "destroy": dist.destroy_process_group,
        "exit": extension().shutdown_all,
        "interrupt": partial(os.kill, os.getpid(), signal.SIGINT),
    }[how]
    found = None
    if me.rank > 0:
        if me.rank == ender:
            threading.Timer(0.5, end).start()
        try:
            member.reconfigure(2, handles)
        except BaseException as error:  # Ctrl-C too
            found = describe(me.rank, error)
    member.meet("over", 3)
    members = [0, 1, 2]
    if how == "destroy":
        members.remove(ender)
    if me.rank in members:
        member.join(3, members)
    return found


@pytest.mark.parametrize("ender", [1, 2])
@pytest.mark.parametrize("how", ["abort", "destroy", "exit", "interrupt"])
def test_a_waiting_reconfigure_is_ended(pool: Pool, world: MakeWorld, how: str, ender: int) -> None:
    call = pool.start(ended_outside, world(0), pool.name(), how, ender, ranks=3)
    found = call.results()
    own, other = found[ender], found[3 - ender]
    assert own and other and found[0] is None
    assert own.isa("KeyboardInterrupt" if how == "interrupt" else "Aborted"), own
    assert other.isa("Aborted"), other
    assert ("rank 1 " if ender == 1 else "rank 0 (started as 2)") in other.message, other.message


class PlainStore(dist.Store):
    """A store without compare_set."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def deleteKey(self, key: str) -> bool:  # as torch calls it
        return self.inner.delete_key(key)


def with_plain_store(me: Rank, prefix: str) -> Raised | None:
    member = Member(me, prefix, me.rank, wrap=PlainStore)
    member.join(1, [0, 1])
    handles = member.handles("next", [1, 0])
    if me.rank == 0:
        member.reconfigure(2, handles[1:])
    member.meet("taken", 2)
    if me.rank == 1:
        return caught(me, lambda: member.reconfigure(2, handles[:1]))
    return None


def test_a_store_without_compare_set(pool: Pool, world: MakeWorld) -> None:
    found = pool.start(with_plain_store, world(0), pool.name(), ranks=2).results()[1]
    assert found.isa("RuntimeError") and "already used" in found.message


def unfinished(me: Rank, prefix: str) -> list[Raised]:
    member = Member(me, prefix, me.rank)
    member.join(1, [0, 1, 2])
    works = []
    if me.rank == 0:  # no other rank ever joins these
        works = [dist.all_reduce(torch.ones(3), async_op=True), dist.irecv(torch.ones(3), 2)]
    member.meet("begun", 3)
    if me.rank != 2:
        member.join(2, [0, 1])
    member.meet("renewed", 3)
    return [caught(me, work.wait) for work in works if work is not None]


def test_unfinished_operations_are_aborted(pool: Pool, world: MakeWorld) -> None:
    found = pool.start(unfinished, world(0), pool.name(), ranks=3).results()[0]
    # PeerLost if the other rank is ahead and leaves the group first.
    assert all(error.isa("Aborted") or error.isa("PeerLost") for error in found), found
    assert "reconfigured" in found[0].message or found[0].isa("PeerLost"), found


def lost_later(me: Rank, prefix: str, hosts: str) -> list[Raised]:
    """Rank 1 is killed, the others go on without it; then rank 2 is killed."""
    member = Member(me, prefix, me.rank, hosts)
    member.join(1, [0, 1, 2, 3])
    member.meet("made")
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [caught(me, lambda: dist.all_reduce(torch.ones(1)))]
    member.join(2, [0, 2, 3])
    member.meet("without 1", 3)
    if me.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    found.append(caught(me, lambda: dist.all_reduce(torch.ones(1))))
    member.join(3, [3, 0])
    return found


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_survivors_go_on(pool: Pool, world: MakeWorld, hosts: str) -> None:
    outcomes = pool.start(lost_later, world(0), pool.name(), hosts, ranks=4).outcomes()
    assert [o.rank for o in outcomes if isinstance(o, Died)] == [1, 2], outcomes
    for rank in (0, 3):
        assert not isinstance(outcomes[rank], Raised), outcomes[rank]
        first, second = outcomes[rank].value  # type: ignore[union-attr]
        assert first.isa("PeerLost") and "rank 1 (pid" in first.message
        assert second.isa("PeerLost") and "rank 1 (started as 2) (pid" in second.message


def lost_meanwhile(me: Rank, prefix: str, hosts: str, victim: int, when: str) -> Any:
    """A rank is killed before it joins a reconfigure or in the midst of it; another comes late."""
    member = Member(me, prefix, me.rank, hosts)
    member.join(1, [0, 1, 2, 3])
    handles = member.handles("next", [3, 2, 1, 0])
    survivors = [n for n in range(4) if n != victim]
    late = survivors[-1]
    if me.rank == victim:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif me.rank == late:
        time.sleep(1.5)  # meanwhile nobody can be done
    began = time.monotonic()
    error = caught(me, lambda: member.reconfigure(2, handles, 4.0))
    took = time.monotonic() - began
    assert (dist.get_rank(), dist.get_world_size()) == (me.rank, 4)  # as before
    member.join(3, survivors)
    return error, took


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_a_rank_killed_during_a_reconfigure_is_named(
    pool: Pool, world: MakeWorld, hosts: str, victim: int, when: str
) -> None:
    call = pool.start(lost_meanwhile, world(0), pool.name(), hosts, victim, when, ranks=4)
    outcomes = call.outcomes()
    assert [o.rank for o in outcomes if isinstance(o, Died)] == [victim], outcomes
    named = f"{3 - victim} (started as {victim})"
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert not isinstance(outcome, Raised), outcome.trace
        error, took = outcome.value  # type: ignore[union-attr]
        assert error.isa("PeerLost") or error.isa("Timeout"), error
        assert named in error.message, error.message
        assert took < 4.0 + 3.0 + 5.0, "the timeout, rank 0's time to tell the others, and noise"


class StoppingStore(PlainStore):
    """Stops its process at the first look for a key of the group's last round."""

    armed = False

    def check(self, keys: list[str]) -> bool:
        if self.armed and any(key.endswith("/failed") for key in keys):
            self.armed = False
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().check(keys)


def stopped_meanwhile(me: Rank, prefix: str, victim: int) -> tuple[Raised, float]:
    member = Member(me, prefix, me.rank, "abcd", StoppingStore if me.rank == victim else None)
    member.join(1, list(range(4)))
    handles = member.handles("next", range(4))
    member.backend.set_timeout(timedelta(seconds=2))
    if me.rank == victim:
        member.meeting.armed = True
    member.meet("ready")
    me.tell("ready")
    began = time.monotonic()
    error = caught(me, lambda: member.reconfigure(2, handles, 2.0))
    return error, time.monotonic() - began


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_stopped_during_a_reconfigure_is_named(
    pool: Pool, world: MakeWorld, victim: int
) -> None:
    """By all, and by itself when it goes on; nobody enters a group that has failed."""
    job = pool.start(stopped_meanwhile, world(0), pool.name(), victim, ranks=4)
    job.hear_all()
    others = set(range(4)) - {victim}
    job.await_end(others, 60.0)
    job.signal(victim, signal.SIGCONT)
    for rank, (error, took) in enumerate(job.results()):
        assert error.isa("Timeout"), error
        assert blamed(error.message) == {victim}, error.message
        assert rank == victim or took < 2.0 + 3.0 + 5.0, "the timeout, its slack, and noise"


def of_a_group(me: Rank, prefix: str) -> None:
    """Of two groups beside the default one, the second gets another order of its ranks."""
    me.init(prefix, size=4)
    store = me.store(f"{prefix}/test")
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    mine: Any = pairs[me.rank // 2]
    if me.rank > 1:
        options = dist.distributed_c10d.ReconfigureOptions()
        options.uuid = 1
        store.set(f"handle {me.rank}", mine.get_reconfigure_handle())
        options.handles = [store.get(f"handle {n}").decode() for n in (3, 2)]
        mine.reconfigure(options).wait()
    assert mine.rank() == [0, 1, 1, 0][me.rank]
    for group, total in ((mine, 1 if me.rank < 2 else 5), (dist.group.WORLD, 6)):
        t = torch.full((5,), float(me.rank))
        group.allreduce([t]).wait()
        assert float(t[0]) == total
    dist.destroy_process_group()


def test_one_group_of_several(pool: Pool, world: MakeWorld) -> None:
    pool.start(of_a_group, world(0), pool.name(), ranks=4).results()


def options_kept(me: Rank, prefix: str) -> list[int]:
    """The memory that `slots` decides, with each of the ranks as rank 0."""
    store, found = me.store(f"{prefix}/test"), []
    options = {"store": me.store(prefix), "rank": me.rank, "world_size": 2}
    dist.init_process_group(me.backend, pg_options=ringreduce.Options(slots=32), **options)
    group: Any = dist.group.WORLD
    for uuid, order in ((1, (1, 0)), (2, (0, 1))):
        found.append(ringreduce.staging_bytes(group))
        store.set(f"{uuid}/{me.rank}", group.get_reconfigure_handle())
        dist._reconfigure(uuid, [store.get(f"{uuid}/{n}").decode() for n in order]).wait()
    found.append(ringreduce.staging_bytes(group))
    dist.destroy_process_group()
    return found


def test_options_of_the_program_stay(pool: Pool, world: MakeWorld) -> None:
    for found in pool.start(options_kept, world(0), pool.name(), ranks=2).results():
        assert found[0] == found[1] == found[2] > 0


# ---- random


def holdings() -> dict[str, int]:
    """What a process holds; memory in KiB."""
    status = Path("/proc/self/status").read_text()
    maps = Path("/proc/self/maps").read_text()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": maps.count("/memfd:ringreduce"),
        "memory": int(status.split("VmRSS:")[1].split()[0]),
    }


def obedient(me: Rank, prefix: str, number: int) -> None:
    """Does what the test says, until it says None."""
    member = Member(me, prefix, number)
    while (order := me.hear(PATIENCE * 10)) is not None:
        what, *args = order
        answer: Any = None
        try:
            if what == "reconfigure":
                member.reconfigure(*args)
            elif what == "check":
                member.check(*args)
            elif what == "holdings":
                answer = holdings()
        except Exception as error:
            answer = describe(number, error)
        me.tell((answer, member.group.get_reconfigure_handle()))
    dist.destroy_process_group()


class Crowd:
    """Processes that the test kills and replaces, by number."""

    def __init__(self, pool: Pool, world: MakeWorld) -> None:
        self.pool, self.world, self.prefix = pool, world, pool.name()
        self.calls: dict[int, Call] = {}
        self.handles: dict[int, str] = {}
        for number in range(4):
            self.start(number)

    def start(self, number: int) -> None:
        args = (self.prefix, number)
        self.calls[number] = self.pool.start(obedient, self.world(0), *args, ranks=1, fresh=True)
        self.calls[number].tell(0, ("nothing",))
        self.answer(number)

    def answer(self, number: int) -> Any:
        found, self.handles[number] = self.calls[number].heard(0, PATIENCE)
        return found

    def kill(self, number: int) -> None:
        self.calls[number].signal(0, signal.SIGKILL)

    def order(self, numbers: Iterable[int], *what: Any) -> None:
        for number in numbers:
            self.calls[number].tell(0, what)


def test_random_reconfigures(pool: Pool, world: MakeWorld) -> None:
    """Any members in any order, ranks killed and replaced before it or meanwhile: no leak."""
    rounds = int(os.environ.get("RINGREDUCE_TEST_RECONFIGURES", "10"))
    seed = random.randrange(10**6)
    draw, crowd, base = random.Random(seed), Crowd(pool, world), {}
    for uuid in range(1, 10 * rounds, 10):
        case = f"seed {seed}, uuid {uuid}"
        fate = draw.choice(["well", "well", "before", "meanwhile"])
        members = draw.sample(range(4), draw.randint(2, 4))
        victim = draw.choice(members[1:])
        if victim == 0 or fate == "well":  # number 0 lives on: it must not gather anything
            victim = -1
        elif fate == "before":
            crowd.kill(victim)
            crowd.calls[victim].outcomes()
            crowd.start(victim)
            victim = -1
        crowd.order(members, "reconfigure", uuid, [crowd.handles[n] for n in members], 4.0)
        if victim >= 0:
            time.sleep(draw.random() * 0.03)
            crowd.kill(victim)
            crowd.calls[victim].outcomes()
            survivors = [n for n in members if n != victim]
            for n in survivors:
                found = crowd.answer(n)  # the kill may have come too late for an error
                if isinstance(found, Raised):
                    number = members.index(victim)
                    assert f"{number} (started as {victim})" in found.message or (
                        number == victim and f"rank {victim}" in found.message
                    ), f"{case}: {found}"
            crowd.start(victim)
            members = survivors
            crowd.order(members, "reconfigure", uuid + 1, [crowd.handles[n] for n in members], 60.0)
        for what in ("reconfigure", "check"):
            if what == "check":
                crowd.order(members, "check", members)
            found = {n: crowd.answer(n) for n in members}
            assert set(found.values()) == {None}, f"{case}: {what} of {members}: {found}"
        alone = [crowd.handles[0]]
        crowd.order([0], "reconfigure", uuid + 2, alone, 60.0)
        assert crowd.answer(0) is None, case
        crowd.order([0], "holdings")
        now = crowd.answer(0)
        base = base or dict(now)
        grown = now.pop("memory") - base["memory"]
        assert now == {k: base[k] for k in now}, f"{case}: {now}, and {base} before"
        assert grown < 64 << 10, f"{case}: {grown} KiB more than at first"
    for number, call in crowd.calls.items():
        call.tell(0, None)
        assert call.outcomes()[0].rank == 0, number
