"""`python -m ringreduce.recorder DIR`: what ended a job, from the dumps that its ranks left in DIR.

It prints three sentences: the operation and the group that failed, with the rank to blame; the last
operation of each rank; the process and the line to look at.  dump.py writes the dumps.  The exit
status is 0 if a cause was found, 1 if none was, and 2 if the dumps cannot be read.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.core.files import Damaged, sharing
from ringreduce.core.words import listed, ranks_text, say
from ringreduce.observe.dump import EARLIER_PREFIX, MESSAGES, PREFIX, meetings_of, read

Dump = dict[str, Any]

_ROOTS = {"reduce": "to", "gather": "to", "send": "to"}
# Ranks may give these other numbers of elements, or the records do not tell that they may not.
_UNEVEN = ("all_to_all",)


def _paths(folder: str | Path) -> Iterator[tuple[str, int]]:
    """What is named like a dump in a folder and two levels below, and the rank in the name."""

    def tell(error: OSError) -> None:
        say(f"left out: {error.filename} cannot be read: {error.strerror}", sys.stderr)

    top = os.path.join(folder, "")
    for at, folders, files in os.walk(top, onerror=tell):
        for name in sorted(folders + files):
            if known := re.fullmatch(f"(?:{PREFIX}|{EARLIER_PREFIX})([0-9]{{1,18}})", name):
                yield os.path.join(at, name), int(known[1])
        folders[:] = sorted(folders) if at[len(top) :].count(os.sep) < 1 else []


def _time_of(dump: Dump) -> int:
    return int(dump["ringreduce"]["time_ns"])


def load(folder: str | Path) -> dict[int, Dump]:
    """Reads the dumps in a folder, by rank, of the newest job.  Other jobs, and what is damaged,
    are left out, with a line on stderr.

    Raises:
        ValueError: there is no dump that can be read.
    """
    found = []
    for path, rank in _paths(folder):
        try:
            dump = read(path)
            if (of := dump["ringreduce"]["rank"]) != rank:
                raise Damaged(f"{path} is of rank {of}, not of rank {rank}")
        except Damaged as error:
            say(f"left out: {error}", sys.stderr)
            continue
        if wrong := dump["damaged"]:
            total = len(wrong) + len(dump["entries"])
            say(f"{len(wrong)} of {total} records are left out of {path}: {wrong[0]}", sys.stderr)
        found.append(dump | {"path": path})
    if not found:
        raise ValueError(
            f"{folder} has no file {PREFIX}0 or the like: no rank has left a dump that can be read"
        )
    jobs = [sorted(job, key=_time_of, reverse=True) for job in sharing(found, meetings_of)]
    newest, *others = sorted(jobs, key=lambda job: _time_of(job[0]), reverse=True)
    for job in others:
        about = job[0]["ringreduce"]
        name = about["job"] or os.path.basename(about["program"])
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_time_of(job[0]) / 1e9))
        ranks = ranks_text({dump["ringreduce"]["rank"] for dump in job})
        places = listed(sorted({os.path.dirname(dump["path"]) for dump in job}))
        say(f"left out what {ranks} of job {name} dumped until {until} in {places}", sys.stderr)
    dumps: dict[int, Dump] = {}
    for dump in newest:
        rank = dump["ringreduce"]["rank"]
        if dumps.setdefault(rank, dump) is not dump:
            say(f"left out: {dump['path']} is older than another dump of rank {rank}", sys.stderr)
    return dict(sorted(dumps.items()))


# ---- words


def _big(text: str) -> str:
    return text[:1].upper() + text[1:]


def _first(error: Dump) -> str:
    """The part of an error's text that says what happened."""
    text: str = error["text"]
    return text.partition(". ")[0].partition("; noticed by ")[0].removesuffix(".")


def _seconds(nanos: float) -> str:
    return f"{max(0.0, nanos) / 1e9:.3g} s"


# ---- operations and groups


