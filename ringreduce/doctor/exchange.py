"""Brings the facts of all ranks to rank 0, and lets the hosts try the lines between them.

It all goes through a store at the master's address, which is torchrun's where torchrun has one:

    facts/R     of rank R, with the ports at which it listens
    roster      rank 0 has the facts of all, or has waited long enough: who is there
    lines/R     what rank R, the first of its host, found between its host and the others
    done        rank 0 needs the others no longer
"""

import dataclasses
import json
import os
import secrets
import socket
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ringreduce._backend import extension
from ringreduce._launchers import Identity
from ringreduce.doctor import probe
from ringreduce.doctor.facts import Facts, gather
from ringreduce.doctor.report import Finding
from ringreduce.launch import meeting_place

_POLL_SECONDS = 0.05
_STEP_SECONDS = 5.0  # for a step of a connection between hosts
_LEAVING_SECONDS = 5.0  # rank 0's store outlives the others' last look at it


class CannotMeet(Exception):
    """This rank did not reach rank 0; the finding is this rank's to tell."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


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


def host_of(facts: Facts) -> str:
    """The same for ranks that ringreduce takes for ranks of one host."""
    posed = [row["value"] for row in facts.variables if row["name"] == "RINGREDUCE_HOSTID"
             and row["source"] == "environment"]  # fmt: skip
    return posed[0] if posed else facts.machine


def collect(me: Identity, seconds: float) -> Gathered | None:
    """Gathers the facts of all ranks.

    Args:
        me: who this process is.
        seconds: that rank 0 waits for the others.

    Returns:
        What rank 0 knows; None for the other ranks.

    Raises:
        CannotMeet: there is no way to rank 0's store.
        ValueError: nothing says where it is.
    """
    if me.world_size == 1:
        return Gathered([gather(me)], seconds=seconds)
    store, where = _store(me, seconds)
    facts = gather(me)
    listeners = _listen(facts, where)
    token = secrets.token_bytes(16)
    if listeners:
        probe.serve(listeners, token)
    own = {"facts": dataclasses.asdict(facts), "token": token.hex()}
    try:
        store.set(f"facts/{me.rank}", json.dumps(own))
        if me.rank == 0:
            return _lead(store, me, seconds)
        _follow(store, me, seconds)
    except RuntimeError as error:  # torch's DistStoreError, DistNetworkError
        raise CannotMeet(_lost_store(me, where, error)) from error
    return None


def _store(me: Identity, seconds: float) -> tuple[Any, str]:
    """The store, and its host."""
    addr, port = meeting_place(me)
    assert port is not None  # as there are several ranks
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = me.rank == 0 and not agents
    wait = timedelta(seconds=seconds)
    try:
        store = TCPStore(
            addr, port, me.world_size, serves, wait, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise CannotMeet(_no_store(me, addr, port, serves, error)) from error
    # torchrun's store lives on when it starts the ranks again.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"ringreduce.doctor/{start}", store), addr


def _no_store(me: Identity, addr: str, port: int, serves: bool, error: RuntimeError) -> Finding:
    why = str(error).partition("\n")[0]
    if serves:
        found = f"rank 0 cannot listen at port {port} for the other ranks: {why}"
        todo = "Choose a port that is free on its host: MASTER_PORT (torchrun --master-port)."
    else:
        found = f"no way to rank 0's store at {addr}:{port}: {why}"
        todo = (
            f"Look whether rank 0 runs, whether {addr} is an address of its host that this host "
            f"reaches (ping {addr}), and whether a firewall allows TCP port {port} there."
        )
    return Finding("store", "fault", found, todo, (me.rank,), socket.gethostname())


def _lost_store(me: Identity, addr: str, error: RuntimeError) -> Finding:
    why = str(error).partition("\n")[0]
    return Finding(
        "store",
        "fault",
        f"the store at {addr} no longer answers: {why}",
        "Look at rank 0's output: it has ended, or a line to its host is gone.",
        (me.rank,),
        socket.gethostname(),
    )


def _listen(facts: Facts, store_host: str) -> list[socket.socket]:
    """Listens where ringreduce would, by its own choice; the facts get where and why."""
    try:
        found, facts.why_there = extension().listen_for(store_host)
    except RuntimeError as error:  # ringreduce.Error
        facts.listen_error = str(error)
        return []
    facts.listening = [(name, address, port) for name, address, port, _ in found]
    return [socket.socket(fileno=fd) for *_, fd in found]


def _lead(store: Any, me: Identity, seconds: float) -> Gathered:
    """Rank 0's part."""
    others = range(1, me.world_size)
    came = _wait_for([f"facts/{rank}" for rank in others], store, seconds)
    present = [0, *(rank for rank in others if f"facts/{rank}" in came)]
    told = {rank: json.loads(store.get(f"facts/{rank}")) for rank in present}
    facts = [Facts(**told[rank]["facts"]) for rank in present]
    roster = {
        "targets": [
            [one.rank, host_of(one), told[one.rank]["token"], one.listening] for one in facts
        ]
    }
    store.set("roster", json.dumps(roster))
    lines = _try_others(0, roster)
    leaders = sorted(_leaders(roster).values())
    most = _most_seconds(len(facts))
    answered = _wait_for([f"lines/{rank}" for rank in leaders if rank], store, most)
    for key in sorted(answered):
        lines += [probe.Line(**line) for line in json.loads(store.get(key))]
    silent = [rank for rank in leaders if rank and f"lines/{rank}" not in answered]
    store.set("done", "1")
    # The store may be this process's.
    _wait_for([f"left/{rank}" for rank in present if rank], store, _LEAVING_SECONDS)
    absent = sorted(set(range(me.world_size)) - set(present))
    return Gathered(facts, absent, silent, lines, seconds)


