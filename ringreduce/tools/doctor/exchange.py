"""Brings the facts of all ranks to rank 0, and lets them try what a job does first.

It all goes through a store at the master's address, which is torchrun's where torchrun has one.
Processes are numbered as they come, since several may be the same rank:

    came        how many have come
    came/N      who process N is
    leader      the first that is rank 0, which is "rank 0" here, has come
    facts/N     of it, with the ports at which it listens
    plan/N      rank 0 has the facts of all, or has waited long enough: where process N connects
    lines/N     what came of it; only the first rank of each host connects
    group       which processes make a group of all ranks now, if they can
    group/N     what came of it
    done        rank 0 needs the others no longer
    left/N      process N needs the store no longer

Each wait of a rank has a deadline.  Calls of torch's store can exceed theirs: if another program
accepts the connection and never answers, or if the master's host is cut off.  So a thread of its
own calls the store, and the rank gives up on that thread.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ringreduce.core.backend import extension
from ringreduce.core.launchers import Identity, is_loopback
from ringreduce.launch import meeting_place
from ringreduce.tools.doctor import probe, trial
from ringreduce.tools.doctor.facts import Facts, gather, mtu_of
from ringreduce.tools.doctor.report import Finding, fault

_POLL_SECONDS = 0.05
_STEP_SECONDS = 5.0  # for a step of a connection between hosts
_ADDRESSES = 8  # that a rank listens at, at most
_LEAVING_SECONDS = 5.0  # rank 0's store outlives the others' last look at it
_LATE_SECONDS = 2.0  # for a rank that comes after as many processes as there are ranks
MOST_RANKS = 1_000_000
_PREFIX, _LEADER = "ringreduce.doctor", "leader"

T = TypeVar("T")


class CannotMeet(Exception):
    """This rank did not reach rank 0: what it knows is this rank's to tell."""

    def __init__(self, gathered: "Gathered") -> None:
        super().__init__(gathered.problem)
        self.gathered = gathered


@dataclasses.dataclass(frozen=True)
class Came:
    """Who a process says that it is."""

    rank: int
    world_size: int
    host: str
    pid: int


@dataclasses.dataclass
class Gathered:
    """What rank 0 knows in the end.

    Attributes:
        facts: of the ranks that came, of one process each.
        absent: the ranks that did not come within `seconds`.
        silent: ranks that came, but did not tell of their machine, their lines or the group.
        lines: that were tried between hosts.
        came: the processes that came.
        problem: why this rank does not reach rank 0.
        seconds: the timeout.
    """

    facts: list[Facts]
    absent: list[int] = dataclasses.field(default_factory=list)
    silent: list[int] = dataclasses.field(default_factory=list)
    lines: list[probe.Line] = dataclasses.field(default_factory=list)
    came: list[Came] = dataclasses.field(default_factory=list)
    problem: Finding | None = None
    seconds: float = 0.0

    def hosts(self) -> list[list[Facts]]:
        """The ranks of each host, as ringreduce tells hosts apart; by their lowest ranks."""
        found: dict[str, list[Facts]] = {}
        for one in self.facts:
            found.setdefault(one.host_id, []).append(one)
        return list(found.values())

    def namesakes(self) -> dict[int, list[Came]]:
        """The processes of each rank that several say they are."""
        found: dict[int, list[Came]] = {}
        for one in self.came:
            found.setdefault(one.rank, []).append(one)
        return {rank: some for rank, some in found.items() if len(some) > 1}

    def world_sizes(self) -> dict[int, list[int]]:
        """The ranks that say each world size; that of rank 0 first."""
        found: dict[int, list[int]] = {}
        for one in sorted(self.came, key=lambda one: one.rank):
            found.setdefault(one.world_size, []).append(one.rank)
        return found

    def is_complete(self) -> bool:
        """Whether these processes, and no others, may make a group of all ranks.

        A rank that can make none alone may be in one that does without shared memory.
        """
        able = not any(one.alone_error for one in self.facts)
        over_tcp = self.facts[0].given("RINGREDUCE_WIRE") == "tcp"  # rank 0's holds
        reached = {(line.sender, line.receiver) for line in self.lines if not line.error}
        return (
            not (self.absent or self.silent or self.namesakes())
            and (able or over_tcp)
            and len(self.world_sizes()) == 1
            and all((line.sender, line.receiver) in reached for line in self.lines)
        )