@dataclass(frozen=True)
class _Call:
    """An operation of a rank."""

    own: dict[str, Any]
    age: int  # nanoseconds from when something last happened in it until the dump
    began: int  # to run, by the clock of `_Group.dumped`

    @property
    def name(self) -> str:
        name = f"{self.own['kind']} #{self.own['sequence']}"
        return f"{name} {self.root}" if self.is_message else name

    @property
    def is_message(self) -> bool:
        return self.own["kind"] in MESSAGES

    @property
    def root(self) -> str:
        return f"{_ROOTS.get(self.own['kind'], 'from')} rank {self.own['root']}"

    @property
    def about(self) -> str:
        """What ranks must agree on, as errors show it."""
        own = self.own
        words = []
        if own["dtype"]:
            words += [own["dtype"], f"{own['elements']} elements"]
        words += [word for word in (own["op"], own["codec"]) if word]
        if own["root"] >= 0:
            words.append(self.root)
        return f"{own['kind']} ({', '.join(words)})" if words else str(own["kind"])

    @property
    def signature(self) -> tuple[Any, ...]:
        own = self.own
        elements = 0 if own["kind"] in _UNEVEN else own["elements"]
        return own["kind"], own["dtype"], elements, own["op"], own["root"], own["codec"]

    @property
    def came(self) -> bool:
        """Whether it began to run, and not only after the group had failed."""
        return self.own["state"] in ("running", "done") or bool(self.own["arrived_ns"])

    @property
    def doing(self) -> str:
        words = {"done": "had ended {}", "running": "was in {}",
                 "queued": "had called {}, which waits for an earlier one"}  # fmt: skip
        return words.get(self.own["state"], "failed in {}").format(self.name)


@dataclass
class _Group:
    """A group of the job as far as the dumps know it."""

    name: str
    desc: str
    ranks: list[int]
    calls: dict[int, dict[int, _Call]] = field(default_factory=dict)  # by rank and number
    messages: dict[int, list[_Call]] = field(default_factory=dict)  # by rank
    to_common: dict[int, int] = field(default_factory=dict)  # makes times of ranks comparable
    dumped: dict[int, int] = field(default_factory=dict)  # when each rank did, by that clock
    unsure: set[int] = field(default_factory=set)  # ranks with records that are damaged

    @property
    def title(self) -> str:
        desc = "" if self.desc in ("", "undefined", self.name) else f" ({self.desc})"
        return f"group '{self.name}'{desc} of {ranks_text(self.ranks)}"

    def all_of(self, rank: int) -> list[_Call]:
        """The operations and messages of a rank."""
        return [*self.calls.get(rank, {}).values(), *self.messages.get(rank, [])]

    @property
    def silent(self) -> list[int]:
        """Ranks without a dump of the group."""
        return [rank for rank in self.ranks if rank not in self.calls]

    def first(self, wrong: Callable[[int], bool]) -> int | None:
        """The first operation for which `wrong` holds, of those whose records are all there."""
        if not any(self.calls.values()):
            return None
        kept = max(min(calls) for calls in self.calls.values() if calls)
        numbers = sorted({n for calls in self.calls.values() for n in calls if n >= kept})
        return next((n for n in numbers if wrong(n)), None)


def _groups_of(dumps: dict[int, Dump]) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    on_gpus: dict[tuple[str, str], tuple[str, str]] = {}  # the group that each belongs to
    for rank, dump in dumps.items():
        about = dump["ringreduce"]
        here: dict[str, _Group] = {}
        for name in about["groups"]:
            config = dump["pg_config"][name]
            ranks = [int(word) for word in config["ranks"].strip("[]").split(",")]
            key = name, config["ranks"]
            here[name] = groups.setdefault(key, _Group(name, config["desc"], ranks))
            here[name].calls[rank], here[name].messages[rank] = {}, []
            here[name].to_common[rank] = _to_common_clock(dumps, name, about)
            here[name].dumped[rank] = about["monotonic_ns"] + here[name].to_common[rank]
            here[name].unsure.update([rank] if dump.get("damaged") else [])
            if of := about["groups"][name].get("of"):
                on_gpus[key] = of, config["ranks"]
        for entry in dump["entries"]:
            own = entry["ringreduce"]
            group = here[own["group"]]
            last = max(own["posted_ns"], own["arrived_ns"], own["done_ns"])
            began = own["arrived_ns"] + group.to_common[rank]
            call = _Call(own, about["monotonic_ns"] - last, began)
            if call.is_message:
                group.messages[rank].append(call)
            else:
                group.calls[rank][own["sequence"]] = call
    # A rank that has used no GPU has called nothing there.
    for key, of_key in on_gpus.items():
        group, base = groups[key], groups.get(of_key, groups[key])
        for rank in base.calls.keys() - group.calls.keys():
            group.calls[rank], group.messages[rank] = {}, []
            group.to_common[rank], group.dumped[rank] = base.to_common[rank], base.dumped[rank]
            group.unsure.update(base.unsure & {rank})
    return list(groups.values())


def _to_common_clock(dumps: dict[int, Dump], name: str, about: Dump) -> int:
    """What to add to a rank's times so that those of all ranks of a group can be compared.

    They get the group's clock if all ranks know it, else the time of day.
    """
    facts = [dump["ringreduce"]["groups"].get(name) for dump in dumps.values()]
    if all(one["clock_error_ns"] >= 0 for one in facts if one):
        return -int(about["groups"][name]["clock_ahead_ns"])
    return int(about["time_ns"] - about["monotonic_ns"])


