"""What a rank tells the others of an operation, and what it keeps of it itself."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ringreduce.horovod._errors import HorovodInternalError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """An operation as its rank submitted it.

    Attributes:
        name: what the ranks match operations by.
        kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter" or "barrier".
        dtypes, shapes: of the tensors; several if the operation is grouped.
        device: "cpu" or "cuda".
        op: of a reduction: "Average", "Sum", "Adasum", "Min", "Max" or "Product".
        root: of a broadcast, a global rank.
        prescale, postscale: factors before and after a reduction.
        codec: of a compressed all-reduce, "" for an exact one.
        splits: of an all-to-all: the rows for each rank.
    """

    name: str
    kind: str
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[Shape, ...] = ()
    device: str = "cpu"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    codec: str = ""
    splits: tuple[int, ...] = ()


@dataclass(eq=False)
class Entry:
    """An operation that this rank has submitted; the handle that users get.

    Attributes:
        inputs, outputs: tensors by place; an output may be its input.  Outputs whose sizes are not
            known yet are made when the operation runs.
        grouped: whether the result is a list.
        errors: of a compressed all-reduce: tensors for the errors of this rank's encodings.
    """

    request: Request
    inputs: Sequence[torch.Tensor] = ()
    outputs: list[torch.Tensor] = field(default_factory=list)
    grouped: bool = False
    errors: Sequence[torch.Tensor] = ()
    submitted: float = 0.0  # time.monotonic()
    awaited_since: float = 0.0  # the same by the clock of waits
    stall_logged: float = 0.0
    stall_told: int = 0  # the cycle in which its rank asked the others for it
    # Of an all-to-all: rows that each rank sent.
    received: torch.Tensor | None = None
    # Called by a thread that is going to wait.
    hurry: Callable[[], None] | None = None
    # On a GPU: when the inputs are ready, and when the outputs are.
    ready: Any = None
    complete: Any = None

    def __post_init__(self) -> None:
        self._done = threading.Event()
        self._error: Exception | None = None

    def finish(self) -> None:
        """The outputs hold the result."""
        self._done.set()

    def fail(self, error: Exception) -> None:
        """The operation has failed; without effect if it has ended."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def has_ended(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done.is_set() and (self.complete is None or bool(self.complete.query()))

    def wait(self) -> None:
        """Raises HorovodInternalError if the operation has failed."""
        if not self._done.is_set() and self.hurry:
            self.hurry()
        self._done.wait()
        if self._error is not None:
            raise HorovodInternalError(str(self._error)) from self._error
        if self.complete is not None:
            stream = torch.cuda.current_stream(self.inputs[0].device)
            stream.wait_event(self.complete)
            for output in self.outputs:
                output.record_stream(stream)  # some were allocated in the coordinator's stream


def problem_of(requests: Mapping[int, Request]) -> str:
    """Why the requests of several global ranks for one operation cannot be run together, or ""."""
    ranks = sorted(requests)
    if not ranks:
        return ""
    first = requests[ranks[0]]
    for rank in ranks[1:]:
        other = requests[rank]
        for text, a, b in _compared(first, other):
            if a != b:
                return f"{text}: rank {ranks[0]} has {a}, but rank {rank} has {b}."
    return ""


def _compared(a: Request, b: Request) -> list[tuple[str, object, object]]:
    """What has to be the same in two ranks' requests, in Horovod's words."""
    dtypes = [tuple(str(t).removeprefix("torch.") for t in r.dtypes) for r in (a, b)]
    rest = a.kind in ("allgather", "alltoall")  # the first dimension may differ
    shapes = [tuple(s[1:] if rest else s for s in r.shapes) for r in (a, b)]
    dimensions = [tuple(len(s) for s in r.shapes) for r in (a, b)]
    kind = a.kind.upper()
    return [
        ("Mismatched operations", a.kind, b.kind),
        ("Mismatched numbers of tensors in a group", len(a.shapes), len(b.shapes)),
        ("Mismatched data types", _one(dtypes[0]), _one(dtypes[1])),
        (f"Mismatched {kind} tensor ranks", _one(dimensions[0]), _one(dimensions[1])),
        (f"Mismatched {kind} tensor shapes", _one(shapes[0]), _one(shapes[1])),
        ("Mismatched reduction operation", a.op, b.op),
        (
            "Mismatched prescale and/or postscale factors",
            (a.prescale, a.postscale),
            (b.prescale, b.postscale),
        ),
        ("Mismatched BROADCAST root ranks", a.root, b.root),
        ("Mismatched CPU/GPU device selection", a.device, b.device),
        ("Mismatched compression", a.codec or "none", b.codec or "none"),
    ]


def _one(values: tuple[Any, ...]) -> Any:
    """The value of an operation that is not grouped."""
    return values[0] if len(values) == 1 else values