def collect(me: Identity, seconds: float) -> Gathered | None:
    """Gathers the facts of all ranks.

    Args:
        me: who this process is.
        seconds: that rank 0 waits for the others, and they for rank 0.

    Returns:
        What rank 0 knows; None for the other ranks.

    Raises:
        CannotMeet: there is no way to rank 0's store, or no longer.
        ValueError: nothing says where it is.
    """
    addr, port = meeting_place(me)
    facts = gather(me)
    if me.world_size > MOST_RANKS:
        raise CannotMeet(Gathered([facts]))  # they tell it
    if port is None:
        trying = trial.Trial()
        try:
            _try_alone(facts, trying, solo=True)
        finally:
            trying.close()
        return Gathered([facts], seconds=seconds)
    store, leads = _store(me, facts, addr, port, seconds)
    trying = trial.Trial()
    member = _Member(store, me, facts, trying, seconds, addr, port)
    # As long as rank 0 may need: for the facts of all, its own lines, those of the others.
    most = (
        2 * seconds
        + 2 * trial.FIRST_SECONDS
        + 3 * _most_seconds(_ADDRESSES * me.world_size)
        + 2 * trial.ALL_SECONDS
        + 2 * _LEAVING_SECONDS
    )
    try:
        return _within(most, member.lead if leads else member.follow)
    except (RuntimeError, concurrent.futures.TimeoutError) as error:  # torch's, and _within's
        found = fault(
            "store",
            f"rank 0, or the store at {addr}, no longer answers: {_why(error)}",
            "Look at rank 0's output: it was not started, or has ended, or a line to its host is "
            "gone.",
        )
        raise CannotMeet(_problem(facts, found)) from error
    finally:
        trying.close()


def _problem(facts: Facts, found: Finding | None) -> Gathered:
    return Gathered([facts], problem=found)


def _try_alone(facts: Facts, trying: trial.Trial, solo: bool) -> None:
    # One that meets itself by an address would wait long.
    found = trying.first(solo, hurry=bool(facts.loopback_error))
    facts.memfd_error, facts.unix_error = found[trial.MEMORY], found[trial.SOCKET]
    facts.alone_error = found[trial.ALONE]


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises, or a TimeoutError when it has had so many seconds."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)


def _why(error: Exception) -> str:
    return str(error).partition("\n")[0] or "no answer"


def _store(me: Identity, facts: Facts, addr: str, port: int, seconds: float) -> tuple[Any, bool]:
    """The store, and whether this process leads: it is rank 0, and the first to be."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = me.rank == 0 and not agents
    # torchrun's store lives on when it starts the ranks again.
    prefix = f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    wait = timedelta(seconds=seconds)

    def connect(listening: int | None) -> Any:
        store = TCPStore(
            addr,
            port,
            me.world_size,
            listening is not None,
            wait,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening,
        )
        return PrefixStore(prefix, store)

    if serves and facts.loopback_error and _is_own(addr):
        raise CannotMeet(Gathered([facts]))  # before others find a port that nobody serves
    if serves:
        try:
            listening: int | None = _listen_at(port)
        except OSError as taken:
            try:  # of another process that is rank 0, too, which then tells of both?
                soon = min(seconds, _STEP_SECONDS)
                store = _within(soon, lambda: connect(None))
                store.wait([_LEADER], timedelta(seconds=soon))
                return store, False
            except (OSError, RuntimeError, concurrent.futures.TimeoutError):
                found = fault(
                    "store",
                    f"rank 0 cannot listen at port {port} for the other ranks: {_why(taken)}",
                    "Choose a port that is free on its host: MASTER_PORT (torchrun --master-port).",
                )
                raise CannotMeet(_problem(facts, found)) from taken
    try:
        # First without torch, which would retry longer than asked, and log a stack each time.
        left = _wait_for_port(addr, port, seconds)
        store = _within(left, lambda: connect(listening if serves else None))
        if serves and not _is_own(addr):  # perhaps that of another rank 0, which is to lead
            time.sleep(_LATE_SECONDS)
        return store, me.rank == 0 and store.add(_LEADER, 1) == 1
    except (OSError, RuntimeError, UnicodeError, concurrent.futures.TimeoutError) as error:
        why = _no_way(facts, addr, port, serves, seconds, error)
        raise CannotMeet(_problem(facts, why)) from error


def _listen_at(port: int) -> int:
    """A descriptor that listens at a port of all addresses, as torch's store would."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(
        ("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN
    )
    return listener.detach()


