"""Runs operations that all ranks are ready for, on ringreduce groups.

Only the coordinator's thread calls what is here, for the same operations in the same order on all
ranks.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.core.backend import backend_of, extension
from ringreduce.horovod._requests import Entry, Request

_OPS: dict[str, Any] = {
    "Average": dist.ReduceOp.AVG,
    "Sum": dist.ReduceOp.SUM,
    "Min": dist.ReduceOp.MIN,
    "Max": dist.ReduceOp.MAX,
    "Product": dist.ReduceOp.PRODUCT,
}


@dataclass
class Piece:
    """One tensor of an all-reduce; the output may be the input."""

    input: torch.Tensor
    output: torch.Tensor
    error: torch.Tensor | None
    entry: Entry | None


def fusion_key(request: Request, piece: Piece) -> object:
    """Pieces with the same key can be reduced together; None: only alone."""
    if request.op == "Adasum" or request.codec:
        return None
    return (
        piece.input.dtype,
        request.device,
        request.op,
        request.prescale,
        request.postscale,
    )


class Runner:
    """Runs operations on a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._size = len(self._ranks)
        self._memory: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._gpu: torch.device | None = None  # the first one that is used
        self._gpu_lock = threading.RLock()  # a signal handler may come between
        self._stream: Any = None  # on it
        # Where a rank that has joined makes zeros, if it has used no GPU.
        self.zeros_gpu = torch.device("cuda", 0)

    def use_gpu(self, gpu: torch.device) -> torch.device:
        """Returns the one GPU of this rank that the group connects: the first that was given."""
        with self._gpu_lock:
            self._gpu = self._gpu or gpu
            return self._gpu

    def pieces(self, request: Request, entry: Entry | None) -> list[Piece]:
        """The tensors of an all-reduce; of a rank that has joined, zeros."""
        if entry is None:
            with self._on_device(request, []) as device:
                zeros = [
                    torch.zeros(shape, dtype=dtype, device=device)
                    for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
                ]
            return [Piece(zero, zero, None, None) for zero in zeros]
        return [
            Piece(one, out, entry.errors[k] if entry.errors else None, entry)
            for k, (one, out) in enumerate(zip(entry.inputs, entry.outputs, strict=True))
        ]

    def all_reduce(self, pieces: Sequence[Piece], request: Request) -> None:
        """Reduces pieces of one key."""
        with self._on_device(request, [piece.entry for piece in pieces]):
            if len(pieces) == 1:
                output = pieces[0].output
                if output is not pieces[0].input:
                    output.copy_(pieces[0].input)
                self._reduce(output, request, pieces[0].error)
                return
            flat = self._flat(pieces)
            self._reduce(flat, request, None)
            parts = torch.split(flat, [piece.input.numel() for piece in pieces])
            torch._foreach_copy_(
                [piece.output for piece in pieces],
                [part.view(piece.output.shape) for part, piece in zip(parts, pieces, strict=True)],
            )

    def synchronize(self) -> bool:
        """Waits until operations on a GPU have ended, from any thread; False if there were none."""
        if self._stream is None:
            return False
        self._stream.synchronize()
        return True

    def run(self, request: Request, by_rank: Mapping[int, Request], entry: Entry | None) -> None:
        """Runs an operation of another kind than all-reduce; every rank has an entry."""
        if request.kind == "barrier":
            return  # all ranks have requested it, and that is all
        assert entry is not None
        with self._on_device(request, [entry]):
            for place in range(len(request.shapes)):
                if request.kind == "broadcast":
                    self._broadcast(entry, place, request.root)
                elif request.kind == "allgather":
                    rows = [
                        by_rank.get(rank, request).shapes[place][0] for rank in range(self._size)
                    ]
                    self._all_gather(entry, place, rows)
                elif request.kind == "reducescatter":
                    self._reduce_scatter(entry, place, request)
                else:
                    self._all_to_all(entry, by_rank, request)

    # ---- the collectives

    def _reduce(self, data: torch.Tensor, request: Request, error: torch.Tensor | None) -> None:
        _scale(data, request.prescale)
        if request.codec:
            extension().compressed_all_reduce(
                backend_of(self._group),
                data,
                data,
                codec=request.codec,
                op="avg" if request.op == "Average" else "sum",
                error=error,
                async_op=False,
            )
        elif request.op == "Adasum":
            self._adasum(data)
        else:
            dist.all_reduce(data, op=_OPS[request.op], group=self._group)
        _scale(data, request.postscale)

    def _adasum(self, data: torch.Tensor) -> None:
        """Adds vectors that point the same way less than fully.

        Pairs of ranks exchange their vectors and compute the same combination, at distances 1, 2,
        4, ...: a binary tree whose nodes are computed by all ranks below them.  Source: Maleki et
        al., "Scaling Distributed Training with Adaptive Summation" (2021).
        """
        theirs = torch.empty_like(data)
        distance = 1
        while distance < self._size:
            peer = self._ranks[self._rank ^ distance]
            send = dist.P2POp(dist.isend, data, peer, self._group)
            receive = dist.P2POp(dist.irecv, theirs, peer, self._group)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            # The lower rank's first, so that both compute the same bits.
            pair = (data, theirs) if self._rank & distance == 0 else (theirs, data)
            data.copy_(_adaptive_sum(*pair))
            distance *= 2

    def _broadcast(self, entry: Entry, place: int, root: int) -> None:
        source, output = entry.inputs[place], entry.outputs[place]
        if output is not source and self._ranks[self._rank] == root:
            output.copy_(source)
        dist.broadcast(output, root, group=self._group)

    def _all_gather(self, entry: Entry, place: int, rows: list[int]) -> None:
        source = entry.inputs[place]
        output = _new(source, sum(rows))
        dist.all_gather(list(torch.split(output, rows)), source, group=self._group)
        entry.outputs.append(output)

    def _reduce_scatter(self, entry: Entry, place: int, request: Request) -> None:
        source = entry.inputs[place]
        if request.prescale != 1.0:
            source = _scale(source.clone(), request.prescale)
        rows = rows_of(source.shape[0], self._size)
        output = _new(source, rows[self._rank])
        parts = list(torch.split(source, rows))
        dist.reduce_scatter(output, parts, op=_OPS[request.op], group=self._group)
        entry.outputs.append(_scale(output, request.postscale))

    def _all_to_all(self, entry: Entry, by_rank: Mapping[int, Request], request: Request) -> None:
        source = entry.inputs[0]
        splits = [_splits(by_rank.get(rank, request), self._size) for rank in range(self._size)]
        received = [theirs[self._rank] for theirs in splits]
        output = _new(source, sum(received))
        dist.all_to_all_single(output, source, received, splits[self._rank], group=self._group)
        entry.outputs.append(output)
        with torch.inference_mode(False):
            entry.received = torch.tensor(received, dtype=torch.int32, device="cpu")

    # ---- memory and devices

    def _flat(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The elements of a bucket, in memory that is kept."""
        elements = sum(piece.input.numel() for piece in pieces)
        key = pieces[0].input.dtype, pieces[0].input.device
        kept = self._memory.get(key)
        if kept is None or kept.numel() < elements:
            kept = self._memory[key] = pieces[0].input.new_empty(elements)
        flat = kept[:elements]
        return torch.cat([piece.input.reshape(-1) for piece in pieces], out=flat)

    @contextlib.contextmanager
    def _on_device(
        self, request: Request, entries: Sequence[Entry | None]
    ) -> Iterator[torch.device]:
        """On a GPU: a stream that waits for the inputs, and an event when the outputs are there."""
        if request.device != "cuda":
            yield torch.device("cpu")
            return
        gpu = self.use_gpu(self.zeros_gpu)
        if self._stream is None:
            self._stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        stream = self._stream
        present = [entry for entry in entries if entry is not None]
        with torch.cuda.stream(stream):
            for entry in present:
                stream.wait_event(entry.ready)
            yield gpu
            if not present:
                return
            complete = torch.cuda.Event()  # type: ignore[no-untyped-call]
            complete.record(stream)
            for entry in present:
                entry.complete = complete
                for tensor in (*entry.inputs, *entry.outputs):
                    tensor.record_stream(stream)


def _new(source: torch.Tensor, rows: int) -> torch.Tensor:
    """An output, which the user may pass on to autograd."""
    with torch.inference_mode(False):
        return source.new_empty((rows, *source.shape[1:]))


def rows_of(rows: int, size: int) -> list[int]:
    """The rows that each rank gets of a reduce-scatter: the first ones get those left over."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _splits(request: Request, size: int) -> tuple[int, ...]:
    return request.splits or (request.shapes[0][0] // size,) * size


def _scale(data: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiplies in place; integers are computed as float64, and cut."""
    if factor == 1.0:
        return data
    if data.dtype.is_floating_point or data.dtype.is_complex:
        return data.mul_(factor)
    return data.copy_(data.to(torch.float64) * factor)


def _adaptive_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide_a, wide_b = (t.to(torch.float64).reshape(-1) for t in (a, b))
    dot = torch.dot(wide_a, wide_b)
    norm_a, norm_b = torch.dot(wide_a, wide_a), torch.dot(wide_b, wide_b)
    of_a = 1.0 if norm_a == 0 else 1.0 - dot / (2 * norm_a)
    of_b = 1.0 if norm_b == 0 else 1.0 - dot / (2 * norm_b)
    return (of_a * wide_a + of_b * wide_b).view(a.shape).to(a.dtype)
