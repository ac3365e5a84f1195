"""The collectives of Horovod's API, plain, in place, asynchronous and grouped.

An operation is matched with those of the other ranks by its name.  Without a name it gets one with
a number, so ranks that submit such operations must do so in the same order.

A function such as `_all_reduce` checks the arguments of a kind.  The ways to call it, asynchronous
or in place, are made of it, and have its signature.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch

from ringreduce.horovod import _world
from ringreduce.horovod._compression import Compression, Compressor
from ringreduce.horovod._requests import Entry, Request
from ringreduce.horovod._world import ProcessSet, global_process_set

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather", "allgather_async",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async",
    "sparse_allreduce_async", "synchronize",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]

# Reduction operations; values as Horovod's, for programs that print or pass numbers.
Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5
_OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_REDUCED = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def _op_of(op: int | None, average: bool | None = None) -> int:
    if op is not None and average is not None:
        raise ValueError("give op or average, not both")
    if average is not None:
        warnings.warn("average is deprecated: use op", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    op = Average if op is None else _world.whole(op, "op")
    if op not in range(len(_OP_NAMES)):
        raise ValueError(f"no reduction operation {op!r}: use hvd.Average, hvd.Sum, ...")
    return op


def _check(kind: str, tensors: Tensors, op: str) -> None:
    for tensor in tensors:
        is_average_of_truths = op == "Average" and tensor.dtype == torch.bool
        if is_average_of_truths or (op and tensor.dtype not in _REDUCED):
            raise ValueError(f"{kind} cannot take {op} of {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{kind} takes dense tensors, not one of layout {tensor.layout}")
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} takes contiguous tensors: pass tensor.contiguous()")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("the tensors of a group have to be on one device")


def _with_rows(kind: str, tensors: Tensors) -> Tensors:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} takes tensors of one dimension or more")
    return tensors


@dataclass
class _Call:
    """An operation whose arguments are right, before it is submitted."""

    kind: str
    tensors: Tensors
    name: str | None
    process_set: ProcessSet
    grouped: bool = False
    errors: Tensors = ()
    of_request: dict[str, Any] = field(default_factory=dict)

    def start(self, in_place: bool = False) -> Entry:
        """Submits it; in place, the outputs are the tensors."""
        tensors = list(self.tensors)
        _check(self.kind, tensors, self.of_request.get("op", ""))
        if self.grouped and not tensors:
            raise ValueError(f"a grouped {self.kind} of no tensors")
        outputs = []
        if self.kind in ("allreduce", "broadcast"):  # of other kinds it is as large as it turns out
            outputs = tensors if in_place else [torch.empty_like(tensor) for tensor in tensors]
        coordinator = _world.coordinator_of(self.process_set)
        request = Request(
            name=coordinator.next_name(self.kind)
            if self.name is None
            else f"{self.kind}.{self.name}",
            kind=self.kind,
            dtypes=tuple(tensor.dtype for tensor in tensors),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            device=tensors[0].device.type if tensors else "cpu",
            **self.of_request,
        )
        entry = Entry(request, tensors, list(outputs), self.grouped, self.errors)
        if request.device == "cuda":
            entry.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            entry.ready.record(torch.cuda.current_stream(tensors[0].device))
        coordinator.submit(entry)
        return entry


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _call(
    prepare: Callable[_P, _Call], returns: type[_T], in_place: bool = False
) -> Callable[[Callable[[], None]], Callable[_P, _T]]:
    """Makes a function that has only a name and a docstring start a call, with its arguments.

    It returns the handle if that is what `returns` says, else it waits for the output.
    """

    def decorate(named: Callable[[], None]) -> Callable[_P, _T]:
        @functools.wraps(named)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            entry = prepare(*args, **kwargs).start(in_place)
            return entry if returns is Entry else _wait(entry)

        call.__annotations__ = {**prepare.__annotations__, "return": returns}
        signature = inspect.signature(prepare).replace(return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def _wait(entry: Entry) -> Any:
    entry.wait()
    if entry.grouped:
        return entry.outputs
    if entry.received is not None:
        return entry.outputs[0], entry.received
    return entry.outputs[0] if entry.outputs else None


def _through(
    compression: type[Compressor], tensors: Tensors, run: Callable[..., Any]
) -> list[torch.Tensor]:
    """What `run` makes of the compressed tensors, in the form that the tensors had."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    outputs = run(*[tensor for tensor, _ in compressed])
    return [
        compression.decompress(output, ctx)
        for output, (_, ctx) in zip(outputs, compressed, strict=True)
    ]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def synchronize(handle: Entry) -> Any:
    """Waits for an asynchronous operation.

    Returns:
        Its output; of a grouped one the list; of an all-to-all also how many rows came from each
        rank.

    Raises:
        HorovodInternalError: the operation failed; names the ranks.
    """
    return _wait(handle)


