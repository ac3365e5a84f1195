"""The collectives of Horovod's API, plain, in place, asynchronous and grouped.

An operation is matched with those of the other ranks by its name.  Without a name it gets one with
a number, so ranks that submit such operations must do so in the same order.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringreduce.horovod import _world
from ringreduce.horovod._compression import Compression, Compressor
from ringreduce.horovod._requests import Entry, Request
from ringreduce.horovod._world import ProcessSet, global_process_set

Tensors = Sequence[torch.Tensor]

# Reduction operations; values as Horovod's, for programs that print or pass numbers.
Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5
_OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_REDUCED = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def _op_of(op: int | None, average: bool | None) -> str:
    if op is not None and average is not None:
        raise ValueError("give op or average, not both")
    if average is not None:
        warnings.warn("average is deprecated: use op", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    op = Average if op is None else _world.whole(op, "op")
    if op not in range(len(_OP_NAMES)):
        raise ValueError(f"no reduction operation {op!r}: use hvd.Average, hvd.Sum, ...")
    return _OP_NAMES[op]


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


def _submit(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    outputs: Tensors = (),
    grouped: bool = False,
    errors: Tensors = (),
    **of_request: Any,
) -> Entry:
    _check(kind, tensors, of_request.get("op", ""))
    if grouped and not tensors:
        raise ValueError(f"a grouped {kind} of no tensors")
    coordinator = _world.coordinator_of(process_set)
    request = Request(
        name=coordinator.next_name(kind) if name is None else f"{kind}.{name}",
        kind=kind,
        dtypes=tuple(tensor.dtype for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        **of_request,
    )
    entry = Entry(request, list(tensors), list(outputs), grouped, errors)
    if request.device == "cuda":
        entry.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        entry.ready.record(torch.cuda.current_stream(tensors[0].device))
    coordinator.submit(entry)
    return entry


def _wait(entry: Entry) -> Any:
    entry.wait()
    if entry.grouped:
        return entry.outputs
    if entry.received is not None:
        return entry.outputs[0], entry.received
    return entry.outputs[0] if entry.outputs else None


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


def _all_reduce(
    tensors: Tensors,
    outputs: Tensors,
    op: str,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool = False,
    codec: str = "",
    errors: Tensors = (),
) -> Entry:
    if op == "Adasum":
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum takes all ranks, not a process set")
        if _world.size() & (_world.size() - 1):
            raise NotImplementedError(
                f"Adasum needs a number of ranks that is a power of 2, not {_world.size()}"
            )
        if not all(tensor.dtype.is_floating_point for tensor in tensors):
            raise ValueError("Adasum is for floating tensors")
    fits = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    return _submit(
        "allreduce",
        tensors,
        name,
        process_set,
        outputs,
        grouped,
        errors if codec and fits else (),
        op=op,
        prescale=float(prescale),
        postscale=float(postscale),
        codec=codec if fits and op in ("Average", "Sum") else "",
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Entry:
    """Starts `allreduce`; returns the handle for `synchronize`.  No gradient flows through it."""
    return _all_reduce(
        [tensor],
        [torch.empty_like(tensor)],
        _op_of(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Entry:
    """As `allreduce_async`; the result replaces the tensor's values."""
    return _all_reduce(
        [tensor],
        [tensor],
        _op_of(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def compressed_allreduce_async_(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet,
    codec: str,
    error: torch.Tensor,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Entry:
    """As `allreduce_async_`, through a codec; `error` receives that of this rank's encoding."""
    return _all_reduce(
        [tensor],
        [tensor],
        _op_of(op, None),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        codec=codec,
        errors=[error],
    )


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
    op_name = _op_of(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]

    def start(values: Tensors, forward: bool) -> Entry:
        return _all_reduce(
            values,
            [torch.empty_like(value) for value in values],
            op_name,
            name if forward else None,
            prescale,
            postscale,
            process_set,
            grouped=True,
            codec=getattr(compression, "codec", ""),
        )

    outputs = _apply(_AllReduce, start, *[tensor for tensor, _ in compressed])
    return [
        compression.decompress(output, ctx)
        for output, (_, ctx) in zip(outputs, compressed, strict=True)
    ]


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


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce`, in place, without gradients; returns the tensor."""
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    output: torch.Tensor = _wait(handle)
    return output


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Entry:
    """Starts an all-reduce of several tensors, which run when all ranks have submitted them all."""
    return _all_reduce(
        tensors,
        [torch.empty_like(tensor) for tensor in tensors],
        _op_of(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Entry:
    """As `grouped_allreduce_async`, in place."""
    return _all_reduce(
        tensors,
        tensors,
        _op_of(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


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


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As `grouped_allreduce`, in place, without gradients."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    outputs: list[torch.Tensor] = _wait(handle)
    return outputs


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
    if _op_of(op, None) not in ("Average", "Sum"):
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


def _gather(tensors: Tensors, name: str | None, process_set: ProcessSet, grouped: bool) -> Entry:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather takes tensors of one dimension or more")
    return _submit("allgather", tensors, name, process_set, (), grouped)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Entry:
    """Starts `allgather`; returns the handle for `synchronize`."""
    return _gather([tensor], name, process_set, grouped=False)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Entry:
    """Starts an all-gather of several tensors."""
    return _gather(tensors, name, process_set, grouped=True)


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


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Entry:
    """Starts `broadcast`; returns the handle for `synchronize`."""
    output = torch.empty_like(tensor)
    return _broadcast(tensor, output, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Entry:
    """As `broadcast_async`, in place."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def _broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Entry:
    root = _world.whole(root_rank, "root_rank")
    if root not in _world.coordinator_of(process_set).ranks:
        raise ValueError(f"broadcast from rank {root}, which is not in {process_set}")
    return _submit("broadcast", [tensor], name, process_set, [output], root=root)


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


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `broadcast`, in place, without gradients; returns the tensor."""
    output: torch.Tensor = _wait(broadcast_async_(tensor, root_rank, name, process_set))
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


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Entry:
    """Starts `alltoall`; returns the handle for `synchronize`."""
    if tensor.dim() == 0:
        raise ValueError("alltoall takes tensors of one dimension or more")
    size = len(_world.coordinator_of(process_set).ranks)
    values = _split_list(splits, tensor.shape[0], size)
    return _submit("alltoall", [tensor], name, process_set, splits=values)


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


def _scatter(
    tensors: Tensors,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    grouped: bool,
) -> Entry:
    op_name = _op_of(op, None)
    if op_name == "Adasum":
        raise NotImplementedError("reducescatter has no Adasum")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter takes tensors of one dimension or more")
    return _submit(
        "reducescatter",
        tensors,
        name,
        process_set,
        (),
        grouped,
        op=op_name,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Entry:
    """Starts `reducescatter`; returns the handle for `synchronize`."""
    return _scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, False)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Entry:
    """Starts a reduce-scatter of several tensors."""
    return _scatter(tensors, name, op, process_set, prescale_factor, postscale_factor, True)


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
    compressed = [compression.compress(tensor) for tensor in tensors]
    outputs = _apply(
        _ReduceScatter,
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        *[tensor for tensor, _ in compressed],
    )
    return [
        compression.decompress(output, ctx)
        for output, (_, ctx) in zip(outputs, compressed, strict=True)
    ]


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
    _submit("barrier", (), None, process_set).wait()
