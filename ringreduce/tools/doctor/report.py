"""What a check has found, and how it is told to people and to programs."""

import dataclasses
import functools
import json
import textwrap
from collections.abc import Sequence
from typing import Literal

from ringreduce.core.words import ranks_text

Severity = Literal["fault", "slow", "note"]
_ORDER: tuple[Severity, ...] = ("fault", "slow", "note")
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        severity: "fault" (it will not work, or not as asked), "slow", or "note".
        check: the name of the check; docs/doctor.md lists them.
        found: what, with numbers.
        todo: a sentence or a command.
        ranks: whose, in ascending order.
        hosts: the names of the hosts of these ranks, as far as they are known.
    """

    severity: Severity
    check: str
    found: str
    todo: str
    ranks: Sequence[int] = ()
    hosts: Sequence[str] = ()


fault, slow, note = (functools.partial(Finding, severity) for severity in _ORDER)


def arranged(findings: Sequence[Finding]) -> list[Finding]:
    """The worst first; what was found of several ranks or hosts in the same words is said once."""
    merged: dict[tuple[str, ...], Finding] = {}
    for one in findings:
        key = (one.check, one.severity, one.found, one.todo)
        before = merged.get(key, one)
        merged[key] = dataclasses.replace(
            one,
            ranks=tuple(sorted({*before.ranks, *one.ranks})),
            hosts=tuple(dict.fromkeys((*before.hosts, *one.hosts))),
        )
    return sorted(merged.values(), key=lambda one: _ORDER.index(one.severity))


def status_of(findings: Sequence[Finding]) -> int:
    """The exit status: 1 if there is more than notes."""
    return int(any(one.severity != "note" for one in findings))


def to_json(findings: Sequence[Finding]) -> str:
    """A list with an object for each finding; host is "" for several, rank the first of ranks."""
    rows = [
        {
            "rank": one.ranks[0] if one.ranks else None,
            "ranks": one.ranks,
            "host": one.hosts[0] if len(one.hosts) == 1 else "",
            **{name: getattr(one, name) for name in ("check", "severity", "found", "todo")},
        }
        for one in findings
    ]
    return json.dumps(rows, indent=2)


def to_text(findings: Sequence[Finding], heading: str) -> str:
    """A paragraph for each finding under a heading, and a last line with their number."""
    lines = [heading]
    for one in findings:
        hosts = one.hosts[0] if len(one.hosts) == 1 else counted(len(one.hosts), "host")
        where = (ranks_text(one.ranks) if one.ranks else "") + f" on {hosts}" * bool(one.hosts)
        lines.append(f"{one.severity}  {one.check}" + f"  ({where})" * bool(where))
        for text in (one.found, f"to do: {one.todo}"):
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent="    ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    kinds = [one.severity for one in findings]
    counts = [
        f"{kinds.count(kind)} {kind}" + "s" * (kind != "slow" and kinds.count(kind) > 1)
        for kind in _ORDER
        if kind in kinds
    ]
    lines.append(", ".join(counts) or "nothing found: fit for ringreduce")
    return "\n".join(lines)


def counted(number: int, what: str) -> str:
    """ "1 rank", "2 ranks" """
    return f"{number} {what}" + "s" * (number != 1)
