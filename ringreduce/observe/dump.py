"""Writes what the groups of this process did into a file, in the format of torch's flight recorder.

    RINGREDUCE_DUMP=dumps torchrun ... train.py      # on each failure
    ringreduce.dump_records("dumps")                 # now

A rank has one file, its newest dump.  `python -m ringreduce.recorder dumps` says what ended the
job; `torchfrtrace dumps` of torch reads the same files.  What torch's format has no place for is
under the key "ringreduce", in the dump and in each of its entries.

An error of a group must not wait for the file.  So the records are copied as they lie in memory,
and a thread makes the dump of them; the process does not end before it is written.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import io
import itertools
import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ringreduce import errors
from ringreduce.core.backend import Backend, _is_alive, extension, live_groups
from ringreduce.core.files import Damaged, check, contents, natural, replacing
from ringreduce.core.launchers import job_of
from ringreduce.observe.record import Record, on_gpus, parse

PREFIX = "ringreduce_rank_"  # of the files' names; the rank follows
FOLDER, SIGNAL = "RINGREDUCE_DUMP", "RINGREDUCE_DUMP_SIGNAL"
DEFAULT_FOLDER = "ringreduce-dump"
# A folder beside them for the dumps of other jobs.  There torchfrtrace must not find their name, as
# it looks into all folders.
EARLIER, EARLIER_PREFIX = "earlier", "rank_"

# The version of torch's format, which torchfrtrace wants to be the same on all ranks.
_VERSION = "2.10"
# A name of a library that torchfrtrace accepts in all versions of torch.
_LIBRARY = "nccl"
_FIELDS = tuple(Record.__annotations__)
_STATES = {"running": "started", "done": "completed", "queued": "scheduled"}
MESSAGES = {"send": "->", "recv": "<-"}  # kinds, and how torch writes them
# torchfrtrace of 2.11 knows a barrier by NCCL's name alone.
_KINDS = {
    "sparse all_reduce": "all_reduce",
    "compressed all_reduce": "all_reduce",
    "barrier": "all_reduce_barrier",
    "monitored_barrier": "all_reduce_barrier",
}
_DTYPES = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16",
           "int8": "Char", "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long",
           "bool": "Bool"}  # fmt: skip
# Where code is that is not the program's own.
_LIBRARIES = [
    "<frozen",
    *(os.path.dirname(module.__file__ or "") + os.sep for module in (os, torch, errors)),
]
_MOST_BYTES = 1 << 27  # of a dump
_GRACE = 10.0  # seconds that the end of a process waits for a dump
# Seconds between two looks at the groups, for failures that no call of this rank meets.
_LOOK = 0.1

_log = logging.getLogger("ringreduce")


@dataclass(frozen=True)
class _Group:
    """What a dump needs of a group, in a moment: its records are still bytes.

    `ranks` are the global ranks, in the order of the group's own; `clock` is how many nanoseconds
    this host's clock is ahead of the group's, and the bound of its error; `of` is the name of the
    group whose GPU operations these are, which count for themselves.
    """

    name: str
    desc: str
    meeting: str
    ranks: list[int]
    rank: int
    raw: bytes
    raw_messages: bytes
    clock: tuple[int, int]
    failed: bool
    timeout_ms: int
    of: str = ""


# ---- the groups


def _live_groups() -> Iterator[tuple[dist.ProcessGroup, Backend]]:
    """Those that are connected."""
    return (pair for pair in live_groups() if extension().is_connected(pair[1]))


def _copy(group: dist.ProcessGroup, backend: Backend) -> list[_Group]:
    """Takes what a dump needs of a group; nothing if another thread has just destroyed it."""
    numbers = dist.distributed_c10d._world.pg_group_ranks.get(group)
    if numbers is None:
        return []
    core = extension()
    try:
        own = _Group(
            name=group.group_name,
            desc=group.group_desc,
            meeting=core.meeting(backend),
            ranks=sorted(numbers, key=numbers.__getitem__),
            rank=group.rank(),
            raw=core.records(backend, 0),
            raw_messages=getattr(core, "messages", lambda *_: b"")(backend, 0),
            clock=core.clock_offset(backend),
            failed=core.has_failed(backend),
            timeout_ms=int(core.timeout_seconds(backend) * 1000),
        )
        of_gpus: list[bytes] = core.gpu_records(backend, [])
    except errors.Error:
        return []
    return [own] + [
        replace(own, name=f"{own.name}{on_gpus(number)}", of=own.name,
                meeting=f"{own.meeting}/gpu{number}", raw=raw, raw_messages=b"")
        for number, raw in enumerate(of_gpus)
    ]  # fmt: skip


def _records_of(group: _Group) -> list[Record]:
    """Those of the ranks that are in the group now: after a loss the sequence starts anew."""
    found = parse(group.raw)
    pairs = itertools.pairwise(found)
    starts = [i for i, (a, b) in enumerate(pairs, 1) if b.sequence <= a.sequence]
    return found[starts[-1] if starts else 0 :]


# ---- the format


def _counts(record: Record, group: _Group) -> tuple[int, int, int]:
    """Elements that all ranks must agree on, of the inputs, and of the outputs."""
    if not record.bytes:
        return 0, 0, 0
    elements = record.bytes // getattr(torch, record.dtype).itemsize
    size = len(group.ranks)
    if record.kind in ("gather", "scatter"):  # the root's bytes are those of all ranks
        elements //= size if record.root == group.rank else 1
    whole, part = elements * size, elements // size
    inputs, outputs = {
        "all_gather": (part, elements),
        "reduce_scatter": (elements, part),
        "gather": (elements, whole),
        "scatter": (whole, elements),
    }.get(record.kind, (elements, elements))
    return elements, inputs, outputs


def _line(record: Record, group: _Group) -> tuple[str, list[int]]:
    """The group of two ranks that a message has in torch's format, by its name.

    There torchfrtrace compares each message with its other end, and no rank is missing.  Messages
    of the other direction have another one: each direction is numbered by itself.
    """
    ends = [group.ranks[group.rank], group.ranks[record.root]]
    way = ends if record.kind == "send" else ends[::-1]
    return f"{group.name}:{way[0]}->{way[1]}", sorted(ends)


def _entry(record: Record, group: _Group, pg_id: int, number: int, wall: int) -> dict[str, Any]:
    """A record as torch has it.  `wall`: nanoseconds from this host's clock to the time of day."""
    elements, inputs, outputs = _counts(record, group)
    dtype = _DTYPES.get(record.dtype, record.dtype or "Byte")
    kind = _KINDS.get(record.kind, record.kind)
    if kind in ("all_gather", "reduce_scatter") and elements % len(group.ranks):
        # Ranks have other numbers of elements.  torchfrtrace of 2.11 knows no such operation, so
        # the sizes are rounded down to equal parts.
        if torch.__version__ >= "2.13":  # compared as a version
            kind += "_v"
        else:
            size = len(group.ranks)
            inputs, outputs = min(inputs, outputs * size), min(outputs, inputs * size)
    name, is_message = group.name, kind in MESSAGES
    own: dict[str, Any] = {"group": name}
    if is_message:
        name, ends = _line(record, group)
        here = ends.index(group.ranks[group.rank])
        kind += f" {here}{MESSAGES[kind]}{1 - here}"
    begun = bool(record.arrived_ns)
    failed = "started" if begun else "scheduled"
    own |= {name: getattr(record, name) for name in _FIELDS} | {
        # As plain tuples: a reader makes no objects.
        "causes": [why and tuple(why) for why in record.causes],
        "why": record.why and tuple(record.why),
        "elements": elements,
        "root": group.ranks[record.root] if record.root >= 0 else -1,
        "late": [(group.ranks[rank], nanos) for rank, nanos in record.late],
    }
    return {
        "record_id": number,
        "pg_id": pg_id,
        "process_group": (name, group.desc),
        "collective_seq_id": record.sequence,
        "p2p_seq_id": record.sequence if is_message else 0,
        "op_id": record.index,
        "profiling_name": f"{_LIBRARY}:{kind}",
        "time_created_ns": record.posted_ns + wall,
        "duration_ms": record.duration_ms,
        "input_sizes": [[inputs]],
        "input_dtypes": [dtype],
        "output_sizes": [[outputs]],
        "output_dtypes": [dtype],
        "state": _STATES.get(record.state, failed),
        "time_discovered_started_ns": record.arrived_ns + wall if begun else None,
        "time_discovered_completed_ns": record.done_ns + wall if record.state == "done" else None,
        "retired": record.state in ("done", "failed"),
        "timeout_ms": group.timeout_ms,
        "is_p2p": is_message,
        "thread_id": "",
        "thread_name": "",
        "frames": [],
        "ringreduce": own,
    }


