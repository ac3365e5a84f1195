"""Brings the facts of all ranks to rank 0, and lets the hosts try the lines between them.

It all goes through a store at the master's address, which is torchrun's where torchrun has one:

    facts/R     of rank R, with the ports at which it listens
    plan/R      rank 0 has the facts of all, or has waited long enough: where rank R connects
    lines/R     what came of it; only the first rank of each host connects
    done        rank 0 needs the others no longer
    left/R      rank R needs the store no longer

Each wait of a rank has a deadline.  Calls of torch's store can exceed theirs: if another program
accepts the connection and never answers, or if the master's host is cut off.  So a thread of its
own calls the store, and the rank gives up on that thread.
"""

import concurrent.futures
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

from ringreduce._backend import extension
from ringreduce._launchers import Identity
from ringreduce.doctor import probe
from ringreduce.doctor.facts import Facts, gather, mtu_of
from ringreduce.doctor.report import fault
from ringreduce.launch import meeting_place

_POLL_SECONDS = 0.05
_STEP_SECONDS = 5.0  # for a step of a connection between hosts
_ADDRESSES = 8  # that a rank listens at, at most
_LEAVING_SECONDS = 5.0  # rank 0's store outlives the others' last look at it

T = TypeVar("T")


class CannotMeet(Exception):
    """This rank did not reach rank 0; the finding is this rank's to tell."""

    def __init__(self, me: Identity, found: str, todo: str) -> None:
        super().__init__(found)
        self.finding = fault("store", found, todo, (me.rank,), (socket.gethostname(),))


@dataclasses.dataclass
class Gathered:
    """What rank 0 knows in the end.

    Attributes:
        facts: of the ranks that came.
        absent: the ranks that did not come within `seconds`.
        silent: ranks that came, but did not tell of their lines in time.
        lines: that were tried between hosts.
        seconds: the timeout.
    """

    facts: list[Facts]
    absent: list[int] = dataclasses.field(default_factory=list)
    silent: list[int] = dataclasses.field(default_factory=list)
    lines: list[probe.Line] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def hosts(self) -> list[list[Facts]]:
        """The ranks of each host, as ringreduce tells hosts apart; by their lowest ranks."""
        found: dict[str, list[Facts]] = {}
        for one in self.facts:
            found.setdefault(one.host_id, []).append(one)
        return list(found.values())


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
    if me.world_size == 1:
        return Gathered([gather(me)], seconds=seconds)
    store, where = _store(me, seconds)
    facts = gather(me)
    token = secrets.token_hex(probe.TOKEN_BYTES)
    probe.serve(_listen(facts, where), token)
    own = {"facts": dataclasses.asdict(facts), "token": token}

    def take_part() -> Gathered | None:
        store.set(f"facts/{me.rank}", json.dumps(own))
        if me.rank == 0:
            return _lead(store, me, seconds)
        _follow(store, me, seconds)
        return None

    # As long as rank 0 may need: for the facts of all, its own lines, those of the others.
    most = 2 * seconds + 3 * _most_seconds(_ADDRESSES * me.world_size) + _LEAVING_SECONDS
    try:
        return _within(most, take_part)
    except (RuntimeError, concurrent.futures.TimeoutError) as error:  # torch's, and _within's
        raise CannotMeet(
            me,
            f"rank 0, or the store at {where}, no longer answers: {_why(error)}",
            "Look at rank 0's output: it was not started, or has ended, or a line to its host is "
            "gone.",
        ) from error


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


def _store(me: Identity, seconds: float) -> tuple[Any, str]:
    """The store, and its host."""
    addr, port = meeting_place(me)
    assert port is not None  # as there are several ranks
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = me.rank == 0 and not agents
    wait = timedelta(seconds=seconds)
    try:
        # First without torch, which would retry longer than asked, and log a stack each time.
        left = seconds if serves else _wait_for_port(addr, port, seconds)
        store = _within(
            left,
            lambda: TCPStore(
                addr, port, me.world_size, serves, wait, wait_for_workers=False, multi_tenant=True
            ),
        )
    except (OSError, RuntimeError, concurrent.futures.TimeoutError) as error:
        if serves:
            raise CannotMeet(
                me,
                f"rank 0 cannot listen at port {port} for the other ranks: {_why(error)}",
                "Choose a port that is free on its host: MASTER_PORT (torchrun --master-port).",
            ) from error
        raise CannotMeet(
            me,
            f"no way to rank 0's store at {addr}:{port} within {seconds:g} s: {_why(error)}",
            f"Look whether rank 0 runs, whether another program has its port, whether {addr} is an "
            f"address of its host that this host reaches (getent hosts {addr}; ping {addr}), and "
            f"whether a firewall allows TCP port {port} there.",
        ) from error
    # torchrun's store lives on when it starts the ranks again.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"ringreduce.doctor/{start}", store), addr


def _wait_for_port(addr: str, port: int, seconds: float) -> float:
    """Waits until somebody listens there; how many of the seconds are left."""
    until = time.monotonic() + seconds
    while True:
        try:
            left = max(_POLL_SECONDS, until - time.monotonic())
            socket.create_connection((addr, port), timeout=left).close()
            return max(_POLL_SECONDS, until - time.monotonic())
        except OSError:  # of resolving, too
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


def _lead(store: Any, me: Identity, seconds: float) -> Gathered:
    """Rank 0's part."""
    everyone = set(range(me.world_size))
    present = _wait_for("facts", everyone, store, seconds)
    told = {rank: json.loads(store.get(f"facts/{rank}")) for rank in present}
    absent = sorted(everyone - set(present))
    gathered = Gathered([Facts(**o["facts"]) for o in told.values()], absent, seconds=seconds)
    plans = _plans(gathered, {rank: one["token"] for rank, one in told.items()})
    for rank in present:
        store.set(f"plan/{rank}", json.dumps(plans.get(rank, [])))
    gathered.lines = probe.try_lines(0, plans[0], _STEP_SECONDS)
    others = set(plans) - {0}
    answered = _wait_for("lines", others, store, _most_seconds(max(map(len, plans.values()))))
    for rank in answered:
        gathered.lines += [probe.Line(**line) for line in json.loads(store.get(f"lines/{rank}"))]
    gathered.silent = sorted(others - set(answered))
    store.set("done", "1")
    # The store may be this process's.
    _wait_for("left", set(present) - {0}, store, _LEAVING_SECONDS)
    return gathered


def _follow(store: Any, me: Identity, seconds: float) -> None:
    """The other ranks' part."""
    store.wait([f"plan/{me.rank}"], timedelta(seconds=2 * seconds))
    targets = [probe.Target(*target) for target in json.loads(store.get(f"plan/{me.rank}"))]
    lines = probe.try_lines(me.rank, targets, _STEP_SECONDS)
    store.set(f"lines/{me.rank}", json.dumps([dataclasses.asdict(line) for line in lines]))
    # Until then others connect to the port of this process.
    store.wait(["done"], timedelta(seconds=2 * _most_seconds(_ADDRESSES * me.world_size)))
    store.set(f"left/{me.rank}", "1")


def _wait_for(what: str, ranks: set[int], store: Any, seconds: float) -> list[int]:
    """The ranks that set it in time, in ascending order."""
    until = time.monotonic() + seconds
    missing = ranks
    while missing := {rank for rank in missing if not store.check([f"{what}/{rank}"])}:
        if time.monotonic() > until:
            break
        time.sleep(_POLL_SECONDS)
    return sorted(ranks - missing)


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
