"""The table of checks, and what they all find.

A check is a function that yields findings.  Their ranks, if it names none, are all at which it
looks:

    @check("rank")
    def open_files(one: Facts) -> Found: ...
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ringreduce.tools.doctor.exchange import Gathered
from ringreduce.tools.doctor.facts import Facts
from ringreduce.tools.doctor.report import Finding, arranged

Ranks = Sequence[Facts]
Found = Iterator[Finding]
Check = Callable[[Any], Found]
# What a check takes: the facts of a rank; those of all ranks of a host; all that was gathered, of
# any job; the same of a job on several hosts.
Scope = Literal["rank", "host", "job", "hosts"]
_MOST_NAMED = 4
# Faults that keep groups from being made: the error of such a group, and a rank that is missing,
# are then no causes of their own.
_CAUSES = {
    "file-size", "host-id", "listen", "loopback", "memory", "open-files", "path-mtu", "proc",
    "reach", "same-address", "same-ringreduce", "same-variables", "shared-memory", "threads-limit",
    "unix-socket", "user", "variable", "world-size",
}  # fmt: skip
_checks: list[tuple[Scope, Check]] = []


def check(scope: Scope) -> Callable[[Check], Check]:
    """Enters a function in the table."""

    def enter(function: Check) -> Check:
        _checks.append((scope, function))
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
    for scope, function in _checks:
        for subject, ranks in subjects[scope]:
            for one in function(subject):
                numbers = sorted(one.ranks or [facts.rank for facts in ranks])
                on = dict.fromkeys(names[rank] for rank in numbers if rank in names)
                found.append(dataclasses.replace(one, ranks=tuple(numbers), hosts=tuple(on)))
    faults = [one for one in found if one.severity == "fault"]
    blamed = {rank for one in faults if one.check in _CAUSES for rank in one.ranks}
    return arranged([one for one in found if one.check != "group" or not blamed & {*one.ranks}])


def some_of(values: Sequence[object]) -> str:
    """The first few, and how many more."""
    said = ", ".join(map(str, values[:_MOST_NAMED]))
    more = len(values) - _MOST_NAMED
    return f"{said} and {more} more" if more > 0 else said
