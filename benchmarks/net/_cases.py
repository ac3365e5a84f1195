"""The paths that benchmarks/net/compare.py measures: the hosts, the lines, who takes part."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ringreduce.tools.bench.settings import OURS, Contender
from ringreduce.tools.plan.lines import parse

KIB, MIB = 1 << 10, 1 << 20
GLOO = "gloo"


@dataclass(frozen=True)
class Case:
    """One path. Rank r runs on host r // per_host; `hosts` of 0 is this machine, over loopback.

    `line` has the options of tests/hosts.py's Hosts.
    """

    key: str
    title: str
    hosts: int
    sizes: tuple[int, ...]
    per_host: int = 1
    line: dict[str, object] = field(default_factory=dict)
    congestion: str = ""  # of all connections; "": the system's default
    ours: dict[str, str] = field(default_factory=dict)  # ours' environment
    also: dict[str, dict[str, str]] = field(default_factory=dict)  # ours again, in another way
    codecs: tuple[str, ...] = ()  # take part too
    rounds: int = 5
    slow: bool = False  # a call may take seconds: then a round is one call, after `warmup` others
    warmup: int = 1

    @property
    def world(self) -> int:
        """How many ranks."""
        return self.per_host * max(1, self.hosts)

    @property
    def interface(self) -> str:
        """The name of the interface that the ranks use, on each host."""
        return "lo" if self.hosts == 0 else "eth0" if self.line.get("veth") else "wan0"

    def limit(self, size: int) -> float:
        """Seconds below which no all-reduce of `size` bytes can be, by the line; 0: no line.

        Each byte of another host travels one way, and a host's lines carry 2 (H-1)/H of the size.
        The rate is that of a host's line, or else it has one to each other host.
        """
        rate = float(self.line.get("rate_mbit", 0)) * 1e6 / 8  # type: ignore[arg-type]
        if not rate:
            return 0.0
        if not (self.line.get("veth") or self.line.get("shared_line")):
            rate *= self.hosts - 1
        delay = float(self.line.get("delay_ms", 0)) / 1e3  # type: ignore[arg-type]
        return delay + 2 * (self.hosts - 1) / self.hosts * size / rate

    def contenders(self, backend: str, peers: tuple[str, ...]) -> list[Contender]:
        """Ours, through `backend`, then the peers; one that fails is left out, with the reason."""
        way = {"RINGREDUCE_CONGESTION": self.congestion} if self.congestion else {}
        title = backend if backend == "ringreduce" else f"{backend} (as ours)"
        named = {"GLOO_SOCKET_IFNAME": self.interface}
        found = [
            Contender(OURS, title, "torch", backend, {**named, **way, **self.ours}, optional=True)
        ]
        for key, environment in self.also.items():
            variables = {**named, **way, **self.ours, **environment}
            if backend == "ringreduce":
                found.append(Contender(key, key, "torch", backend, variables, optional=True))
        for codec in self.codecs if backend == "ringreduce" else ():
            variables = {**named, **way, **self.ours}
            found.append(Contender(codec, codec, "codec", backend, variables, optional=True))
        for peer in peers:
            found.append(Contender(peer, peer, "torch", peer, named, optional=True))
        return found


LAN = {"rate_mbit": 1000, "delay_ms": 0.1}
WAN = {"rate_mbit": 500, "delay_ms": 25, "loss": 0.001}


def wan(congestion: str, sizes: tuple[int, ...], **more: Any) -> Case:
    """500 Mbit/s and 50 ms, with that congestion control."""
    return Case(
        f"wan_{congestion}",
        f"2 hosts, 500 Mbit/s, 50 ms round trip, 0.1 % loss, {congestion}",
        hosts=2,
        sizes=sizes,
        line=WAN,
        congestion=congestion,
        slow=True,
        **more,
    )


def on_line(text: str, hosts: int) -> Case:
    """The case of a line in the planner's words ("500Mbit,50ms,0.1%,bbr"). Raises ValueError."""
    line = parse(text)
    if line.burst:
        raise ValueError(f"in the line '{text}', no burst can be emulated")
    words = {word.strip().lower() for word in text.split(",")}
    return Case(
        re.sub("[^0-9a-z.]+", "_", f"{hosts}_{text.lower()}"),
        f"{hosts} hosts, {line}",
        hosts=hosts,
        sizes=(4 * KIB, 96 * KIB, 768 * KIB, 3 * MIB, 25 * MIB),
        line={
            "rate_mbit": line.rate * 8e-6,
            "delay_ms": line.round_trip * 1e3 / 2,
            "loss": line.loss,
            "mtu": line.mtu,
            "shared_line": hosts > 2,  # the rate is that of a host
        },
        congestion=line.congestion if words & {"bbr", "cubic"} else "",
        slow=True,
        warmup=3,
    )