def poll(handle: Entry) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.has_ended()


# ---- all-reduce


def reduction(
    tensors: Tensors,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    prescale: float = 1.0,
    postscale: float = 1.0,
    grouped: bool = False,
    codec: str = "",
    errors: Tensors = (),
) -> _Call:
    """An all-reduce; `errors` receive those of this rank's encodings, if it is through a codec."""
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum takes all ranks, not a process set")
        if _world.size() & (_world.size() - 1):
            raise NotImplementedError(
                f"Adasum needs a number of ranks that is a power of 2, not {_world.size()}"
            )
        if not all(tensor.dtype.is_floating_point for tensor in tensors):
            raise ValueError("Adasum is for floating tensors")
    factors = {"prescale": float(prescale), "postscale": float(postscale)}
    fits = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    of_codec = codec if fits and op in (Average, Sum) else ""
    return _Call(
        "allreduce",
        tensors,
        name,
        process_set,
        grouped,
        errors if codec and fits else (),
        {"op": _OP_NAMES[op], "codec": of_codec, **factors},
    )


def _all_reduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Call:
    factors = prescale_factor, postscale_factor
    return reduction([tensor], _op_of(op, average), name, process_set, *factors)


def _grouped_all_reduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Call:
    factors = prescale_factor, postscale_factor
    return reduction(tensors, _op_of(op, average), name, process_set, *factors, grouped=True)


@_call(_all_reduce, Entry)
def allreduce_async() -> None:
    """Starts `allreduce`; returns the handle for `synchronize`.  No gradient flows through it."""


@_call(_all_reduce, Entry, in_place=True)
def allreduce_async_() -> None:
    """As `allreduce_async`; the result replaces the tensor's values."""


@_call(_all_reduce, torch.Tensor, in_place=True)
def allreduce_() -> None:
    """As `allreduce`, in place, without gradients; returns the tensor."""


@_call(_grouped_all_reduce, Entry)
def grouped_allreduce_async() -> None:
    """Starts an all-reduce of several tensors, which run when all ranks have submitted them all."""


@_call(_grouped_all_reduce, Entry, in_place=True)
def grouped_allreduce_async_() -> None:
    """As `grouped_allreduce_async`, in place."""


