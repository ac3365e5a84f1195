"""Counts of what this rank does in its groups, for Prometheus and TensorBoard; and their reader.

    RINGREDUCE_METRICS=folder torchrun ... train.py     # a text file a rank, written each second
    ringreduce.prometheus()                             # /metrics of a program's own server
    ringreduce.tensorboard(SummaryWriter())             # scalars of each training step

The groups count (csrc/group/recorder.h), so no operation is missed between two looks, and a look
costs microseconds.  Sums restart at 0 when a group is made anew.  `statuses` reads what was
written, for `python -m ringreduce.top` and the page of torch's debug server (debug_server.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from ringreduce._backend import (
    Backend,
    backend_of,
    extension,
    job_name,
    live_groups,
    own_rank,
    ranks_of,
    ringreduce_group,
)
from ringreduce.errors import Error
from ringreduce.observe.record import Record, parse

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

_log = logging.getLogger("ringreduce")

_VARIABLE = "RINGREDUCE_METRICS"
_EVERY = 1.0  # seconds between two files
_RANK = ("job", "rank")
# As NCCL's Inspector names them.
_GROUP = (*_RANK, "comm_name", "nranks")


@dataclass
class _Totals:
    """What a group has done since it was made; ranks are global ones."""

    failed: int
    kinds: dict[str, tuple[int, int, float]]  # operations, bytes and seconds in them, by kind
    waited: dict[int, float]  # seconds, by the rank that came last
    newest: list[Record]  # the last operation, and the one that runs
    lines: dict[int, tuple[int, float, int]]  # bytes, busy seconds, packets sent again; by rank

    @property
    def bytes(self) -> int:
        return sum(size for _, size, _ in self.kinds.values())

    @property
    def seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.kinds.values())

    @staticmethod
    def of(group: dist.ProcessGroup, backend: Backend) -> _Totals:
        failed, kinds, waited = extension().totals(backend)
        done = failed + sum(operations for operations, _, _ in kinds.values())
        ranks = ranks_of(group, backend)
        return _Totals(
            failed,
            kinds,
            {ranks[rank]: seconds for rank, seconds in waited.items()},
            parse(extension().records(backend, max(0, done - 1)))[-2:],
            {ranks[rank]: tuple(use) for rank, *use in extension().lines(backend)},
        )


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

    def describe(self) -> Iterable[Metric]:
        return ()  # else a registry asks for the metrics at once, and keeps their names

    def collect(self) -> Iterator[Metric]:
        core = require_client().core
        if not dist.is_initialized():
            return
        try:
            job, rank = job_name(), str(dist.get_rank())
        except ValueError:  # destroyed a moment ago
            return
        of_rank = (job, rank)

        def counter(name: str, text: str, *labels: str) -> Any:
            return core.CounterMetricFamily(f"ringreduce_{name}", text, labels=(*_GROUP, *labels))

        def gauge(name: str, text: str, labels: tuple[str, ...] = _RANK) -> Any:
            return core.GaugeMetricFamily(f"ringreduce_{name}", text, labels=labels)

        about = gauge("rank", "1: this process is that rank.", (*_RANK, "host", "pid"))
        about.add_metric((*of_rank, socket.gethostname(), str(os.getpid())), 1)
        updated = gauge("updated_seconds", "When these figures were read, in Unix time.")
        updated.add_metric(of_rank, time.time())
        step = gauge("step", "Steps of torch's optimizers in this process.")
        step.add_metric(of_rank, extension().training_step())
        operations = counter("operations", "Operations that ended well.", "collective")
        size = counter("bytes", "Bytes of this rank's elements in them.", "collective")
        seconds = counter("operation_seconds", "Seconds in them, with waits.", "collective")
        failed = counter("failed_operations", "Operations that ended with an error.")
        waited = counter(
            "wait_seconds", "Seconds that this rank waited for the last one to come.", "late_rank"
        )
        sent = counter("line_bytes", "Bytes that a rank of another host has got.", "to_rank")
        busy = counter(
            "line_busy_seconds", "Seconds in which the line to it had bytes to move.", "to_rank"
        )
        again = counter("line_retransmits", "Packets to it that were sent again.", "to_rank")
        running = gauge(
            "running_seconds", "Seconds that an operation has run.", (*_GROUP, "collective")
        )
        sequence = gauge("running_sequence", 'Its number in errors, "#17".', _GROUP)
        for group, backend in live_groups():
            # Destroyed a moment ago, or it has no members yet.
            with contextlib.suppress(Error, LookupError, ValueError):
                totals = _Totals.of(group, backend)
                of_group = (*of_rank, group.group_name, str(backend.size()))
                for kind, (count, of_kind, in_kind) in totals.kinds.items():
                    operations.add_metric((*of_group, kind), count)
                    size.add_metric((*of_group, kind), of_kind)
                    seconds.add_metric((*of_group, kind), in_kind)
                failed.add_metric(of_group, totals.failed)
                for late, waiting in totals.waited.items():
                    waited.add_metric((*of_group, str(late)), waiting)
                for to, use in totals.lines.items():
                    for metric, value in zip((sent, busy, again), use, strict=True):
                        metric.add_metric((*of_group, str(to)), value)
                if totals.newest and totals.newest[-1].state == "running":
                    runs = totals.newest[-1]
                    since = (time.monotonic_ns() - runs.arrived_ns) / 1e9
                    running.add_metric((*of_group, runs.kind), max(0.0, since))
                    sequence.add_metric(of_group, runs.sequence)
        yield from (about, updated, step, operations, size, seconds, failed, waited)
        yield from (sent, busy, again, running, sequence)


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
        self.folder = folder
        self._folder = Path(folder).absolute()  # a program may change its working folder
        self._pid = os.getpid()
        self._path: Path | None = None
        self._stop = threading.Event()
        self._client = require_client()
        self._registry = self._client.CollectorRegistry()
        self._registry.register(_collector)
        self._thread = threading.Thread(target=self._serve, name="ringreduce-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets the thread remove the file, whose figures would be taken for new ones later."""
        if self._pid != os.getpid():
            return  # in a forked child; the file is its parent's
        self._stop.set()
        self._thread.join(2 * _EVERY)  # a file system may hang

    def _serve(self) -> None:
        told = False
        self._remove_left_over()
        while not self._stop.is_set():
            try:
                self._write()
            except Exception as error:  # nothing here is worth an end of the program
                if not told:
                    _log.warning(
                        "rank %d cannot write its metrics to %s, and goes on trying: %s",
                        *(own_rank(), self.folder, error),
                    )
                told = True
            self._stop.wait(_EVERY)
        with contextlib.suppress(OSError):
            if self._path:
                self._path.unlink(missing_ok=True)

    def _remove_left_over(self) -> None:
        """Removes the files of processes of this host that were killed."""
        for path in self._folder.glob("*.prom"):
            with contextlib.suppress(OSError, ValueError, LookupError):
                for status in statuses([path.read_text()]):
                    if status.host == socket.gethostname() and not _runs(status.pid):
                        path.unlink()

    def _write(self) -> None:
        if not dist.is_initialized():
            return
        path = Path(self._folder, f"{job_name()}-rank{dist.get_rank()}.prom")
        if self._path not in (None, path):  # the process has another rank now
            self._path.unlink(missing_ok=True)
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._client.write_to_textfile(str(path), self._registry)  # renames a whole one


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


