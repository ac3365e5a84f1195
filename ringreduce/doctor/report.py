"""What a check has found, and how it is told to people and to programs."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Literal

Severity = Literal["fault", "slow", "note"]
_ORDER: tuple[Severity, ...] = ("fault", "slow", "note")
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        check: the name of the check; docs/doctor.md lists them.
        severity: "fault" (it will not work, or not as asked), "slow", or "note".
        found: what, with numbers.
        todo: a sentence or a command.
        ranks: whose, in ascending order.
        host: of these ranks; "" for several hosts.
    """

    check: str
    severity: Severity
    found: str
    todo: str
    ranks: tuple[int, ...] = ()
    host: str = ""


def arranged(findings: Sequence[Finding]) -> list[Finding]:
    """The worst first; what several ranks of a host have said of themselves is said once."""
    merged: dict[tuple[str, ...], Finding] = {}
    for one in findings:
        key = (one.check, one.severity, one.found, one.todo, one.host)
        before = merged.get(key)
        ranks = set(one.ranks) | set(before.ranks if before else ())
        merged[key] = dataclasses.replace(one, ranks=tuple(sorted(ranks)))
    return sorted(merged.values(), key=lambda one: _ORDER.index(one.severity))


def status_of(findings: Sequence[Finding]) -> int:
    """The exit status: 1 if there is more than notes."""
    return int(any(one.severity != "note" for one in findings))


def to_json(findings: Sequence[Finding]) -> str:
    """A list with an object for each finding; rank is the first of ranks, or null."""
    rows = [
        {
            "rank": one.ranks[0] if one.ranks else None,
            "ranks": list(one.ranks),
            "host": one.host,
            "check": one.check,
            "severity": one.severity,
            "found": one.found,
            "todo": one.todo,
        }
        for one in findings
    ]
    return json.dumps(rows, indent=2)


def to_text(findings: Sequence[Finding], heading: str) -> str:
    """A paragraph for each finding under a heading, and a last line with their number."""
    lines = [heading]
    for one in findings:
        where = ranks_text(one.ranks)
        if one.host:
            where += f" on {one.host}" if where else f"host {one.host}"
        lines.append(f"{one.severity}  {one.check}" + (f"  ({where})" if where else ""))
        for label, text in (("", one.found), ("to do: ", one.todo)):
            lines += textwrap.wrap(
                label + text,
                _WIDTH,
                initial_indent="    ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    counts = {kind: sum(one.severity == kind for one in findings) for kind in _ORDER}
    said = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n)
    said = said.replace("slows", "slow")
    lines.append(said or "nothing found: fit for ringreduce")
    return "\n".join(lines)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks in words: "rank 3", "ranks 0 to 6, 9"; "" for none."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run] for run in runs
    ]
    words = ", ".join(part for run in parts for part in run)
    return words and ("rank " if len(ranks) == 1 else "ranks ") + words