@_call(_grouped_all_reduce, list[torch.Tensor], in_place=True)
def grouped_allreduce_() -> None:
    """As `grouped_allreduce`, in place, without gradients."""


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Callable[[Tensors, bool], Entry], *tensors: torch.Tensor) -> Any:
        ctx.start = start
        ctx.set_materialize_grads(True)
        return tuple(_wait(start([tensor.detach() for tensor in tensors], True)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        contiguous = [gradient.contiguous() for gradient in gradients]
        return None, *_wait(ctx.start(contiguous, False))


def _differentiable_all_reduce(
    tensors: Tensors,
    average: bool | None,
    name: str | None,
    compression: type[Compressor],
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    checked, codec = _op_of(op, average), getattr(compression, "codec", "")

    def start(values: Tensors, forward: bool) -> Entry:
        own = name if forward else None
        call = reduction(values, checked, own, process_set, prescale, postscale, True, codec)
        return call.start()

    return _through(compression, tensors, functools.partial(_apply, _AllReduce, start))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The average of the ranks' tensors, or another reduction.  Gradients flow through it.

    Args:
        tensor: dense and contiguous; of the same shape and dtype on all ranks.
        average: deprecated: True for Average, False for Sum.
        name: what ranks match the operation by.
        compression: how the values travel.
        op: Average (also if None), Sum, Adasum, Min, Max or Product.
        prescale_factor, postscale_factor: factors before and after the reduction.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: a rank was lost or shut down, or ranks submitted something else under
            this name; names the ranks.
        ValueError: a tensor or argument that cannot be.
    """
    return _differentiable_all_reduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As `allreduce`, of several tensors."""
    return _differentiable_all_reduce(
        tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set
    )


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts a reduction of sparse tensors; returns a function that waits and returns the result.

    Args:
        tensor: of layout sparse_coo.
        name: what ranks match it by.
        op: Average or Sum.
        process_set: the ranks that take part.
    """
    if _op_of(op) not in (Average, Sum):
        raise ValueError("sparse_allreduce_async takes hvd.Average or hvd.Sum")
    own = tensor.coalesce()
    # Rows are gathered, and one of indices() is a dimension.
    indices = allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(own.values().contiguous(), f"{name}.values", process_set)

    def handle() -> torch.Tensor:
        total = torch.sparse_coo_tensor(
            _wait(indices).t(),
            _wait(values),
            tensor.shape,
            device=tensor.device,
            check_invariants=False,
        ).coalesce()
        return total / (process_set.size() or 1) if op == Average else total

    return handle


# ---- all-gather


def _all_gather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Call:
    return _Call("allgather", _with_rows("allgather", [tensor]), name, process_set)


def _grouped_all_gather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Call:
    return _Call("allgather", _with_rows("allgather", tensors), name, process_set, grouped=True)


@_call(_all_gather, Entry)
def allgather_async() -> None:
    """Starts `allgather`; returns the handle for `synchronize`."""


@_call(_grouped_all_gather, Entry)
def grouped_allgather_async() -> None:
    """Starts an all-gather of several tensors."""


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.process_set = process_set
        values = [tensor.detach().contiguous() for tensor in tensors]
        outputs = tuple(_wait(grouped_allgather_async(values, name, process_set)))
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sums = grouped_allreduce(
            [gradient.contiguous() for gradient in gradients], process_set=ctx.process_set
        )
        rows = torch.tensor([ctx.rows], dtype=torch.int64, device="cpu")
        before = allgather(rows, process_set=ctx.process_set)[: ctx.process_set.rank()].sum(0)
        own = [
            total.narrow(0, int(begin), count)
            for total, begin, count in zip(sums, before, ctx.rows, strict=True)
        ]
        return None, None, *own


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The ranks' tensors, one after the other by the first dimension.  Gradients flow through it.

    Args:
        tensor: of one dimension or more; the first may differ between ranks.
        name: what ranks match the operation by.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError, ValueError: as `allreduce`.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As `allgather`, of several tensors."""
    return list(_apply(_AllGather, name, process_set, *tensors))


# ---- broadcast


def _broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> _Call:
    root = _world.whole(root_rank, "root_rank")
    if root not in _world.coordinator_of(process_set).ranks:
        raise ValueError(f"broadcast from rank {root}, which is not in {process_set}")
    return _Call("broadcast", [tensor], name, process_set, of_request={"root": root})


@_call(_broadcast, Entry)
def broadcast_async() -> None:
    """Starts `broadcast`; returns the handle for `synchronize`."""


@_call(_broadcast, Entry, in_place=True)
def broadcast_async_() -> None:
    """As `broadcast_async`, in place."""


@_call(_broadcast, torch.Tensor, in_place=True)
def broadcast_() -> None:
    """As `broadcast`, in place, without gradients; returns the tensor."""


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return _wait(broadcast_async(tensor.detach().contiguous(), root, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = allreduce(gradient.contiguous(), process_set=ctx.process_set)
        own = total if _world.rank() == ctx.root else torch.zeros_like(total)
        return own, None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of `root_rank`, a global rank.  Gradients flow through it.

    Raises:
        HorovodInternalError, ValueError: as `allreduce`.
    """
    output: torch.Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return output


# ---- all-to-all


def _split_list(splits: Any, rows: int, size: int) -> tuple[int, ...]:
    """How many of the rows go to each of `size` ranks; empty: as many to each."""
    given = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    try:
        values = [_world.whole(value, "a split") for value in ([] if given is None else given)]
    except TypeError:
        raise ValueError(f"splits is a list of integers, not {given!r}") from None
    if not values:
        if rows % size:
            raise ValueError(
                f"the first dimension of the tensor, {rows}, is not a multiple of {size}, the "
                "number of ranks, and there are no splits"
            )
    elif len(values) != size:
        raise ValueError(f"{len(values)} splits for {size} ranks: {values}")
    elif min(values) < 0:
        raise ValueError(f"splits cannot be negative: {values}")
    elif sum(values) != rows:
        raise ValueError(
            f"the splits {values} add up to {sum(values)}, but the first dimension of the tensor "
            f"is {rows}"
        )
    return tuple(values)


def _all_to_all(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> _Call:
    tensors = _with_rows("alltoall", [tensor])
    size = len(_world.coordinator_of(process_set).ranks)
    values = _split_list(splits, tensor.shape[0], size)
    return _Call("alltoall", tensors, name, process_set, of_request={"splits": values})


@_call(_all_to_all, Entry)
def alltoall_async() -> None:
    """Starts `alltoall`; returns the handle for `synchronize`."""


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        entry = alltoall_async(tensor.detach().contiguous(), splits, name, process_set)
        entry.wait()
        ctx.process_set, ctx.received = process_set, entry.received
        if splits is None:
            return entry.outputs[0]
        ctx.mark_non_differentiable(entry.received)
        return entry.outputs[0], entry.received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        entry = alltoall_async(gradient.contiguous(), ctx.received, process_set=ctx.process_set)
        entry.wait()
        return entry.outputs[0], None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of the tensor to each rank, and returns those that came.  Gradients flow through.

    Args:
        tensor: of one dimension or more.
        splits: how many rows each rank gets, integers that add up to all rows; None: as many each.
        name: what ranks match the operation by.
        process_set: the ranks that take part.

    Returns:
        The rows received, in the order of ranks; with `splits` also how many came from each rank.

    Raises:
        HorovodInternalError, ValueError: as `allreduce`.
    """
    return _apply(_AllToAll, tensor, splits, name, process_set)


# ---- reduce-scatter


def _reduce_scatter(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> _Call:
    call = _grouped_reduce_scatter(
        [tensor], name, op, process_set, prescale_factor, postscale_factor
    )
    return replace(call, grouped=False)


def _grouped_reduce_scatter(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> _Call:
    op = _op_of(op)
    if op == Adasum:
        raise NotImplementedError("reducescatter has no Adasum")
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    tensors = _with_rows("reducescatter", tensors)
    return _Call(
        "reducescatter", tensors, name, process_set, True, (), {"op": _OP_NAMES[op], **factors}
    )


@_call(_reduce_scatter, Entry)
def reducescatter_async() -> None:
    """Starts `reducescatter`; returns the handle for `synchronize`."""


@_call(_grouped_reduce_scatter, Entry)
def grouped_reducescatter_async() -> None:
    """Starts a reduce-scatter of several tensors."""


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.op, ctx.process_set, ctx.factor = op, process_set, prescale * postscale
        values = [tensor.detach().contiguous() for tensor in tensors]
        handle = grouped_reducescatter_async(values, name, op, process_set, prescale, postscale)
        return tuple(_wait(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        factor = ctx.factor * (ctx.process_set.size() if ctx.op == Sum else 1)
        scaled = [gradient.contiguous() * factor for gradient in gradients]
        return None, None, None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of all tensors.  Gradients flow through it.

    Rows that are left over when all ranks have as many go to the first ranks, one each.

    Raises:
        HorovodInternalError, ValueError: as `allreduce`.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As `reducescatter`, of several tensors."""
    arguments = name, op, process_set, prescale_factor, postscale_factor
    return _through(compression, tensors, functools.partial(_apply, _ReduceScatter, *arguments))


# ---- ranks that wait


def join(device: int = -1) -> int:
    """This rank has no more data.  Returns when all ranks have joined: the last one's number.

    Until then this rank contributes zeros to the all-reduces of the others; an Average still
    divides by the number of all ranks.  Other operations of the others raise.

    Args:
        device: the GPU on which zeros are made for tensors of GPUs; -1: the current one.  Without
            effect if this rank has used a GPU: then it is that.

    Raises:
        HorovodInternalError: a rank was lost or shut down.
    """
    return _world.coordinator_of(global_process_set).join(device)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have called it.

    Raises:
        HorovodInternalError: a rank was lost or shut down.
    """
    _Call("barrier", (), None, process_set).start().wait()