# ---- what was wrong


@dataclass(frozen=True)
class Finding:
    """What ended the job."""

    what: str  # a sentence: the operation, the group, and who did what
    ranks: tuple[int, ...]  # to blame; the report says where each of them was
    group: str = ""  # its name


def _mismatch(group: _Group) -> Finding | None:
    """Ranks whose calls with the same number differ."""

    def parties(number: int) -> dict[tuple[Any, ...], list[int]]:
        found: dict[tuple[Any, ...], list[int]] = {}
        for rank, calls in group.calls.items():
            if number in calls:
                found.setdefault(calls[number].signature, []).append(rank)
        return found

    number = group.first(lambda n: len(parties(n)) > 1)
    if number is None:
        return None
    found = sorted(parties(number).values(), key=len, reverse=True)  # the lowest rank's first
    told = [f"{ranks_text(ranks)} called {group.calls[ranks[0]][number].about}" for ranks in found]
    ranks = sorted(rank for party in found[1:] for rank in party)
    what = f"In operation #{number} of {group.title}, {listed(told)}."
    return Finding(what, tuple(ranks), group.name)


def _missing(group: _Group) -> Finding | None:
    """Ranks that did not come to an operation in which others failed, or still wait."""

    def waits(number: int) -> list[int]:
        return [rank for rank, calls in group.calls.items()
                if number in calls and calls[number].own["state"] != "done"
                and calls[number].came]  # fmt: skip

    def absent(number: int) -> list[int]:
        first = min(group.calls[rank][number].began for rank in waits(number))
        return [rank for rank, calls in group.calls.items()
                if (number not in calls or not calls[number].came)
                and group.dumped[rank] > first and rank not in group.unsure]  # fmt: skip

    number = group.first(lambda n: bool(waits(n)) and bool(absent(n)))
    if number is None:
        return None
    there, away = waits(number), absent(number)
    waited = max(group.calls[rank][number].age for rank in there)
    call = group.calls[there[0]][number]
    late = any(number in group.calls[rank] for rank in away)
    if call.own["state"] == "failed":
        own = [group.calls[rank][number].own for rank in there]
        waited = max(one["done_ns"] - one["arrived_ns"] for one in own)
    what = (
        f"{_big(ranks_text(away))} did not come{' in time' if late else ''} "
        f"to operation #{number} of {group.title}: "
        f"{ranks_text(there)} called {call.about} and waited for {_seconds(waited)}."
    )
    return Finding(what, tuple(away), group.name)


def _lost(group: _Group, error: Dump) -> Finding | None:
    """A rank whose process ended, as the others saw it."""
    if error["type"] != "PeerLost" or error["rank"] is None:
        return None
    rank = error["rank"]
    open_calls = {n: call for calls in group.calls.values() for n, call in calls.items()
                  if call.own["state"] != "done"}  # fmt: skip
    number = min(open_calls, default=-1)
    call = "" if number < 0 else f" in operation #{number}, {open_calls[number].about},"
    dump = "" if rank not in group.silent else " and left no dump"
    what = f"{_big(ranks_text([rank]))} was lost{call} of {group.title}{dump}: {_first(error)}."
    return Finding(what, (rank,), group.name)


def find(dumps: dict[int, Dump]) -> Finding | None:
    """What ended the job; None if all operations have ended and no rank has an error."""
    found = ((rank, dump["ringreduce"]["error"]) for rank, dump in dumps.items())
    told = sorted((pair for pair in found if pair[1]), key=lambda pair: pair[1]["time_ns"])
    for rank, error in told:
        # What others were told of that rank came of it.
        if not error["of_a_group"] and (error is told[0][1] or rank == told[0][1].get("rank")):
            what = f"{_big(ranks_text([rank]))} ended with {error['type']}: {_first(error)}."
            return Finding(what, (rank,))
    told = [(rank, error) for rank, error in told if error["of_a_group"]]
    names = [error["group"] for _, error in told]
    groups = _groups_of(dumps)
    groups.sort(key=lambda group: names.index(group.name) if group.name in names else len(names))
    for group in groups:
        here = [error for _, error in told if error["group"] == group.name]
        lost = [_lost(group, error) for error in here[:1]]
        for finding in (_mismatch(group), *lost, _missing(group)):
            if finding is not None:
                return finding
    if told:
        rank, error = told[0]
        blamed = () if error["rank"] is None else (error["rank"],)
        what = f"{_big(ranks_text([rank]))} raised {error['type']}: {_first(error)}."
        return Finding(what, blamed, error["group"])
    waiting = [(group, rank, call) for state in ("running", "queued") for group in groups
               for rank in group.calls for call in group.all_of(rank)
               if call.own["state"] == state]  # fmt: skip
    if not waiting:
        return None
    group, _, call = waiting[0]
    inside = [rank for one, rank, other in waiting if one is group and other.name == call.name]
    what = "message" if call.is_message else "operation"
    where = f"{what} #{call.own['sequence']}, {call.about}, of {group.title} "
    where += f"holds {ranks_text(inside)}"
    if call.is_message:
        return Finding(f"{_big(where)}.", (call.own["root"],), group.name)
    if group.silent:
        what = f"{_big(where)}, and {ranks_text(group.silent)} left no dump."
        return Finding(what, tuple(group.silent), group.name)
    return Finding(f"{_big(where)}, and no rank is known to be missing.", (), group.name)