def _document(groups: list[_Group], about: dict[str, Any]) -> dict[str, Any]:
    """The dump: torch's format, and `about` and the groups' facts for ringreduce's reader."""
    all_records = [(group, _records_of(group)) for group in groups]
    left_out = {group.name: found[0].index if found else 0 for group, found in all_records}
    # A receive from any rank that has no message yet has no other end to compare with.
    messages = [
        (group, [one for one in parse(group.raw_messages) if one.root >= 0]) for group in groups
    ]
    in_order = sorted(
        ((record, i) for found in (all_records, messages) for i, (_, one) in enumerate(found)
         for record in one),
        key=lambda pair: pair[0].posted_ns,
    )  # fmt: skip
    members = [(group.name, group.desc, group.ranks) for group in groups]
    for group, found in messages:
        lines = dict(_line(record, group) for record in found)
        members += [(name, group.desc, ranks) for name, ranks in lines.items()]
    wall = about["time_ns"] - about["monotonic_ns"]
    # torchfrtrace drops entries with lower numbers than the first one of any rank.
    numbers = itertools.count(sum(left_out.values()))
    status = {}
    for number, (_, found) in enumerate(all_records):
        seen = {"started": [r for r in found if r.arrived_ns], "enqueued": found,
                "completed": [r for r in found if r.state == "done"]}  # fmt: skip
        status[str(number)] = {
            f"last_{what}_collective": max((record.sequence for record in which), default=-1)
            for what, which in seen.items()
        }
    return {
        "version": _VERSION,
        "comm_lib_version": about["version"],
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, desc, ranks in members
        },
        "pg_status": status,
        "entries": [
            _entry(record, groups[i], i, number, wall)
            for number, (record, i) in zip(numbers, in_order, strict=False)
        ],
        "ringreduce": about
        | {
            "groups": {
                group.name: {
                    "rank": group.rank,
                    "meeting": group.meeting,
                    "failed": group.failed,
                    "clock_ahead_ns": group.clock[0],
                    "clock_error_ns": group.clock[1],
                    "left_out": left_out[group.name],
                    "of": group.of,
                }
                for group in groups
            }
        },
    }