_writer: _Writer | None = None


def follow_variable() -> None:
    """Begins what RINGREDUCE_METRICS asks for, or ends it, when a group is made."""
    global _writer
    folder = os.environ.get(_VARIABLE) or None
    if _writer and (_writer.folder != folder or _writer._pid != os.getpid()):
        end()
    if folder and not _writer:
        try:
            _writer = _Writer(folder)
        except ImportError as error:
            _log.warning("%s is ignored: %s", _VARIABLE, error)


def end() -> None:
    """Writes no more files."""
    global _writer
    if _writer:
        _writer.stop()
    _writer = None


# ---- TensorBoard


class Scalars(Protocol):
    """What has torch's SummaryWriter.add_scalar."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class tensorboard:
    """Writes what a group does in a training step as scalars, while torch's optimizers step.

        ringreduce.tensorboard(SummaryWriter())

    The scalars are those of this rank, in milliseconds a step: `ringreduce/in_operations_ms`,
    `ringreduce/waiting_ms` of it for ranks that came later than this one, of that
    `ringreduce/waiting_for_rank_3_ms` for each of them; and `ringreduce/megabytes` a step.  Those
    of a group that is given have its name: `ringreduce/NAME/megabytes`.  Each is the mean of the
    steps since the last one.  They are written in the thread that calls `optimizer.step`.

    Args:
        writer: torch.utils.tensorboard.SummaryWriter, or anything with its `add_scalar`.
        group: a ringreduce group, or another, beside which one is made if there is none; None for
            the default group.
        every: steps between two points.

    Raises:
        ValueError: `every` is less than 1.
        TypeError: not a group, or one that this rank is not in.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: the group beside it could not be made.
    """

    def __init__(
        self, writer: Scalars, group: dist.ProcessGroup | None = None, *, every: int = 1
    ) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if every < 1:
            raise ValueError(f"tensorboard(every={every}): a point needs a step at least")
        self._writer, self._every = writer, every
        self._group = ringreduce_group(group, again=False)
        self._tag = "ringreduce/" if group is None else f"ringreduce/{self._group.group_name}/"
        self._last_step = int(extension().training_step())
        self._before = self._totals()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Writes no more."""
        self._handle.remove()

    def _totals(self) -> _Totals | None:
        backend = backend_of(self._group)
        if backend is None:
            return None
        with contextlib.suppress(Error, LookupError, ValueError):
            return _Totals.of(self._group, backend)
        return None

    def _after_step(self, *_: Any) -> None:
        step = int(extension().training_step())
        steps = step - self._last_step
        if steps < self._every:
            return
        now, before = self._totals(), self._before
        self._last_step, self._before = step, now
        if now is None or before is None:  # the group is gone, or was a moment ago
            return

        def mean(later: float, earlier: float) -> float:
            return max(0.0, later - earlier) / steps  # less: the group was made anew

        sums = [
            [sum(values) for values in zip(*t.kinds.values(), strict=True)] for t in (now, before)
        ]
        (_, size, seconds), (_, old_size, old_seconds) = (s or [0, 0, 0.0] for s in sums)
        scalars = {
            "megabytes": mean(size, old_size) / 1e6,
            "in_operations_ms": mean(seconds, old_seconds) * 1e3,
            "waiting_ms": mean(sum(now.waited.values()), sum(before.waited.values())) * 1e3,
        }
        for rank, waited in now.waited.items():
            scalars[f"waiting_for_rank_{rank}_ms"] = (
                mean(waited, before.waited.get(rank, 0.0)) * 1e3
            )
        for name, value in scalars.items():
            self._writer.add_scalar(f"{self._tag}{name}", value, step)