CASES = (
    Case(
        "loopback",
        "2 ranks of one host, over TCP",
        hosts=0,
        per_host=2,
        sizes=(KIB, MIB, 25 * MIB),
        ours={"RINGREDUCE_WIRE": "tcp"},
        rounds=7,
    ),
    # What encryption costs where the wire is no limit.
    Case(
        "guarded",
        "2 ranks of one host, over TCP, with encryption",
        hosts=0,
        per_host=2,
        sizes=(KIB, MIB, 25 * MIB),
        ours={"RINGREDUCE_WIRE": "tcp"},
        also={"encrypted": {"RINGREDUCE_TLS": "1"}},
        rounds=7,
    ),
    Case(
        "lan_2",
        "2 hosts, 1 Gbit/s, 0.2 ms round trip",
        hosts=2,
        sizes=(KIB, MIB, 25 * MIB),
        line=LAN,
    ),
    Case(
        "lan_300",
        "2 hosts, 300 Mbit/s, 0.2 ms round trip",
        hosts=2,
        sizes=(25 * MIB,),
        line={"rate_mbit": 300, "delay_ms": 0.1},
    ),
    Case(
        "lan_lossy",
        "2 hosts, 1 Gbit/s, 0.2 ms round trip, 0.1 % loss",
        hosts=2,
        sizes=(MIB, 25 * MIB),
        line={**LAN, "loss": 0.001},
        also={
            "with BBR": {"RINGREDUCE_CONGESTION": "bbr"},
            "with cubic": {"RINGREDUCE_CONGESTION": "cubic"},
        },
        slow=True,
        rounds=9,
        warmup=4,
    ),
    Case(
        "lan_4",
        "4 hosts, 1 Gbit/s each (tbf, MTU 9000)",
        hosts=4,
        sizes=(25 * MIB,),
        line={"veth": True, "rate_mbit": 1000, "mtu": 9000},
    ),
    # Plain sockets carried 413 by four connections.  With the others Gloo takes half a minute.
    wan("bbr", (KIB, 25 * MIB)),
    wan("cubic", (25 * MIB,), rounds=3, warmup=0),
    wan("reno", (25 * MIB,), rounds=3, warmup=0),
    # The choice of the algorithm, which knows the round trip, beside one that takes it for a LAN's.
    Case(
        "wan_4",
        "4 hosts, 500 Mbit/s, 50 ms round trip, bbr",
        hosts=4,
        sizes=(64 * KIB, 256 * KIB, 4 * MIB),
        line={"rate_mbit": 500, "delay_ms": 25},
        congestion="bbr",
        also={"as on a LAN": {"RINGREDUCE_ROUND_TRIP_MS": "0.02"}},
        slow=True,
    ),
    Case(
        "hierarchical",
        "2 hosts x 2 ranks, 1 Gbit/s, 0.2 ms round trip",
        hosts=2,
        per_host=2,
        sizes=(25 * MIB,),
        line=LAN,
        also={
            "hierarchical": {"RINGREDUCE_ALGORITHM": "hierarchical"},
            "ring": {"RINGREDUCE_ALGORITHM": "ring"},
        },
    ),
    Case(
        "slow_2",
        "2 hosts, 100 Mbit/s, 0.2 ms round trip",
        hosts=2,
        sizes=(25 * MIB,),
        line={"rate_mbit": 100, "delay_ms": 0.1},
        codecs=("bfloat16", "int8", "int4"),
        slow=True,
        rounds=5,
    ),
)
