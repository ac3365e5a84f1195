"""Hosts, the lines between them, and the order in which rings go through them.

    RINGREDUCE_RING=measure torchrun ... train.py

    dist.init_process_group("ringreduce")
    print(ringreduce.topology.of())

`order` is what finds the ring, for rates of your own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ringreduce.core.backend import backend_of, extension, ringreduce_group

MOST_COLUMNS = 16  # hosts in a row of the table, which is left out for more

_SOURCES = {
    "ranks": "that of the ranks",
    "given": "as RINGREDUCE_RING has it",
    "measured": "as measured",
}


def order(matrix: Sequence[Sequence[float]]) -> list[int]:
    """The ring through all hosts, from host 0, whose slowest link is as fast as can be.

    Exactly so for up to 16 hosts; for more it is searched for.

    Args:
        matrix: matrix[a][b] is the rate from host a to host b, in any unit; the diagonal does not
            matter, and the two directions may differ.

    Returns:
        The numbers of the hosts in the order of the ring.

    Raises:
        ValueError: it is no square of numbers from 0 on.
    """
    ring: list[int] = extension().best_ring([list(map(float, row)) for row in matrix])
    return ring


def slowest_link(matrix: Sequence[Sequence[float]], ring: Sequence[int]) -> float:
    """The rate of a ring's slowest link.

    Args:
        matrix: as for `order`.
        ring: the hosts in its order.

    Returns:
        The rate, in the unit of `matrix`; infinite for a ring of one host.
    """
    links = zip(ring, [*ring[1:], *ring[:1]], strict=True)
    return min((matrix[a][b] for a, b in links if a != b), default=float("inf"))


@dataclass(frozen=True)
class Topology:
    """The hosts of a group and their ring.

    Attributes:
        hosts: the ranks of each host; hosts are numbered by their lowest ranks.
        names: what the hosts call themselves.
        ring: the hosts in the order of the ring.
        source: how that came about: "ranks", "given" or "measured".
        matrix: Mbit/s from host to host as measured when the group was made; empty if it was not.
        ranks: the ranks in the order of the ring.
    """

    hosts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    ring: tuple[int, ...]
    source: str
    matrix: tuple[tuple[float, ...], ...]
    ranks: tuple[int, ...]

    @property
    def slowest(self) -> tuple[int, int, float] | None:
        """The ring's slowest link as (from host, to host, Mbit/s); None if it was not measured."""
        if len(self.matrix) < 2:
            return None
        links = zip(self.ring, self.ring[1:] + self.ring[:1], strict=True)
        return min(((a, b, self.matrix[a][b]) for a, b in links), key=lambda link: link[2])

    def __str__(self) -> str:
        """A table of the rates, the ring and its slowest link."""
        lines = []
        if self.matrix and len(self.hosts) <= MOST_COLUMNS:
            titles = [f"{number} {name}" for number, name in enumerate(self.names)]
            width = max(len("Mbit/s from"), *map(len, titles))
            heads = "".join(f"{f'to {number}':>9}" for number in range(len(self.hosts)))
            lines.append(f"{'Mbit/s from':<{width}}{heads}")
            for number, (title, row) in enumerate(zip(titles, self.matrix, strict=True)):
                cells = ("-" if to == number else f"{rate:.0f}" for to, rate in enumerate(row))
                lines.append(f"{title:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
        around = " > ".join(map(str, (*self.ring, self.ring[0])))
        lines.append(f"ring of hosts: {around}, {_SOURCES[self.source]}")
        if self.slowest:
            a, b, rate = self.slowest
            own = slowest_link(self.matrix, range(len(self.hosts)))
            lines.append(
                f"slowest link: {rate:.0f} Mbit/s, from host {a} to host {b}; "
                f"in the hosts' own order {own:.0f}"
            )
        return "\n".join(lines)


def of(group: dist.ProcessGroup | None = None) -> Topology:
    """The topology of a group; the same on all its ranks, without asking the others.

    Args:
        group: as for `ringreduce.staging_bytes`.

    Returns:
        The hosts and their ring.

    Raises:
        TypeError, RuntimeError, Timeout, PeerLost, Error: as for `ringreduce.staging_bytes`.
    """
    found = ringreduce_group(group, again=False)
    hosts, names, source, ring, ranks, matrix = extension().topology(backend_of(found))
    if not hosts:  # all share memory
        hosts, names = [list(range(found.size()))], [socket.gethostname()]
        ring = [0]
    if not ranks:
        ranks = list(range(found.size()))
    return Topology(
        hosts=tuple(map(tuple, hosts)),
        names=tuple(names),
        ring=tuple(ring),
        source=source,
        matrix=tuple(map(tuple, matrix)),
        ranks=tuple(ranks),
    )