# ---- reading it


_Unpickler: Any = pickle._Unpickler  # its parts have no types


class _Plain(_Unpickler):  # type: ignore[misc]
    """Makes text, numbers, tuples, lists and dicts of text keys; a dump has nothing else.

    It is Python's own.  C's takes gigabytes for a number in a memo that a flipped bit made large.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has an object of {module}.{name}")

    def _set(self, items: list[Any]) -> None:
        # The hash of a tuple that shares its parts may take for ever.
        if not all(isinstance(key, str) for key in items[::2]):
            raise pickle.UnpicklingError("it has a key that is no text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    # The opcodes that a dump needs, and those that name objects, which find_class refuses.
    _codes = b"\x80\x95(.\x94hjN\x88\x89KMJ\x8aG\x8cX}]ae)t\x85\x86\x87" + b"c\x93"
    dispatch: ClassVar[dict[int, Any]] = {code: _Unpickler.dispatch[code] for code in _codes} | {
        pickle.SETITEM[0]: lambda self: self._set([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._set(self.pop_mark()),
    }


def _signed(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_ranks(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"\[[0-9]{1,9}(, [0-9]{1,9})*\]", value))


_FRAMES = [{"name": str, "filename": str, "line": (int, type(None))}]
_ERROR = {"type": str, "text": str, "of_a_group": bool, "time_ns": natural, "frames?": _FRAMES}
_OF_A_GROUP = {"group": str, "rank": (int, type(None))}
_CONFIG = {"desc": str, "ranks": _is_ranks}
_GROUP = {"clock_ahead_ns": _signed, "clock_error_ns": _signed, "meeting?": str, "of?": str}
_RECORD = (
    dict.fromkeys(("group", "kind", "dtype", "op", "codec", "state"), str)
    | dict.fromkeys(("sequence", "elements", "posted_ns", "arrived_ns", "done_ns"), natural)
    | {"root": _signed}
)
_DUMP = {
    "pg_config": dict,
    "entries": list,
    "ringreduce": dict.fromkeys(("host", "job", "program"), str)
    | dict.fromkeys(("rank", "world_size", "attempt", "pid", "time_ns"), natural)
    | {"monotonic_ns": natural, "libraries": [str], "stacks": dict, "groups": dict}
    | {"error": (dict, type(None)), "met?": [str]},
}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a dump.

    Returns:
        The dump without the entries that are damaged.  "damaged" has a sentence for each of these.

    Raises:
        Damaged: it is none, or more than its entries is damaged.
    """
    data = contents(path, _MOST_BYTES)
    try:
        dump: dict[str, Any] = _Plain(io.BytesIO(data)).load()
        check(dump, _DUMP)
        about = dump["ringreduce"]
        if about["error"]:
            what = _ERROR | (_OF_A_GROUP if about["error"].get("of_a_group") else {})
            check(about["error"], what, "ringreduce.error")
        for frames in itertools.islice(about["stacks"].values(), 1):  # no other one is asked for
            check(frames, _FRAMES, "ringreduce.stacks")
        for name, facts in about["groups"].items():
            check(facts, _GROUP, f"ringreduce.groups.{name}")
            check(dump["pg_config"].get(name), _CONFIG, f"pg_config.{name}")
    except Exception as error:
        why = error if isinstance(error, Damaged) else f"{type(error).__name__}: {error}"
        raise Damaged(f"{path} is no dump of ringreduce: {why}") from error
    dump["damaged"] = []
    entries, dump["entries"] = dump["entries"], []
    for at, entry in enumerate(entries):
        try:
            check(entry, {"ringreduce": _RECORD}, f"entries[{at}]")
            if (name := entry["ringreduce"]["group"]) not in about["groups"]:
                raise Damaged(f"entries[{at}] is of no group that is there: '{name}'")
            dump["entries"].append(entry)
        except Damaged as error:
            dump["damaged"].append(str(error))
    return dump


