"""What this rank knows of each operation of a group: when it and the others came, when it ended.

    for record in ringreduce.records(group):
        print(record, record.last_rank, record.late_ms)

The records are always kept, the last 4,096 of a group.  Messages (send, recv) have none, nor have
operations on CUDA tensors that do not go through the host.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from ringreduce._backend import Backend, backend_of, extension, ringreduce_group

_LAYOUT = struct.Struct("<3Q7q" + "if" * 3 + "3Ii" + "8B")  # of OpRecord, csrc/group/recorder.h
# Kinds in which only the root is waited for, on one host, and in which only the root waits.
FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
_STATES = ("running", "done", "failed")
_NO_ALGORITHM = _NO_OP = _NO_CODEC = 255


@cache
def _names() -> dict[str, list[str]]:
    """Of the numbers in records."""
    names: dict[str, list[str]] = extension().record_names()
    return names


@dataclass(slots=True)
class Record:
    """An operation on this rank.  Times are those of time.monotonic_ns().

    Attributes:
        index: operations of this group before it, on this rank.
        sequence: its number in errors: "all_reduce #17".
        kind, dtype, op: "all_reduce", "float32" and "SUM"; what it has none of is "".
        bytes: of this rank's elements.
        root: of a broadcast, reduce, gather or scatter; else -1.
        step, bucket: the training step, counted by steps of torch's optimizers in this process,
            and how many all-reduces of this group came before it in that step.
        posted_ns: the call.
        arrived_ns: it began to run; the other ranks wait for this rank until then.  0: it did not,
            since the group had failed.
        first_data_ns: the first data of another rank were there; 0: there were none.
        done_ns: it ended; 0: it runs.
        first_ns, median_ns: when the first rank came, and when half of those known had come.
        late: up to three ranks that came last, the last one first, with how many nanoseconds after
            the median.
        known: the number of ranks whose arrival is known, this one included.
        clock_error_ns: arrivals of ranks of other hosts are off by this at most; -1: their clocks
            are not known yet.
        algorithm: of an all-reduce: "direct", "twoshot", "ring", "bruck" or "hierarchical".
        in_place: it ran in tensors that the ranks share.
        codec: of a compressed all-reduce.
        state: "running", "done" or "failed".
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

    def __str__(self) -> str:
        return f"{self.kind} #{self.sequence} ({self.bytes} bytes)"

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
    """Records that `_C.records` has copied.

    Returns:
        The records, oldest first.
    """
    return [_read(fields) for fields in _LAYOUT.iter_unpack(raw)]


def _read(fields: tuple[Any, ...]) -> Record:
    names = _names()
    index, sequence, size = fields[:3]
    posted, arrived, first_data, done, first, median, error = fields[3:10]
    pairs = zip(fields[10:16:2], fields[11:16:2], strict=True)
    step, bucket, known, root = fields[16:20]
    kind, dtype, op, algorithm, in_place, codec, state, _ = fields[20:]
    return Record(
        index=index,
        sequence=sequence,
        kind=names["kinds"][kind],
        dtype=names["dtypes"][dtype] if size else "",
        op="" if op == _NO_OP else names["ops"][op],
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
        late=tuple((rank, nanos) for rank, nanos in pairs if rank >= 0),
        known=known,
        clock_error_ns=-1 if error == 2**63 - 1 else error,
        algorithm="" if algorithm == _NO_ALGORITHM else names["algorithms"][algorithm],
        in_place=bool(in_place),
        codec="" if codec == _NO_CODEC else names["codecs"][codec],
        state=_STATES[state],
    )


def read(backend: Backend, since: int = 0) -> list[Record]:
    """As `records`, of a backend.

    Returns:
        The records of its group from index `since` on, oldest first.
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
        Up to 4,096 records.  The last one may be of an operation that still runs.

    Raises:
        TypeError: not a group, or one that this rank is not in.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: the group beside it could not be made.
    """
    return read(backend_of(ringreduce_group(group, again=False)), since)
