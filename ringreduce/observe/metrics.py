"""Counts of what this rank does in its groups, for Prometheus; and the reader of such text.

    RINGREDUCE_METRICS=folder torchrun ... train.py     # a text file a rank, written each second
    ringreduce.prometheus()                             # /metrics of a program's own server

The groups count (csrc/epoch/recorder.h), so no operation is missed between two looks, and a look
costs microseconds.  Sums restart at 0 when a group is made anew.  `statuses` reads what was
written, for `python -m ringreduce.top` and the page of torch's debug server (debug_server.py).
What fails here is logged, and ends no training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ringreduce.core.backend import Backend, extension, job_name, live_groups, own_rank, ranks_of
from ringreduce.core.files import Damaged, contents, replacing
from ringreduce.observe.record import Record, on_gpus, parse

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

_log = logging.getLogger("ringreduce")

_VARIABLE = "RINGREDUCE_METRICS"
_EVERY = 1.0  # seconds between two files
MOST_BYTES = 1 << 26  # of a file that is read
_LONGEST = 200  # label that is read
_STARTED = time.time()

# By name, the labels of each metric and its meaning.
_RANK = ("job", "rank")
_GROUP = (*_RANK, "comm_name", "nranks")  # as NCCL's Inspector names them
_KIND, _LINE = (*_GROUP, "collective"), (*_GROUP, "to_rank")
_GAUGES = {
    "rank": ((*_RANK, "host", "pid", "meeting"), "1: this process is that rank."),
    "started_seconds": (_RANK, "When this process began, in Unix time."),
    "updated_seconds": (_RANK, "When these figures were read, in Unix time."),
    "step": (_RANK, "Steps of torch's optimizers in this process."),
    "running_seconds": (_KIND, "Seconds that an operation has run."),
    "running_sequence": (_GROUP, 'Its number in errors, "#17".'),
}
_COUNTERS = {
    "operations": (_KIND, "Operations that ended well."),
    "bytes": (_KIND, "Bytes of this rank's elements in them."),
    "operation_seconds": (_KIND, "Seconds in them, with waits."),
    "failed_operations": (_GROUP, "Operations that ended with an error."),
    "wait_seconds": ((*_GROUP, "late_rank"), "Seconds waited for what began with that rank."),
    "line_bytes": (_LINE, "Bytes that a rank of another host has got."),
    "line_busy_seconds": (_LINE, "Seconds in which the line to it had bytes to move."),
    "line_retransmits": (_LINE, "Packets to it that were sent again."),
}
_LINES = ("line_bytes", "line_busy_seconds", "line_retransmits")
# Of what a look may find a moment after a group was destroyed, or before it has members.
GONE = (RuntimeError, LookupError, ValueError)


class Trial:
    """Around what must not end the program: its first error is logged, and later ones are not."""

    def __init__(self, what: str) -> None:
        self._what, self._told = what, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception) and not self._told:
            self._told, rank = True, -1
            with contextlib.suppress(*GONE):
                rank = own_rank()
            _log.warning(
                "rank %d cannot %s, and goes on trying: %s: %s",
                *(rank, self._what, type(error).__name__, error),
            )
        return isinstance(error, Exception)


@dataclass
class Totals:
    """What a group has done since it was made; ranks are global ones."""

    failed: int
    kinds: dict[str, tuple[int, int, float]]  # operations, bytes and seconds in them, by kind
    waited: dict[int, float]  # seconds, by the rank where the delay began, messages too
    newest: list[Record]  # the last operation, and the one that runs
    # Bytes, busy seconds, packets sent again; by rank.
    lines: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(size for _, size, _ in self.kinds.values())

    @property
    def seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.kinds.values())

    @staticmethod
    def of(group: dist.ProcessGroup, backend: Backend) -> list[Totals]:
        """Those of now, then those of GPU operations, of each GPU that this rank has used.  Of a
        group that was just destroyed, raises one of many errors."""
        core, ranks = extension(), ranks_of(group, backend)
        sums = core.totals(backend)
        before = [
            max(0, failed + sum(operations for operations, _, _ in kinds.values()) - 1)
            for failed, kinds, _ in sums
        ]
        raw = [core.records(backend, before[0]), *core.gpu_records(backend, before[1:])]
        found = [
            Totals(failed, kinds, waited, [one for one in parse(new) if one.state != "queued"][-2:])
            for (failed, kinds, waited), new in zip(sums, raw, strict=False)
        ]
        found[0].lines = {ranks[to]: tuple(use) for to, *use in core.lines(backend)}
        return found


def _meeting() -> str:
    """Tells this job from all others, also of its name: what a group of all its ranks is known by.

    Returns:
        The same text on all ranks, of the default group if possible; "" if no group has all.
    """
    for group, backend in live_groups():
        with contextlib.suppress(*GONE):
            if group is dist.group.WORLD or backend.size() == dist.get_world_size():
                return str(extension().meeting(backend))
    return ""


def require_client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            f"ringreduce's metrics need the package prometheus-client ({error}): "
            "pip install prometheus-client"
        ) from error
    return prometheus_client


class _Collector:
    """Gives prometheus_client the sums of all groups of this process when it asks for them."""

    _reading = Trial("read the sums of its groups")

    def describe(self) -> Iterable[Metric]:
        return ()  # else a registry asks for the metrics at once, and keeps their names

    def collect(self) -> Iterator[Metric]:
        core = require_client().core
        kinds = core.GaugeMetricFamily, core.CounterMetricFamily
        try:
            rank = job_name(), str(dist.get_rank())
        except GONE:
            return
        families = {
            name: family(f"ringreduce_{name}", text, labels=labels)
            for family, metrics in zip(kinds, (_GAUGES, _COUNTERS), strict=True)
            for name, (labels, text) in metrics.items()
        }

        def add(name: str, value: float, *labels: object) -> None:
            families[name].add_metric([*rank, *map(str, labels)], value)

        add("rank", 1, socket.gethostname(), os.getpid(), _meeting())
        add("started_seconds", _STARTED)
        add("updated_seconds", time.time())
        add("step", extension().training_step())
        with self._reading:
            for group, backend in live_groups():
                with contextlib.suppress(*GONE):
                    for gpu, totals in enumerate(Totals.of(group, backend), start=-1):
                        name = f"{group.group_name}{on_gpus(gpu)}"
                        self._add(add, totals, name, backend.size())
        yield from families.values()

    @staticmethod
    def _add(add: Callable[..., None], totals: Totals, *of: object) -> None:
        for kind, (count, size, seconds) in totals.kinds.items():
            add("operations", count, *of, kind)
            add("bytes", size, *of, kind)
            add("operation_seconds", seconds, *of, kind)
        add("failed_operations", totals.failed, *of)
        for late, waiting in totals.waited.items():
            add("wait_seconds", waiting, *of, late)
        for to, use in totals.lines.items():
            for name, value in zip(_LINES, use, strict=True):
                add(name, value, *of, to)
        if totals.newest and totals.newest[-1].state == "running":
            runs = totals.newest[-1]
            since = (time.monotonic_ns() - runs.arrived_ns) / 1e9
            add("running_seconds", max(0.0, since), *of, runs.kind)
            add("running_sequence", runs.sequence, *of)


def prometheus(registry: CollectorRegistry | None = None) -> None:
    """Adds this rank's counts to a registry of prometheus_client, whose server then shows them.

        prometheus_client.start_http_server(9400 + local_rank)
        ringreduce.prometheus()

    Args:
        registry: None for `prometheus_client.REGISTRY`.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: the registry has them already.
    """
    client = require_client()
    registry = client.REGISTRY if registry is None else registry
    if registry in _registries:
        raise ValueError("the registry has ringreduce's metrics already")
    registry.register(_collector)
    _registries.add(registry)


_collector = _Collector()
_registries: weakref.WeakSet[CollectorRegistry] = weakref.WeakSet()


def text() -> bytes:
    """This rank's metrics in Prometheus' text format."""
    client = require_client()
    registry = client.CollectorRegistry()
    registry.register(_collector)
    written: bytes = client.generate_latest(registry)
    return written


# ---- a file a rank


class _Writer:
    """Writes the metrics of this rank to a file in a folder each second, until it is stopped."""

    def __init__(self, folder: str) -> None:
        require_client()
        self.folder, self.pid = folder, os.getpid()
        self._folder = Path(folder).absolute()  # a program may change its working folder
        self._path: Path | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ringreduce-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets the thread remove the file, whose figures would be taken for new ones later."""
        if self.pid != os.getpid():
            return  # in a forked child; the file is its parent's
        self._stop.set()
        self._thread.join(2 * _EVERY)  # a file system may hang

    def _serve(self) -> None:
        writing = Trial(f"write its metrics to {self.folder}")
        with writing:
            self._remove_left_over()
        while not self._stop.is_set():
            with writing:
                self._write()
            self._stop.wait(_EVERY)
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._path:
                self._path.unlink()

    def _remove_left_over(self) -> None:
        """Removes the files of processes of this host that were killed."""
        for path in self._folder.glob("*.prom"):
            with contextlib.suppress(Damaged, OSError):
                found = statuses(contents(path, MOST_BYTES))
                if found and all(_has_ended(status) for status in found):
                    path.unlink()

    def _write(self) -> None:
        try:
            job, rank = job_name(), dist.get_rank()
        except GONE:  # there is no default group
            return
        owner = _meeting() or f"{socket.gethostname()}-{os.getpid()}"
        path = self._folder / f"{job}-{owner}-rank{rank}.prom"
        if self._path != path:  # its rank, or its job, is another one now
            self._remove()
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            file.write(text())