def meetings_of(dump: dict[str, Any]) -> list[str]:
    """What dumps of one job have in common with others of it, and with none of another job.

    Args:
        dump: as of `read`, or about to be written.

    Returns:
        The meetings of its groups; of the last ones that there were, if there are none; else one
        text for the launcher's job, the world size and the attempt.
    """
    about = dump["ringreduce"]
    met = [facts.get("meeting") for facts in about["groups"].values()]
    met += about.get("met", ())
    named = f"{about['job']}-{about['world_size']}-{about['attempt']}"
    return [meeting for meeting in met if meeting] or [named]


# ---- what is told of the process


def _frames(walked: Iterable[tuple[FrameType, int]]) -> list[dict[str, Any]]:
    """Frames as torch writes them."""
    return [{"name": frame.f_code.co_name, "filename": frame.f_code.co_filename, "line": line}
            for frame, line in walked]  # fmt: skip


def _stacks() -> dict[str, list[dict[str, Any]]]:
    """Of the threads that run Python, by name, the main thread first; the innermost frame first."""
    running = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    return {t.name: _frames(traceback.walk_stack(running[t.ident]))
            for t in threads if t.ident in running}  # fmt: skip


_met: list[str] = []  # the meetings of the groups that were there last


def _note_meetings() -> None:
    global _met
    with contextlib.suppress(RuntimeError):  # torch has destroyed one meanwhile
        _met = [extension().meeting(backend) for _, backend in _live_groups()] or _met


def _about(reason: str, error: dict[str, Any] | None) -> dict[str, Any]:
    from ringreduce import __version__  # found once the package is loaded

    _note_meetings()
    known = dist.is_initialized()
    rank = dist.get_rank() if known else int(os.environ.get("RANK") or 0)
    size = dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE") or 1)
    launcher, job = job_of(os.environ, rank, size)
    return {
        "version": __version__,
        "rank": rank,
        "world_size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "program": sys.argv[0],
        "launcher": launcher,
        "job": job,
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        "met": _met,
        "reason": reason,
        "time_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "stacks": _stacks(),
        "libraries": _LIBRARIES,
        "error": _first_failure() or error,
    }


def _told(error: BaseException) -> dict[str, Any]:
    """An exception in a dump."""
    facts = {name: getattr(error, name, None) for name in ("rank", "reporter", "group", "final")}
    of_a_group = isinstance(error, errors.Error)
    return {
        "type": type(error).__name__,
        "text": str(error),
        "of_a_group": of_a_group,
        "time_ns": time.time_ns(),
    } | (facts if of_a_group else {})


# ---- writing

# A signal handler may run while its thread holds them.
_lock = threading.RLock()  # of what is known of failures
_writing = threading.RLock()  # of the file: only writers wait for a slow disk
_numbers = itertools.count(1)
_written = 0
_failures: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]]
_failures = weakref.WeakKeyDictionary()