def _follow(store: Any, me: Identity, seconds: float) -> None:
    """The other ranks' part."""
    store.wait(["roster"], timedelta(seconds=2 * seconds))
    roster = json.loads(store.get("roster"))
    if me.rank in _leaders(roster).values():
        lines = _try_others(me.rank, roster)
        store.set(f"lines/{me.rank}", json.dumps([dataclasses.asdict(one) for one in lines]))
    # Until then others connect to the port of this process.
    store.wait(["done"], timedelta(seconds=2 * _most_seconds(len(roster["targets"]))))
    store.set(f"left/{me.rank}", "1")


def _wait_for(keys: list[str], store: Any, seconds: float) -> Collection[str]:
    """Those of the keys that were set in time."""
    until = time.monotonic() + seconds
    there: set[str] = set()
    while True:
        there |= {key for key in keys if key not in there and store.check([key])}
        if len(there) == len(keys) or time.monotonic() > until:
            return there
        time.sleep(_POLL_SECONDS)


def _leaders(roster: dict[str, Any]) -> dict[str, int]:
    """The first rank of each host."""
    first: dict[str, int] = {}
    for rank, host, _, _ in roster["targets"]:
        first[host] = min(rank, first.get(host, rank))
    return first


def _most_seconds(ranks: int) -> float:
    """How long a rank may take to try its lines: connect, a few packets, many packets."""
    return 5 * _STEP_SECONDS * (1 + ranks // 32)


def _try_others(rank: int, roster: dict[str, Any]) -> list[probe.Line]:
    """The lines from this rank's host to all ranks of other hosts."""
    hosts = {number: host for number, host, _, _ in roster["targets"]}
    if _leaders(roster)[hosts[rank]] != rank:
        return []
    targets = [
        probe.Target(number, address, port, bytes.fromhex(token))
        for number, host, token, listening in roster["targets"]
        if host != hosts[rank]
        for _, address, port in listening
    ]
    return probe.try_lines(rank, targets, _STEP_SECONDS)