def _has_ended(status: Status) -> bool:
    """Whether it was written by a process of this host that is not there any more."""
    if status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    return False


_writer: _Writer | None = None


def follow_variable() -> None:
    """Begins what RINGREDUCE_METRICS asks for, or ends it, when a group is made."""
    global _writer
    folder = os.environ.get(_VARIABLE) or None
    if _writer and (_writer.folder, _writer.pid) != (folder, os.getpid()):
        end()
    if folder and not _writer:
        try:
            _writer = _Writer(folder)
        except Exception as error:  # no client, no more threads, no working folder
            _log.warning("%s is ignored: %s", _VARIABLE, error)


def end() -> None:
    """Writes no more files."""
    global _writer
    if _writer:
        _writer.stop()
    _writer = None


# ---- reading


@dataclass
class Status:
    """What a rank has written, summed over its groups."""

    rank: int
    job: str
    host: str = ""
    pid: int = 0
    meeting: str = ""  # tells its job from others of the same name; "": it has no group of all
    started: float = 0.0  # its process, in Unix time of its host
    updated: float = 0.0  # these figures, likewise
    step: float = 0  # of its optimizers
    operations: float = 0  # so far, as all sums
    failed: float = 0
    bytes: float = 0
    seconds: float = 0.0
    # Seconds, by the rank that it waited for.
    waited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    # Bytes, busy seconds and packets sent again, by the rank of another host.
    lines: dict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 3))
    done: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by group
    running: dict[str, str] = field(default_factory=dict)  # "all_reduce #17", by group,
    running_seconds: dict[str, float] = field(default_factory=dict)  # and for how long it has run
    age: float = 0.0  # seconds since `updated`, as far as the reader knows


