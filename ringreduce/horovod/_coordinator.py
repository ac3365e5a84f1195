"""Matches the ranks' operations by name, and runs them in one order on all ranks.

A program that was written for Horovod submits operations in any order, several at once, from hooks
of the backward pass.  Collectives of a group need one order.  So each group of ranks (process set)
has a coordinator: a thread on each rank.  The threads meet in *cycles*; a cycle

1. agrees which operations are ready.  An operation that all ranks have run before in the same form
   has a slot in a cache, which is the same on all ranks.  Ranks combine one bit a slot by AND, in a
   small all-reduce.  Further bits say whether a rank has anything else to tell;
2. if one has, gathers from all ranks the requests that are not in the cache, and who joins or shuts
   down.  Every rank enters them in the same table, so there is no rank with a special role;
3. runs what is ready on all ranks.  All-reduces of small tensors are packed into buckets.

A rank enters a cycle when it has something to tell, or waits for an operation; otherwise twice a
second, so that those who wait find out which operations are missing where.  A rank that has joined
counts as ready for everything, and contributes zeros.

The slots of the response cache and the fusion of tensors follow Horovod's design (Sergeev and Del
Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018).
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringreduce.core import clock
from ringreduce.core.backend import backend_of, extension
from ringreduce.core.words import ranks_text
from ringreduce.errors import Error
from ringreduce.horovod._collectives import Piece, Runner, fusion_key
from ringreduce.horovod._errors import HorovodInternalError
from ringreduce.horovod._requests import Entry, Request, problem_of
from ringreduce.horovod._settings import Settings
from ringreduce.horovod._timeline import Timeline

_log = logging.getLogger("ringreduce.horovod")

# A rank with nothing to tell enters a cycle this often, in seconds.
_IDLE = 0.5
# So many cycles without a result follow each other at once; then ranks wait for `cycle_time`.
_EAGER_CYCLES = 3
# Tensors from this size on are reduced where they are, not in buckets.
_LARGE_BYTES = 1 << 20


class ResponseCache:
    """Requests that all ranks have run, and their slots; the same on all ranks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: list[str | None] = []
        self._known: dict[str, tuple[int, Request]] = {}  # by name, the latest used last

    def __len__(self) -> int:
        """The number of slots, used or free."""
        return len(self._slots)

    def slot(self, request: Request) -> int | None:
        """Where this very request is."""
        slot, known = self._known.get(request.name, (None, None))
        return slot if known == request else None

    def slot_of(self, name: str) -> int | None:
        """Where a request of this name is, whatever it is."""
        return self._known[name][0] if name in self._known else None

    def at(self, slot: int) -> Request | None:
        """The request in a slot, or None if it is free."""
        name = self._slots[slot]
        return None if name is None else self._known[name][1]

    def use(self, name: str) -> None:
        """The request was run once more."""
        self._known[name] = self._known.pop(name)

    def add(self, request: Request) -> str | None:
        """Adds a request; the name of one that has to leave, if any."""
        if self._capacity == 0:
            return None
        left = None
        if len(self._known) == self._capacity:
            left = next(iter(self._known))
            self.remove(left)
        if None in self._slots:
            slot = self._slots.index(None)
            self._slots[slot] = request.name
        else:
            slot = len(self._slots)
            self._slots.append(request.name)
        self._known[request.name] = slot, request
        return left

    def remove(self, name: str) -> int | None:
        """The slot that is free now, if the name had one."""
        slot, _ = self._known.pop(name, (None, None))
        if slot is not None:
            self._slots[slot] = None
        return slot


@dataclass
class _Ready:
    """An operation that all ranks are ready for."""

    request: Request  # of the lowest rank that has one
    by_rank: dict[int, Request]  # empty if all ranks have the same
    entry: Entry | None  # None: this rank has joined
    is_without_joined: bool = False  # ranks that have joined may not have requested it


@dataclass
class _Told:
    """What a rank tells in a cycle."""

    requests: list[Request]
    joins: bool
    closes: str  # why this rank shuts down, or ""
    cause: str  # the error before that, or ""