def _no_way(
    facts: Facts, addr: str, port: int, serves: bool, seconds: float, error: Exception
) -> Finding | None:
    """What keeps this rank from rank 0's store; None if facts tell of it already."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return fault(
            "store",
            f"the name of rank 0's host, {addr}, is not known here: {_why(error)}",
            "Correct MASTER_ADDR, or enter the name into DNS or /etc/hosts of this host (getent "
            f"hosts {addr}), or use an address.",
        )
    if facts.loopback_error and _is_own(addr):
        return None
    if serves and not _is_own(addr):
        return fault(
            "store",
            f"rank 0 runs on {facts.host}, of which {addr} is no address, and no store answers "
            f"there at port {port}: {_why(error)}",
            "MASTER_ADDR must be an address of rank 0's host (ip address), or lead there.",
        )
    if serves:
        return fault(
            "store",
            f"rank 0 listens at port {port}, and does not reach itself at {addr}: {_why(error)}",
            f"Look at its firewall, and at ip route get {addr}.",
        )
    return fault(
        "store",
        f"no way to rank 0's store at {addr}:{port} within {seconds:g} s: {_why(error)}",
        f"Look whether rank 0 runs, whether another program has its port, whether {addr} is an "
        f"address of its host that this host reaches (getent hosts {addr}; ping {addr}), and "
        f"whether a firewall allows TCP port {port} there.",
    )


def _is_own(addr: str) -> bool:
    """Whether it is an address of this host: then only its loopback interface carries data."""
    if is_loopback(addr):
        return True
    try:
        found = socket.getaddrinfo(addr, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name that is not known
        return False
    for family, kind, _, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as one:
            one.bind(place)
            return True
    return False


def _wait_for_port(addr: str, port: int, seconds: float) -> float:
    """Waits until somebody listens there; how many of the seconds are left."""
    until = time.monotonic() + seconds
    while True:
        try:
            left = max(_POLL_SECONDS, until - time.monotonic())
            socket.create_connection((addr, port), timeout=left).close()
            return max(_POLL_SECONDS, until - time.monotonic())
        except (OSError, UnicodeError):  # of resolving, too
            if time.monotonic() + _POLL_SECONDS > until:
                raise
            time.sleep(_POLL_SECONDS)


def _listen(facts: Facts, store_host: str) -> list[socket.socket]:
    """Listens where ringreduce would, by its own choice; the facts get where and why."""
    try:
        found, facts.why_there = extension().listen_for(store_host)
    except RuntimeError as error:  # ringreduce.Error
        facts.listen_error = str(error)
        return []
    facts.listening = [(name, address, port) for name, address, port, _ in found]
    facts.mtu = mtu_of(found[0][0]) if found else 0
    return [socket.socket(fileno=fd) for *_, fd in found]


@dataclasses.dataclass
class _Member:
    """This process among the others; `lead` is rank 0's part."""

    store: Any
    me: Identity
    facts: Facts
    trial: trial.Trial
    seconds: float
    addr: str
    port: int
    number: int = -1
    listeners: list[socket.socket] = dataclasses.field(default_factory=list)
    came: dict[int, Came] = dataclasses.field(default_factory=dict)
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(probe.TOKEN_BYTES))

    def lead(self) -> Gathered:
        store, seconds = self.store, self.seconds
        self._come()
        came = self._wait_until_all_came()
        told = self._facts_of(came)
        came = dict(self._came())  # some may have come meanwhile
        facts = [facts for facts, _ in told.values()]
        gathered = Gathered(facts, came=list(came.values()), seconds=seconds)
        ranks = {one.rank for one in gathered.came}
        gathered.absent = sorted(set(range(self.me.world_size)) - ranks)
        have_told = {one.rank for one in facts}
        gathered.silent = sorted(r for r in ranks - have_told if r < self.me.world_size)
        plans = _plans(gathered, {facts.rank: token for facts, token in told.values()})
        number_of = {facts.rank: number for number, (facts, _) in told.items()}
        for number, one in came.items():
            plan = plans.get(one.rank, []) if number_of.get(one.rank) == number else []
            store.set(f"plan/{number}", json.dumps(plan))
        gathered.lines = probe.try_lines(0, plans[0], _STEP_SECONDS)
        others = {number_of[rank] for rank in plans} - {self.number}
        answered = self._wait("lines", others, _most_seconds(max(map(len, plans.values()))))
        for number in answered:
            gathered.lines += [probe.Line(**o) for o in json.loads(store.get(f"lines/{number}"))]
        gathered.silent += sorted(came[number].rank for number in others - set(answered))
        self._join(gathered, told)
        for number in set(self._came()) - set(came):
            store.set(f"plan/{number}", "[]")
        gathered.came = list(self.came.values())
        store.set("done", "1")
        # The store may be this process's.
        self._wait("left", set(came) - {self.number}, _LEAVING_SECONDS)
        return gathered

    def _join(self, gathered: Gathered, told: dict[int, tuple[Facts, str]]) -> None:
        """Makes the group of all ranks, if all can, and notes what came of it."""
        members = list(told) if gathered.is_complete() else []
        self.store.set("group", json.dumps(members))
        if not members:
            return
        self._make_group()
        for number in self._wait("group", set(members), trial.ALL_SECONDS):
            told[number][0].all_error = json.loads(self.store.get(f"group/{number}"))
        gathered.silent += [one.rank for one in gathered.facts if one.all_error is None]

    def follow(self) -> None:
        store = self.store
        self._come()
        long = 2 * self.seconds + 2 * trial.FIRST_SECONDS
        store.wait([f"plan/{self.number}"], timedelta(seconds=long))
        plan = json.loads(store.get(f"plan/{self.number}"))
        lines = probe.try_lines(self.me.rank, [probe.Target(*one) for one in plan], _STEP_SECONDS)
        store.set(f"lines/{self.number}", json.dumps([dataclasses.asdict(o) for o in lines]))
        # Until then others connect to the port of this process.
        lines_seconds = 2 * _most_seconds(_ADDRESSES * self.me.world_size)
        store.wait(["group"], timedelta(seconds=lines_seconds))
        if self.number in json.loads(store.get("group")):
            self._make_group()
        wait = 2 * trial.ALL_SECONDS + _LEAVING_SECONDS
        store.wait(["done"], timedelta(seconds=wait))
        store.set(f"left/{self.number}", "1")

    def _come(self) -> None:
        """Says who this process is, and then what it has found."""
        me = Came(self.me.rank, self.me.world_size, self.facts.host, os.getpid())
        self.number = self.store.add("came", 1) - 1
        self.store.set(f"came/{self.number}", json.dumps(dataclasses.asdict(me)))
        _try_alone(self.facts, self.trial, solo=False)
        self.listeners = _listen(self.facts, self.addr)
        probe.serve(self.listeners, self.token)
        own = {"facts": dataclasses.asdict(self.facts), "token": self.token}
        self.store.set(f"facts/{self.number}", json.dumps(own))

    def _make_group(self) -> None:
        for listener in self.listeners:  # RINGREDUCE_PORTS may have one port a rank
            probe.stop(listener)
        error = self.trial.all(
            addr=self.addr,
            port=self.port,
            prefix=f"{_PREFIX}/group",
            rank=self.me.rank,
            world_size=self.me.world_size,
        )
        self.store.set(f"group/{self.number}", json.dumps(error))

    def _came(self) -> dict[int, Came]:
        """Who has come so far, by number."""
        for number in range(self.store.add("came", 0)):
            if number not in self.came and self.store.check([f"came/{number}"]):
                self.came[number] = Came(**json.loads(self.store.get(f"came/{number}")))
        return self.came

    def _wait_until_all_came(self) -> dict[int, Came]:
        """Until each rank has come, or as many processes as there are ranks, or in vain."""
        size, until = self.me.world_size, time.monotonic() + self.seconds
        enough = False
        while True:
            came = self._came()
            ranks = {one.rank for one in came.values() if one.rank < size}
            if len(ranks) == size or time.monotonic() > until:
                return dict(came)
            if len(came) >= size and not enough:
                enough, until = True, min(until, time.monotonic() + _LATE_SECONDS)
            time.sleep(_POLL_SECONDS)

    def _facts_of(self, came: dict[int, Came]) -> dict[int, tuple[Facts, str]]:
        """Facts and token by number, of the first process of each rank, in the ranks' order."""
        told: dict[int, tuple[int, tuple[Facts, str]]] = {}
        here = {n for n, one in came.items() if one.rank < self.me.world_size}
        ready = self._wait("facts", here, trial.FIRST_SECONDS)
        for number in sorted(ready, key=lambda number: number != self.number):
            own = json.loads(self.store.get(f"facts/{number}"))
            told.setdefault(came[number].rank, (number, (Facts(**own["facts"]), own["token"])))
        return dict(told[rank] for rank in sorted(told))

    def _wait(self, what: str, numbers: set[int], seconds: float) -> list[int]:
        """The processes that set it in time, in ascending order."""
        until = time.monotonic() + seconds
        missing = numbers
        while missing := {n for n in missing if not self.store.check([f"{what}/{n}"])}:
            if time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
        return sorted(numbers - missing)


def _plans(gathered: Gathered, tokens: dict[int, str]) -> dict[int, list[probe.Target]]:
    """What the first rank of each host is to try: all addresses of all ranks of other hosts."""
    hosts = gathered.hosts()
    return {
        here[0].rank: [
            probe.Target(one.rank, *where, tokens[one.rank])
            for there in hosts
            for one in there
            for where in one.listening
            if there is not here
        ]
        for here in hosts
    }


def _most_seconds(lines: int) -> float:
    """How long a rank may take to try its lines: connect, a few packets, many packets."""
    return 5 * _STEP_SECONDS * (1 + lines // probe.AT_ONCE)