class Damages:
    """What could not be read: a sentence for each kind of damage."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, sentence: str) -> None:
        """Notes one of a kind."""
        self._found[kind].append(sentence)

    def sentences(self) -> list[str]:
        """The first of each kind, and how many more there are."""
        return [
            first + (f" ({len(more)} more like it)" if more else "")
            for first, *more in self._found.values()
        ]


_SAMPLE = re.compile(
    r'ringreduce_(\w+?)(?:_total)?\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+)\s*', re.ASCII
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)
_FIELDS = {"operations": "operations", "failed_operations": "failed", "bytes": "bytes",
           "operation_seconds": "seconds", "started_seconds": "started",
           "updated_seconds": "updated", "step": "step"}  # fmt: skip


def statuses(
    written: bytes, name: str = "the text", damages: Damages | None = None
) -> list[Status]:
    """What ranks of one job or several have written in Prometheus' text format, ascending.

    `damages` takes what is wrong with the text, which sentences call `name`.  Damaged lines are
    left out, and ranks of which nothing says who they are.
    """
    damages = Damages() if damages is None else damages
    found: dict[tuple[str, int], Status] = {}
    seen: set[tuple[object, ...]] = set()
    for number, line in enumerate(written.decode(errors="replace").split("\n"), 1):
        if not line.startswith("ringreduce_"):
            continue
        try:
            metric, labels, value = _sample(line)
            if (metric, *labels.items()) in seen:
                raise ValueError("it stands there twice")
            seen.add((metric, *labels.items()))
            of = labels["job"], _natural(labels["rank"])
            _add(found.setdefault(of, Status(of[1], of[0])), metric, labels, value)
        except (LookupError, ValueError):
            where = f"{name} is damaged in line {number}"
            damages.add("line", f"{where}, which is left out: {line[:80]!r}")
    for (job, rank), status in list(found.items()):
        if not (status.pid and status.updated):
            damages.add("rank", f"{name} lacks the pid or the time of rank {rank} of {job}")
            del found[job, rank]
    return [found[of] for of in sorted(found)]


def _sample(line: str) -> tuple[str, dict[str, str], float]:
    """The name, labels and value in a line. Raises ValueError."""
    match = _SAMPLE.fullmatch(line)
    if match is None or "\ufffd" in line:
        raise ValueError("it is no metric, or not UTF-8")
    labels, value = dict(_LABEL.findall(match[2])), float(match[3])
    if not 0 <= value < 1 << 63:  # nor NaN
        raise ValueError("it cannot be")
    return match[1], {name: _plain(label) for name, label in labels.items()}, value


def _plain(label: str) -> str:
    """A label without escapes, for a terminal."""
    text = re.sub(r"\\(.)", r"\1", label)
    return "".join(one if one.isprintable() else "?" for one in text[:_LONGEST])


def _natural(text: str) -> int:
    """A rank or a pid. Raises ValueError."""
    if re.fullmatch("[0-9]{1,9}", text) is None:
        raise ValueError("it is no number")
    return int(text)


def _add(status: Status, name: str, labels: dict[str, str], value: float) -> None:
    """Raises LookupError, ValueError: a label is missing, or cannot be."""
    if name in ("operations", "failed_operations"):
        status.done[labels["comm_name"]] += int(value)
    if name in _FIELDS:
        setattr(status, _FIELDS[name], getattr(status, _FIELDS[name]) + value)
    elif name == "rank":
        if status.pid:
            raise ValueError("it is another process")
        status.host, status.pid = labels["host"], _natural(labels["pid"])
        status.meeting = labels.get("meeting", "")
    elif name == "wait_seconds":
        status.waited[_natural(labels["late_rank"])] += value
    elif name in _LINES:
        status.lines[_natural(labels["to_rank"])][_LINES.index(name)] += value
    elif name == "running_seconds":
        status.running_seconds[labels["comm_name"]] = value
        status.running[labels["comm_name"]] = labels["collective"]
    elif name == "running_sequence":  # after the seconds
        status.running[labels["comm_name"]] += f" #{int(value)}"