class _Join:
    """A rank's wait for all others to join."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.last = -1
        self.error: Exception | None = None


class Coordinator:
    """The operations of one group of ranks.

    Args:
        group: a ringreduce group that only this coordinator uses.
        settings: the same on all ranks.
        timeline: where the stages of operations are recorded, or None.
    """

    def __init__(
        self, group: dist.ProcessGroup, settings: Settings, timeline: Timeline | None
    ) -> None:
        self.group = group
        self.timeline = timeline
        self._settings = settings
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._runner = Runner(group)

        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._submitted: list[Entry] = []
        self._submitted_bytes = 0
        self._hurried = False
        self._names: set[str] = set()  # of operations that this rank has submitted and that run
        self._unnamed: dict[str, int] = {}  # how many such names there were, by kind
        self._join: _Join | None = None
        self._closing = ""
        self._cause = ""
        self._failure: Exception | None = None

        # Of the thread alone:
        self._pending: dict[str, Entry] = {}
        self._hits = 0  # a bit for each slot whose operation is pending here
        self._untold: list[Request] = []
        self._table: dict[str, dict[int, Request]] = {}  # told, not yet run; by rank
        self._cache = ResponseCache(settings.cache_capacity)
        self._joined: list[int] = []
        self._fruitless = 0
        self._cycles = 0
        self._next_stall_check = 0.0

        self._thread = threading.Thread(target=self._run, name="ringreduce-hvd", daemon=True)
        self._thread.start()

    # ---- calls of other threads

    def submit(self, entry: Entry) -> None:
        """Queues an operation.

        Raises:
            HorovodInternalError: the coordinator has ended.
            ValueError: an operation of that name is under way, or it is on another GPU than
                earlier ones.
        """
        name = entry.request.name
        entry.submitted, entry.awaited_since = time.monotonic(), clock.now()
        with self._changed:
            if self._failure is not None:
                raise HorovodInternalError(str(self._failure)) from self._failure
            if name in self._names:
                raise ValueError(
                    f"rank {self.ranks[self._rank]} has submitted {entry.request.kind} {name!r} "
                    "and not all ranks are done with it; wait for it, or take another name"
                )
            if entry.request.device == "cuda":
                gpu = entry.inputs[0].device
                if (used := self._runner.use_gpu(gpu)) != gpu:
                    raise ValueError(
                        f"rank {self.ranks[self._rank]} has used {used} and now gives {gpu}; all "
                        "tensors of a rank have to be on one GPU"
                    )
            self._names.add(name)
            self._submitted.append(entry)
            self._submitted_bytes += sum(tensor.nbytes for tensor in entry.inputs)
            entry.hurry = self._hurry
            self._changed.notify()

    def _hurry(self) -> None:
        """A thread waits for an operation: do not wait for more that could go with it."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def next_name(self, kind: str) -> str:
        """A name for an operation that has none."""
        with self._changed:
            number = self._unnamed[kind] = self._unnamed.get(kind, -1) + 1
        return f"{kind}.noname.{number}"

    def join(self, device: int) -> int:
        """Waits until all ranks have joined; the global rank of the last one."""
        with self._changed:
            if self._failure is not None:
                raise HorovodInternalError(str(self._failure)) from self._failure
            if self._join is not None:
                raise ValueError("this rank has called hvd.join() and is waiting in it")
            if device < 0 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                device = torch.cuda.current_device()
            self._runner.zeros_gpu = torch.device("cuda", max(device, 0))
            join = self._join = _Join()
            self._changed.notify()
        join.done.wait()
        if join.error is not None:
            raise HorovodInternalError(str(join.error)) from join.error
        return self.ranks[join.last]

    def check(self) -> None:
        """Waits for operations on a GPU, and raises HorovodInternalError if one has failed.

        Such an operation is done for its caller when it is in a stream.  Its output is NaN if it
        fails there.  All-to-alls by NCCL are not asked.
        """
        if not self._runner.synchronize():
            return
        try:
            if backend := backend_of(self.group):
                extension().check(backend)
        except Error as error:
            with self._changed:
                self._cause = self._cause or str(error)
            raise HorovodInternalError(str(error)) from error

    @property
    def cause(self) -> str:
        """The error that ended this coordinator, or that another rank gave for its end; or ""."""
        with self._changed:
            return self._cause

    def ask_to_close(self, why: str, cause: str = "") -> None:
        """Begins to shut down on all ranks, whose pending operations fail.

        `cause`: an error of another coordinator, of which the ranks of this one may not know.
        """
        with self._changed:
            self._closing = why
            self._cause = self._cause or cause
            self._changed.notify()

    def close(self, why: str, timeout: float) -> bool:
        """Shuts down; False if that takes longer than `timeout`."""
        self.ask_to_close(why)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- the thread

    @torch.inference_mode()  # whose tensors, and parameters, can only be written in this mode
    def _run(self) -> None:
        try:
            while not (why := self._cycle()):
                continue
            self._end(HorovodInternalError(why))
        except Exception as error:
            self._end(error, str(error))
            backend = backend_of(self.group)
            if backend and not isinstance(error, Error):
                backend.abort()  # something is wrong here only, so the others have to be told

    def _end(self, error: Exception, cause: str = "") -> None:
        with self._changed:
            self._failure = error
            self._cause = self._cause or cause
            waiting = [*self._pending.values(), *self._submitted]
            join, self._join = self._join, None
        for entry in waiting:
            entry.fail(error)
        if join:
            join.error = error
            join.done.set()

    def _cycle(self) -> str:
        """One cycle; why the coordinator ends, or ""."""
        self._cycles += 1
        told = self._wait()
        if self.timeline:
            self.timeline.cycle()
        agreed = self._agree(told)
        ready = list(self._cached(agreed >> 8))
        closed = ""
        try:
            if not agreed & 1:
                closed = self._exchange(told)
            ready += self._complete()
            self._fruitless = 0 if ready else self._fruitless + 1
            self._perform(ready)
        except Exception:
            # _end fails these operations too, after it has set the cause.  A thread that waits for
            # one may shut down at once, and then the other ranks must be told the cause.
            self._pending |= {one.request.name: one.entry for one in ready if one.entry}
            raise
        self._end_joins()
        return closed

    def _wait(self) -> _Told:
        """Waits for something to tell, or until it is time for a cycle."""
        joined = self._rank in self._joined

        def has_news() -> bool:
            return bool(self._submitted or self._closing or (self._join and not joined))

        if joined or self._untold:
            limit = 0.0
        elif self._pending:
            limit = 0.0 if self._fruitless < _EAGER_CYCLES else self._settings.cycle_time
        else:
            limit = _IDLE
        if joined and self._fruitless >= _EAGER_CYCLES:
            limit = self._settings.cycle_time
        with self._changed:
            if not has_news() and limit > 0:
                self._changed.wait_for(has_news, limit)
            if self._submitted:
                # A gradient is followed by others, and a bucket costs less than they do alone.
                self._changed.wait_for(self._is_enough, self._settings.cycle_time)
            fresh, self._submitted = self._submitted, []
            self._submitted_bytes, self._hurried = 0, False
            joins = self._join is not None and not joined
            told = _Told(self._untold, joins, self._closing, self._cause)
        self._untold = []
        for entry in fresh:
            self._pending[entry.request.name] = entry
            slot = self._cache.slot(entry.request)
            if slot is None or joined:
                told.requests.append(entry.request)
            else:
                self._hits |= 1 << slot
        if told.joins:
            # Its bits will say nothing any more, so the others must have its requests.
            told.requests += [entry.request for entry in self._pending.values() if self._hit(entry)]
            self._hits = 0
        if self._settings.stall_seconds > 0:
            self._check_stalls(told)
        return told

    def _hit(self, entry: Entry) -> int:
        """The bit of an operation that is pending here, if that is all that others know of it."""
        slot = self._cache.slot(entry.request)
        return 0 if slot is None else self._hits & 1 << slot

    def _is_enough(self) -> bool:
        return bool(
            self._hurried or self._closing or self._join or self._submitted_bytes >= _LARGE_BYTES
        )

    def _agree(self, told: _Told) -> int:
        """The AND of all ranks' bits: bit 0 "nothing to tell", from bit 8 on one for each slot."""
        slots = len(self._cache)
        hits = self._hits
        if self._rank in self._joined:
            # Of what this rank has submitted, and tells now, it has to be in the table first.
            own = [self._cache.slot_of(request.name) for request in told.requests]
            hits = (1 << slots) - 1 & ~sum(1 << slot for slot in own if slot is not None)
        quiet = not (told.requests or told.joins or told.closes)
        bits = bytearray((hits << 8 | quiet).to_bytes(1 + (slots + 7) // 8, "little"))
        dist.all_reduce(
            torch.frombuffer(bits, dtype=torch.uint8), op=dist.ReduceOp.BAND, group=self.group
        )
        return int.from_bytes(bits, "little")

    def _exchange(self, told: _Told) -> str:
        """Tells the other ranks, and learns what they have to tell; why to shut down, or ""."""
        gathered: list[_Told] = [told] * self._size
        dist.all_gather_object(gathered, told, group=self.group)
        reasons: dict[str, list[int]] = {}
        for rank, theirs in enumerate(gathered):
            for request in theirs.requests:
                self._table.setdefault(request.name, {})[rank] = request
                self._forget(request.name)
            if theirs.joins:
                self._joined.append(rank)
            if theirs.closes:
                reasons.setdefault(theirs.closes, []).append(self.ranks[rank])
        if not reasons:
            return ""
        who = ", ".join(f"{ranks_text(ranks)} {why}" for why, ranks in reasons.items())
        with self._changed:
            self._cause = next((theirs.cause for theirs in gathered if theirs.cause), "")
            after = f", after an error: {self._cause}" if self._cause else ""
        return f"the job was shut down: {who}{after}; hvd.shutdown() and hvd.init() begin again"

    def _forget(self, name: str) -> None:
        """Takes a name out of the cache; if it is pending here, its request is told again."""
        slot = self._cache.remove(name)
        if slot is not None and self._hits >> slot & 1:
            self._hits &= ~(1 << slot)
            self._untold.append(self._pending[name].request)

    # ---- what is ready

    def _cached(self, slots: int) -> Iterator[_Ready]:
        for slot in range(len(self._cache)):
            if not slots >> slot & 1:
                continue
            request = self._cache.at(slot)
            if request is None or len(self._joined) == self._size:
                continue
            entry = self._pending.pop(request.name, None)
            self._hits &= ~(1 << slot)
            # Bits of ranks that have all joined say nothing.
            self._cache.use(request.name)
            yield _Ready(request, {}, entry, bool(self._joined))

    def _complete(self) -> list[_Ready]:
        """Operations of the table that all ranks have requested, but for those that have joined."""
        found = []
        for name, by_rank in list(self._table.items()):
            if len(by_rank.keys() | set(self._joined)) < self._size:
                continue
            del self._table[name]
            first = by_rank[min(by_rank)]
            entry = self._pending.pop(name, None)
            found.append(_Ready(first, by_rank, entry, len(by_rank) < self._size))
        return found

    def _perform(self, ready: Sequence[_Ready]) -> None:
        """Runs operations that are ready, all-reduces first; the same on all ranks."""
        buckets: dict[object, list[tuple[Piece, _Ready]]] = {}
        sizes: dict[object, int] = {}
        left: dict[int, int] = {}  # pieces that have not run, by id of the operation
        others = []

        def run(key: object) -> None:
            bucket = buckets.pop(key)
            self._runner.all_reduce([piece for piece, _ in bucket], bucket[0][1].request)
            for _, one in bucket:
                left[id(one)] -= 1
                if left[id(one)] == 0:
                    self._finish(one)

        for one in ready:
            if problem := self._problem(one):
                if one.entry:
                    self._release(one.entry)
                    one.entry.fail(HorovodInternalError(problem))
                continue
            if one.by_rank and self._is_same_everywhere(one):
                self._told_again(self._cache.add(one.request))
            if self.timeline and one.entry:
                self.timeline.negotiated(one.request, one.entry.submitted)
            if one.request.kind != "allreduce":
                others.append(one)
                continue
            pieces = self._runner.pieces(one.request, one.entry)
            left[id(one)] = len(pieces)
            if not pieces:
                self._finish(one)
            for piece in pieces:
                key = fusion_key(one.request, piece)
                if piece.input.nbytes >= _LARGE_BYTES or key is None:
                    buckets[id(piece)] = [(piece, one)]
                    run(id(piece))
                    continue
                is_full = sizes.get(key, 0) + piece.input.nbytes > self._settings.fusion_bytes
                if is_full and key in buckets:
                    run(key)
                    sizes[key] = 0
                buckets.setdefault(key, []).append((piece, one))
                sizes[key] = sizes.get(key, 0) + piece.input.nbytes
        for key in list(buckets):
            run(key)
        for one in others:
            self._runner.run(one.request, one.by_rank, one.entry)
            self._finish(one)

    def _problem(self, one: _Ready) -> str:
        """Why the ranks' requests do not go together; the same on all ranks."""
        requests = {self.ranks[rank]: request for rank, request in one.by_rank.items()}
        problem = problem_of(requests)
        if (
            not problem
            and one.is_without_joined
            and one.request.kind not in ("allreduce", "barrier")
        ):
            problem = f"{one.request.kind} is not supported with Join at this time."
        return problem and f"{one.request.kind} {one.request.name!r}: {problem}"

    def _is_same_everywhere(self, one: _Ready) -> bool:
        """Whether a later operation needs no more than the name.  Ranks that have joined count as
        well: another cycle would find that they have another request."""
        return all(request == one.request for request in one.by_rank.values())

    def _told_again(self, name: str | None) -> None:
        """A request that left the cache: if it is pending here, it is told again."""
        entry = None if name is None else self._pending.get(name)
        if entry is None or name is None:
            return
        told = {request.name for request in self._untold}
        in_table = self._rank in self._table.get(name, {})
        if name not in told and not in_table:
            self._untold.append(entry.request)
        self._hits = sum(
            1 << slot
            for pending in self._pending.values()
            if (slot := self._cache.slot(pending.request)) is not None
        )

    def _finish(self, one: _Ready) -> None:
        if one.entry is None:
            return
        self._release(one.entry)
        if self.timeline:
            self.timeline.ran(one.request)
        one.entry.finish()

    def _release(self, entry: Entry) -> None:
        with self._changed:
            self._names.discard(entry.request.name)

    def _end_joins(self) -> None:
        if len(self._joined) < self._size:
            return
        with self._changed:
            join, self._join = self._join, None
            # Ranks with more data than others have named more operations.
            self._unnamed.clear()
        last, self._joined = self._joined[-1], []
        if join:
            join.last = last
            join.done.set()

    # ---- stalls

    def _check_stalls(self, told: _Told) -> None:
        """Logs operations that wait for other ranks, and which ranks these are.

        Of an operation in the cache only a bit is known.  So this rank tells its request again,
        which takes it out of the cache on all ranks; then all who have it tell theirs.
        """
        now = clock.now()
        if not self._pending or now < self._next_stall_check:
            return
        self._next_stall_check = now + min(1.0, self._settings.stall_seconds / 4)
        shutdown = self._settings.stall_shutdown_seconds
        for name, entry in self._pending.items():
            waited = now - entry.awaited_since
            if waited < min(self._settings.stall_seconds, shutdown or self._settings.stall_seconds):
                continue
            slot = self._cache.slot(entry.request)
            if slot is not None:
                if self._hits >> slot & 1:
                    self._hits &= ~(1 << slot)
                    told.requests.append(entry.request)
                    entry.stall_told = self._cycles
                continue
            arrived = self._table.get(name)
            if not arrived or self._rank not in arrived:
                continue
            if 0 < entry.stall_told > self._cycles - 2:
                continue  # the others tell theirs in this cycle
            missing = [
                self.ranks[r]
                for r in range(self._size)
                if r not in arrived and r not in self._joined
            ]
            is_due = waited >= self._settings.stall_seconds and now >= entry.stall_logged
            if is_due and self._rank == min(arrived):
                entry.stall_logged = now + self._settings.stall_seconds
                _log.warning(
                    "%s %r has waited %.0f s for ranks %s, which have not submitted it; ranks %s "
                    "have. Do all ranks submit the same operations?",
                    entry.request.kind,
                    name,
                    waited,
                    missing,
                    [self.ranks[r] for r in sorted(arrived)],
                )
            if 0 < shutdown < waited:
                told.closes = (
                    f"has waited {waited:.0f} s for {entry.request.kind} {name!r} of ranks "
                    f"{missing} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
                )
