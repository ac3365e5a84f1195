"""The table of checks, and what they all find.

A check is a function that yields pairs, what was found and what to do; a third value, if there is
one, names the ranks, which otherwise are all those that the check looks at:

    @check("rank", "fault", "open-files")
    def open_files(one: Facts) -> Said: ...
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ringreduce.doctor.exchange import Gathered
from ringreduce.doctor.facts import Facts
from ringreduce.doctor.report import Finding, Severity, arranged

Ranks = Sequence[Facts]
Said = Iterator[tuple[str, str] | tuple[str, str, Sequence[int]]]
# What a check takes: the facts of a rank; those of all ranks of a host; all that was gathered, of
# any job; the same of a job on several hosts.
Scope = Literal["rank", "host", "job", "hosts"]
_MOST_NAMED = 4
_checks: list[tuple[Scope, Severity, str, Callable[[Any], Said]]] = []


def check(
    scope: Scope, severity: Severity, name: str
) -> Callable[[Callable[[Any], Said]], Callable[[Any], Said]]:
    """Enters a function in the table."""

    def enter(function: Callable[[Any], Said]) -> Callable[[Any], Said]:
        _checks.append((scope, severity, name, function))
        return function

    return enter


def judge(gathered: Gathered) -> list[Finding]:
    """What all checks find, the worst first."""
    hosts = gathered.hosts()
    subjects: dict[Scope, Sequence[tuple[Any, Ranks]]] = {
        "rank": [(one, [one]) for one in gathered.facts],
        "host": [(ranks, ranks) for ranks in hosts],
        "job": [(gathered, gathered.facts)],
        "hosts": [(gathered, gathered.facts)] * (len(hosts) > 1),
    }
    names = {one.rank: one.host for one in gathered.facts}
    found = []
    for scope, severity, name, function in _checks:
        for subject, ranks in subjects[scope]:
            for what, todo, *whose in function(subject):
                numbers = sorted(whose[0] if whose else [one.rank for one in ranks])
                on = tuple(dict.fromkeys(names[rank] for rank in numbers if rank in names))
                found.append(Finding(name, severity, what, todo, tuple(numbers), on))
    return arranged(found)


def some_of(values: Sequence[object]) -> str:
    """The first few, and how many more."""
    said = ", ".join(map(str, values[:_MOST_NAMED]))
    more = len(values) - _MOST_NAMED
    return f"{said} and {more} more" if more > 0 else said