# ---- reading


@dataclass
class Status:
    """What a rank has written, summed over its groups.

    Attributes:
        rank, job, host, pid: whose it is.
        updated: when, in Unix time, by the clock of its host.
        step: steps of its optimizers.
        operations, failed, bytes, seconds: of all operations so far.
        waited: seconds that it waited for other ranks, by their ranks.
        lines: bytes, busy seconds and packets sent again, by the rank of another host.
        done: operations that have ended, by the names of its groups.
        running: the operation that ran, as in errors ("all_reduce #17"), by group.
        running_seconds: for how long that had run, by group.
        age: seconds since then, as far as the reader knows.
    """

    rank: int
    job: str
    host: str = ""
    pid: int = 0
    updated: float = 0.0
    step: int = 0
    operations: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    lines: dict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 3))
    done: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    running: dict[str, str] = field(default_factory=dict)
    running_seconds: dict[str, float] = field(default_factory=dict)
    age: float = 0.0


_LINES = ("line_bytes", "line_busy_seconds", "line_retransmits")
_SUMS = {"operations": int, "failed_operations": int, "bytes": int, "operation_seconds": float}
_FIELDS = {"failed_operations": "failed", "operation_seconds": "seconds"}


def statuses(texts: Iterable[str]) -> list[Status]:
    """What ranks have written in Prometheus' text format.

    Args:
        texts: of one rank or several each, of one job or several.

    Returns:
        The ranks of all jobs, ascending.

    Raises:
        ValueError: a text has another format.
        ImportError: prometheus_client is not installed.
    """
    require_client()
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, int], Status] = {}
    for given in texts:
        for family in text_string_to_metric_families(given):
            for sample in family.samples:
                if sample.name.startswith("ringreduce_"):
                    of = sample.labels["job"], int(sample.labels["rank"])
                    _add(found.setdefault(of, Status(of[1], of[0])), sample)
    return [found[of] for of in sorted(found)]


def _add(status: Status, sample: Any) -> None:
    name = sample.name.removeprefix("ringreduce_").removesuffix("_total")
    labels, value = sample.labels, sample.value
    if name in ("operations", "failed_operations"):
        status.done[labels["comm_name"]] += int(value)
    if name in _SUMS:
        attribute = _FIELDS.get(name, name)
        setattr(status, attribute, getattr(status, attribute) + _SUMS[name](value))
    elif name == "rank":
        status.host, status.pid = labels["host"], int(labels["pid"])
    elif name == "updated_seconds":
        status.updated = value
    elif name == "step":
        status.step = int(value)
    elif name == "wait_seconds":
        status.waited[int(labels["late_rank"])] += value
    elif name in _LINES:
        status.lines[int(labels["to_rank"])][_LINES.index(name)] += value
    elif name == "running_seconds":
        status.running_seconds[labels["comm_name"]] = value
        status.running[labels["comm_name"]] = labels["collective"]
    elif name == "running_sequence":  # after the seconds
        status.running[labels["comm_name"]] += f" #{int(value)}"
