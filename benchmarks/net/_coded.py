"""Codecs between hosts: the bytes that pass the links, and what each codec gains and loses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ringreduce.tools.bench.launch import Controller
from ringreduce.tools.bench.results import Row
from ringreduce.tools.bench.settings import OURS

if TYPE_CHECKING:
    from hosts import Hosts


def carried(hosts: Hosts) -> int:
    """Bytes that all links together have carried so far, headers included."""
    return sum(int(link["bytes"]) for link in hosts.statistics()["links"])


def count_bytes(
    controller: Controller, hosts: Hosts | None, row: Row, calls: int = 2
) -> dict[str, float]:
    """Bytes of one call at the links, by contender; nothing where no emulator counts them.

    Acknowledgements and the barriers around the calls are in it.
    """
    if hosts is None:
        return {}
    found = {}
    for key in row.measurements:
        before = carried(hosts)
        controller.sets[key].ask("round", warmup=0, iterations=calls)
        found[key] = (carried(hosts) - before) / calls
    return found


def coded_lines(codecs: Iterable[str], row: Row, at_link: Mapping[str, float]) -> list[str]:
    """What each codec gains over exact, sends and loses, a line each."""
    lines = []
    for key in codecs:
        if key not in row.measurements or OURS not in row.measurements:
            continue
        found = row.measurements[key]
        text = f"# {key}: {row.measurements[OURS].median / found.median:.2f} x as fast as exact"
        if key in at_link and OURS in at_link:
            text += f"; {at_link[key] / at_link[OURS]:.4f} of its bytes at the link"
        if found.error:
            text += (
                f"; rms error {found.error['rms']:.2g}, greatest {found.error['max']:.2g}, "
                f"1 - cosine {1 - found.error['cosine']:.2g}"
            )
        lines.append(text)
    return lines
