"""What this rank knows of each operation of a group: when it and the others came, when it ended.

    for record in ringreduce.records(group):
        print(record, record.last_rank, record.late_ms)

The records are always kept, the last 4,096 operations and as many messages of a group.  Those of
operations on CUDA tensors that do not go through the host are kept apart; all tools show them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist

from ringreduce.core.backend import Backend, backend_of, extension, ringreduce_group

# Of OpRecord, csrc/epoch/recorder.h.
LAYOUT = struct.Struct("<3Q2q3Ii8B5q" + "ifi2I" * 3 + "i3I" + "I")
STATE_AT = 62  # the byte with the state
# Kinds in which only the root is waited for, on one host, and in which only the root waits.
FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
_STATES = ("running", "done", "failed", "queued")
_MESSAGES = ("", "send", "recv")
UNKNOWN = -2  # in the place of a rank: between hosts it is not known here
_NO_ALGORITHM = _NO_OP = _NO_CODEC = 255


def on_gpus(gpu: int) -> str:
    """The end of a group's name where its GPU operations are meant, which count for themselves.

    Args:
        gpu: its number among those that this rank has used; -1: CPUs.

    Returns:
        ", on GPUs", with a number from the second GPU on, or "".
    """
    return "" if gpu < 0 else f", on GPUs{f', {gpu + 1}' if gpu else ''}"


@cache
def names() -> dict[str, list[str]]:
    """What the numbers in records mean.

    Returns:
        Lists of names, by what they name: "kinds", "dtypes", "ops", "algorithms", "codecs".
    """
    found: dict[str, list[str]] = extension().record_names()
    return found


class Why(NamedTuple):
    """What a rank waited elsewhere before it came to an operation: it could not come sooner.

    Attributes:
        rank: the global rank where the delay began, which others may have passed on; -2: it is not
            known on the rank that waited, which is between hosts.
        nanos: how long it waited.
        sequence: the operation in which it waited longest, by its number in errors.
        group: that operation's group, as `recorder_id` numbers this process's; odd: it was a
            message.  0 of other ranks.
    """

    rank: int
    nanos: int
    sequence: int
    group: int = 0


@dataclass(slots=True)
class Record:
    """An operation or a message on this rank.  Times are those of time.monotonic_ns().

    Attributes:
        index: operations, or messages, of this group before it, on this rank.
        sequence: its number in errors: "all_reduce #17"; of a message: that of its sender to its
            receiver.
        kind, dtype, op: "all_reduce", "float32" and "SUM"; what it has none of is "".  A message is
            a "send" or a "recv".
        bytes: of this rank's elements.
        root: of a broadcast, reduce, gather or scatter; of a message the peer; else -1.
        step, bucket: the training step, counted by steps of torch's optimizers in this process,
            and how many all-reduces of this group came before it in that step; of a message
            `bucket` is the tag.
        posted_ns: the call.
        arrived_ns: it began to run; the other ranks wait for this rank until then.  0: it did not
            yet, or the group had failed.  Of a message: since when this rank waited for it.
        first_data_ns: the first data of another rank were there; 0: there were none.
        done_ns: it ended; 0: it runs.
        first_ns, median_ns: when the first rank came, and when half of those known had come.
        late: up to three ranks that came last, the last one first, with how many nanoseconds after
            the median.
        known: the number of ranks whose arrival is known, this one included.
        clock_error_ns: arrivals of ranks of other hosts are off by this at most; -1: their clocks
            are not known yet.
        algorithm: of an all-reduce, or by the hierarchy: "direct", "twoshot", "ring", "bruck" or
            "hierarchical".
        in_place: it ran in tensors that the ranks share.
        codec: of a compressed all-reduce.
        state: "queued" behind earlier ones, "running", "done" or "failed".
        causes: of each rank in `late`, why it did not come sooner, if it had waited elsewhere.
        why: the same of this rank.
    """

    index: int
    sequence: int
    kind: str
    dtype: str
    op: str
    bytes: int
    root: int
    step: int
    bucket: int
    posted_ns: int
    arrived_ns: int
    first_data_ns: int
    done_ns: int
    first_ns: int
    median_ns: int
    late: tuple[tuple[int, float], ...]
    known: int
    clock_error_ns: int
    algorithm: str
    in_place: bool
    codec: str
    state: str
    causes: tuple[Why | None, ...] = ()
    why: Why | None = None

    def __str__(self) -> str:
        return f"{self.kind} #{self.sequence} ({self.bytes} bytes)"

    @property
    def is_message(self) -> bool:
        """Whether it is of a send or a recv."""
        return self.kind in _MESSAGES[1:]

    @property
    def last_rank(self) -> int:
        """The rank that came last; -1 if none is known."""
        return self.late[0][0] if self.late else -1

    @property
    def late_ms(self) -> float:
        """How many milliseconds after the median the last rank came."""
        return self.late[0][1] / 1e6 if self.late else 0.0

    @property
    def duration_ms(self) -> float:
        """Milliseconds from when it began to run until it ended; 0 while it runs."""
        return max(0, self.done_ns - self.arrived_ns) / 1e6 if self.arrived_ns else 0.0


def parse(raw: bytes) -> list[Record]:
    """Records that `_C.records` or `_C.messages` has copied.

    Returns:
        The records, oldest first.

    Raises:
        LookupError: a number in them has no meaning.
    """
    return [_read(fields) for fields in LAYOUT.iter_unpack(raw)]


def _why(rank: int, micros: int, sequence: int, group: int = 0) -> Why | None:
    return None if rank == -1 else Why(rank, micros * 1000, sequence, group)


def _read(fields: tuple[Any, ...]) -> Record:
    known_names = names()
    index, sequence, size, posted, arrived, step, bucket, known, root = fields[:9]
    kind, dtype, op, algorithm, in_place, codec, state, message = fields[9:17]
    done, first_data, first, median, error = fields[17:22]
    latest = [fields[at : at + 5] for at in (22, 27, 32) if fields[at] >= 0]
    return Record(
        index=index,
        sequence=sequence,
        kind=_MESSAGES[message] or known_names["kinds"][kind],
        dtype=known_names["dtypes"][dtype] if size else "",
        op="" if op == _NO_OP else known_names["ops"][op],
        bytes=size,
        root=root,
        step=step,
        bucket=bucket,
        posted_ns=posted,
        arrived_ns=arrived,
        first_data_ns=first_data,
        done_ns=done,
        first_ns=first,
        median_ns=median,
        late=tuple((rank, nanos) for rank, nanos, *_ in latest),
        causes=tuple(_why(*one[2:]) for one in latest),
        why=_why(*fields[37:41]),
        known=known,
        clock_error_ns=-1 if error == 2**63 - 1 else error,
        algorithm="" if algorithm == _NO_ALGORITHM else known_names["algorithms"][algorithm],
        in_place=bool(in_place),
        codec="" if codec == _NO_CODEC else known_names["codecs"][codec],
        state=_STATES[state],
    )


def read(backend: Backend, since: int = 0) -> list[Record]:
    """As `records`, of a backend.

    Returns:
        Its group's records.
    """
    return parse(extension().records(backend, since))


def records(group: dist.ProcessGroup | None = None, since: int = 0) -> list[Record]:
    """The records of a group's operations on this rank, oldest first.

    Args:
        group: a ringreduce group, or another, beside which one is made if there is none; None for
            the default group.
        since: the index of the first that is wanted.  To follow a group, pass the index of the
            first that was not done yet.  All are returned if the group has been replaced since
            (reconfigure) and has not run as many operations.

    Returns:
        The last 4,096, then those that are queued.

    Raises:
        TypeError: not a group, or one that this rank is not in.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: the group beside it could not be made.
    """
    return read(backend_of(ringreduce_group(group, again=False)), since)


def messages(group: dist.ProcessGroup | None = None, since: int = 0) -> list[Record]:
    """The records of a group's messages (send, recv) on this rank, in the order of their ends.

    Args:
        group, since: as for `records`.

    Returns:
        The last 4,096, then those that are not over.

    Raises:
        TypeError, RuntimeError, Timeout, PeerLost, Error: as for `records`.
    """
    return parse(extension().messages(backend_of(ringreduce_group(group, again=False)), since))