def _first_failure() -> dict[str, Any] | None:
    """The first error of a group that has failed and is still there: what came of it is later."""
    found = [error for group, error in _failures.items() if _is_alive(group)]
    return min(found, key=lambda error: error["time_ns"], default=None)


@contextlib.contextmanager
def _alone(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps others from writing a dump there, for a second at most, where locks are known."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    until = time.monotonic() + 1.0
    try:
        with contextlib.suppress(OSError):  # it has none
            while time.monotonic() < until:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _make_way(path: str, own: list[str]) -> None:
    """Moves a dump of another job aside, so that none is lost or takes part in this one."""
    with contextlib.suppress(OSError, Damaged):  # no dump, or gone meanwhile
        seen, data = os.stat(path), contents(path, _MOST_BYTES)
        if any(meeting.encode() in data for meeting in own):
            return  # without a closer look
        theirs = meetings_of(read(path))
        if not set(own).isdisjoint(theirs):
            return
        folder, name = os.path.split(path)
        aside = os.path.join(folder, EARLIER, re.sub(r"[^\w-]", "_", theirs[0])[:64])
        os.makedirs(aside, exist_ok=True)
        rank = name.removeprefix(PREFIX)
        taken = os.path.join(aside, f".{rank}.by.{socket.gethostname()}.{os.getpid()}.moving")
        os.rename(path, taken)
        is_seen = os.stat(taken).st_ino == seen.st_ino
        # Else its rank has just written a new one.
        os.rename(taken, os.path.join(aside, EARLIER_PREFIX + rank) if is_seen else path)


def _save(path: str, document: dict[str, Any]) -> None:
    """Writes a dump in the place of an older one."""
    folder, own, data = os.path.dirname(path), meetings_of(document), pickle.dumps(document)
    os.makedirs(folder, exist_ok=True)
    with _alone(folder), replacing(path, "wb") as file:
        file.write(data)
        _make_way(path, own)
    # Of the other files most are of ranks that fail now.
    for other in Path(folder).glob(f"{PREFIX}[0-9]*"):
        with contextlib.suppress(OSError):
            if time.time() - other.lstat().st_mtime > _GRACE:
                _make_way(str(other), own)


def _take(
    folder: str | os.PathLike[str], reason: str, error: dict[str, Any] | None = None
) -> tuple[str, Any]:
    """The path of a dump of this moment, and what writes it."""
    groups = [copy for pair in _live_groups() for copy in _copy(*pair)]
    about, number = _about(reason, error), next(_numbers)
    path = os.path.join(os.fspath(folder), f"{PREFIX}{about['rank']}")

    def write() -> None:
        global _written
        document = _document(groups, about)
        with _writing:
            if number < _written:
                return  # a newer one was faster
            _written = number
            _save(path, document)

    return path, write


def _dump_soon(folder: str, reason: str, error: dict[str, Any] | None = None) -> None:
    """Dumps in a thread of its own, which the process waits for at its end."""
    path, write = _take(folder, reason, error)

    def run() -> None:
        try:
            write()
        except Exception as problem:
            _log.warning("the records could not be written to %s: %s", path, problem)
        else:
            ask = f"python -m ringreduce.recorder {folder}"
            _log.warning("%s: its records are in %s; ask `%s`", reason, path, ask)

    if threading.main_thread().is_alive():
        # The end of the process waits for it, after the groups have been left (wait_for_dumps).
        thread = threading.Thread(target=run, name="ringreduce-dump", daemon=True)
        _dumping.add(thread)
        thread.start()
    else:  # at the end of the process, which waits for no thread any more
        run()


def dump_records(dir: str | os.PathLike[str] | None = None, reason: str = "") -> str:
    """Writes the records of all ringreduce groups of this process, in torch's format.

    An earlier dump of this rank in the same folder is replaced.

    Args:
        dir: the folder, which is made if it is not there; the same for all ranks.  None for that of
            RINGREDUCE_DUMP, else "ringreduce-dump" in the working folder.
        reason: why, for the reader.

    Returns:
        The path of the file.

    Raises:
        OSError: it could not be written.
    """
    folder = os.environ.get(FOLDER) or DEFAULT_FOLDER if dir is None else dir
    path, write = _take(folder, reason or "dump_records was called")
    write()
    return path


# ---- when there is something to write

_told_of: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # failed, and a call raised it
_noticed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # failed, and the watcher saw it
_last_text = ""
_pid = 0  # the process that watches its groups
_busy = threading.local()
_dumping: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def wait_for_dumps() -> None:
    """Waits for dumps that are being written, 10 s at most: a file system may hang."""
    until = time.monotonic() + _GRACE
    for thread in list(_dumping):
        thread.join(max(0.0, until - time.monotonic()))


def _guarded(dump: Any) -> Any:
    """`dump` as a function that raises nothing and does not run inside itself.

    Nor does it run in a forked child, such as a worker that loads data, which has no groups.
    """

    @functools.wraps(dump)
    def run(*arguments: Any) -> None:
        if getattr(_busy, "now", False) or os.getpid() != _pid:
            return
        _busy.now = True
        try:
            dump(*arguments)
        except Exception as problem:
            _log.warning("the records could not be dumped: %r", problem)
        finally:
            _busy.now = False

    return run


@_guarded
def _note_error(error: errors.Error) -> None:
    """Dumps for an error of a group: once for each failure."""
    global _last_text
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    watching = threading.current_thread() is _watcher
    with _lock:
        group = next((g for g, _ in _live_groups() if g.group_name == error.group), None)
        if group is None and isinstance(error, errors.Aborted):
            return  # a late call of a group that was destroyed; a dump of its failure stays
        if group is None or error.final is False:  # it goes on, or it is not there any more
            if str(error) == _last_text:
                return
        else:
            seen = _noticed if watching else _told_of
            if group in seen:
                return
            seen.add(group)
            _failures.setdefault(group, _told(error))
        _last_text = str(error)
        what = "noticed that its group failed" if watching else f"raised {type(error).__name__}"
        _dump_soon(folder, f"this rank {what}", _told(error))


@_guarded
def _note_exception(error: BaseException, raised_at: TracebackType | None) -> None:
    """Dumps for an exception of the program that ends it, and that no failed group has caused."""
    folder = os.environ.get(FOLDER)
    if not folder or isinstance(error, errors.Error) or _first_failure():
        return
    told = _told(error) | {"frames": _frames(traceback.walk_tb(raised_at))[::-1]}
    _dump_soon(folder, f"this rank ended with {type(error).__name__}", told)


@_guarded
def _note_signal(number: int, _frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    _dump_soon(os.environ.get(FOLDER) or DEFAULT_FOLDER, f"it received {name}")


_watcher: threading.Thread | None = None
_stop = threading.Event()


def _look() -> None:
    """Raises the error of each group that has failed, so that `_note_error` sees it.

    A rank that does not come to an operation gets no error of it, and its records are those that
    show what it did in place of it.
    """
    looks: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
    while os.environ.get(FOLDER) and not _stop.wait(_LOOK):
        _note_meetings()
        for group, backend in _live_groups():
            try:
                if group in _told_of or not extension().has_failed(backend):
                    continue
                looks[group] = looks.get(group, 0) + 1
                if looks[group] == 2:  # a call that was under way has had the time to raise it
                    extension().check(backend)
            except errors.Error:
                continue  # it is noted
            except RuntimeError as problem:  # torch has destroyed it meanwhile
                _log.info("a group could not be watched: %s", problem)


def watch() -> None:
    """Dumps from now on as the environment has it.  Called for each group that is made."""
    global _watcher, _pid
    _pid = os.getpid()
    if os.environ.get(FOLDER):
        extension()  # what it does at exit comes after what is registered here
        errors.Error._noted = staticmethod(_note_error)
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_look, name="ringreduce-look", daemon=True)
            _watcher.start()
        _watch_exceptions()
    if text := os.environ.get(SIGNAL):
        _watch_signal(text)


@functools.cache
def _watch_exceptions() -> None:
    atexit.register(_stop.set)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        _note_exception(error, at)
        before(kind, error, at)

    sys.excepthook = hook


@functools.cache
def _watch_signal(text: str) -> None:
    """Takes the signal, unless somebody has: Python code, or C code such as faulthandler's."""
    known = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}
    if text not in known:
        _log.warning("%s=%s is neither USR1 nor USR2; correct or unset it", SIGNAL, text)
        return
    number = known[text]
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    caught = int(lines["SigCgt"], 16) >> (number - 1) & 1
    if caught or signal.getsignal(number) is not signal.SIG_DFL:
        _log.warning("%s=%s: the signal has a handler, which stays", SIGNAL, text)
    elif threading.current_thread() is not threading.main_thread():
        _log.warning("%s=%s: make the first group in the main thread", SIGNAL, text)
    else:
        signal.signal(number, _note_signal)