# ---- what is said


def _last(dumps: dict[int, Dump], name: str) -> str:
    """A sentence: what each rank did last, in the group with that name if there is one."""
    groups = _groups_of(dumps)
    groups = [group for group in groups if group.name == name] or groups
    said: dict[str, list[int]] = {}
    ages: dict[str, int] = {}
    for rank in sorted({rank for group in groups for rank in group.ranks} or dumps):
        calls = [call for group in groups for call in group.all_of(rank)]
        last = min((c for c in calls if c.came), key=lambda call: call.age, default=None)
        queued = [call for call in calls if call.own["state"] == "queued"]
        if queued and (last is None or last.own["state"] == "done"):
            last = min(queued, key=lambda call: int(call.own["sequence"]))
        if rank not in dumps:
            doing = "left no dump"
        elif last is None:
            doing = "had called nothing"
        else:
            call, doing = last, last.doing
            if call.own["state"] not in ("failed", "queued"):
                ages[doing] = max(ages.get(doing, 0), call.age)
        said.setdefault(doing, []).append(rank)
    words = []
    for doing, ranks in said.items():
        age = _seconds(ages.get(doing, 0))
        since = f"{age} before its dump" if doing.startswith("had ended") else f"for {age}"
        did = re.sub("^was ", "were ", doing) if len(ranks) > 1 else doing
        words.append(f"{ranks_text(ranks)} {did}" + (f" {since}" if doing in ages else ""))
    return _big("; ".join(words)) + "."


def _place(frames: list[Any], libraries: list[str]) -> str:
    """The innermost frame that is the program's own."""
    inner = tuple(libraries)
    outer = [f for f in frames if not f["filename"].startswith(inner)] or frames
    return f"{outer[0]['name']} ({outer[0]['filename']}:{outer[0]['line']})" if outer else ""


def _where(dumps: dict[int, Dump], finding: Finding) -> str:
    """A sentence: the processes, hosts and lines to look at."""
    words = []
    for rank in finding.ranks or tuple(dumps):
        if rank not in dumps:
            words.append(
                f"{ranks_text([rank])}, which left no dump: at its own output, and whether it was "
                "killed, was stopped or hangs in native code"
            )
            continue
        about = dumps[rank]["ringreduce"]
        error = about["error"] or {}
        stacks: dict[str, list[Any]] = about["stacks"]
        of_main = next(iter(stacks.values()), [])
        place = _place(error.get("frames") or of_main, about["libraries"])
        in_it = f", in {place}" if place else ""
        words.append(f"{ranks_text([rank])}, pid {about['pid']} on {about['host']}{in_it}")
    more = len(words) - 4
    if more > 0:
        words = [*words[:4], f"{more} more"]
    return f"Look at {'; '.join(words)}."


def explain(dumps: dict[int, Dump], finding: Finding | None) -> list[str]:
    """Three sentences: the cause, what each rank did last, where to look.  Two without a cause."""
    if finding is None:
        of = f"{'dump' if len(dumps) == 1 else 'dumps'} of {ranks_text(dumps)}"
        cause = f"No cause was found: all operations in the {of} have ended."
        return [cause, _last(dumps, "")]
    return [finding.what, _last(dumps, finding.group), _where(dumps, finding)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what ended a job.

    Args:
        arguments: of the command line; None for those of the process.

    Returns:
        The exit status: 0 if a cause was found, 1 if none was, 2 if the dumps cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.recorder",
        description="Say what ended a job, from the dumps of its ranks: RINGREDUCE_DUMP.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder with the dumps of all ranks")
    options = parser.parse_args(arguments)
    try:
        dumps = load(options.folder)
    except ValueError as error:
        say(f"{parser.prog}: {error}", sys.stderr)
        return 2
    finding = find(dumps)
    for sentence in explain(dumps, finding):
        say(sentence)
    return int(finding is None)
