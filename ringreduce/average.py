"""Gradient averaging for training loops without DDP."""

import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from ringreduce.core.backend import (
    backend_of,
    devices_text,
    extension,
    noting_errors,
    ringreduce_group,
)
from ringreduce.errors import Mismatch

# Gradients of this size are averaged where they are.  Smaller ones are copied into buckets, which
# are as large as DDP's.
LARGE_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.complex32,
)

_Kind = tuple[torch.dtype, torch.device]
# The memory of each group's buckets, by kind and number.
_memory: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[_Kind, int], torch.Tensor]]
_memory = weakref.WeakKeyDictionary()


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups small gradients of one dtype and device, in order, in lists of about BUCKET_BYTES."""
    buckets: dict[_Kind, list[torch.Tensor]] = {}
    sizes: dict[_Kind, int] = {}
    for gradient in gradients:
        if gradient.is_sparse or gradient.nbytes >= LARGE_BYTES:
            yield [gradient]
            continue
        kind = gradient.dtype, gradient.device
        buckets.setdefault(kind, []).append(gradient)
        sizes[kind] = sizes.get(kind, 0) + gradient.nbytes
        if sizes[kind] >= BUCKET_BYTES:
            yield buckets.pop(kind)
            del sizes[kind]
    yield from buckets.values()


def _has_own_elements(gradient: torch.Tensor) -> bool:
    """Whether each element has a place of its own, which no lazy conjugation or sign changes."""
    if gradient.is_conj() or gradient.is_neg():
        return False
    reach = 0  # of the elements, in those dimensions that have been looked at
    for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _writable(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's gradient as real numbers that can be written.

    A gradient whose elements share memory, such as an expanded one, is replaced by a copy.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout == torch.strided and gradient.numel() and not _has_own_elements(gradient):
        gradient = (
            gradient.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        )
        parameter.grad = gradient
    if gradient.is_complex() and gradient.layout == torch.strided:
        return torch.view_as_real(gradient)
    return gradient


def start_average(gradient: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """An average in place.  dist.all_reduce takes no sparse complex numbers.

    Returns:
        The work.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = True
    return group.allreduce([gradient], options)


def _flat(bucket: list[torch.Tensor], group: dist.ProcessGroup, number: int) -> torch.Tensor:
    """The elements of a bucket, in memory that is kept for the next step.

    On a host the ranks share it, where they can.
    """
    kept = _memory.setdefault(group, {})
    place = (bucket[0].dtype, bucket[0].device), number
    elements = sum(gradient.numel() for gradient in bucket)
    if place not in kept or kept[place].numel() != elements:
        kept.pop(place, None)  # the memory may serve again
        dtype, device = place[0]
        backend = backend_of(group)
        assert backend is not None
        kept[place] = backend.allocate_tensor(elements, dtype=dtype, device=device)
    return torch.cat([gradient.reshape(-1) for gradient in bucket], out=kept[place])


def meeting_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors lie by which ranks of a group agree.

    Returns:
        The CPU, or the current GPU if the group takes no tensors on CPUs.
    """
    if "cpu" in {device.type for device in group._device_types}:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def ranks_that_differ(number: int, group: dist.ProcessGroup) -> list[int]:
    """Compares a number among the ranks of a group; collective.

    Returns:
        The ranks whose number is not that of most, the same on all; of two numbers as frequent
        that of the lowest rank holds.
    """
    device = meeting_device(group)
    # The greatest and the least, in one call that goes on without lost ranks.
    ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if ends[0].item() == -ends[1].item():
        return []
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    return odd_ones(dict(zip(ranks, (int(value) for value in gathered), strict=True)))


def odd_ones(numbers: dict[int, int]) -> list[int]:
    """Finds who differs among numbers that are to be the same.

    Args:
        numbers: by rank.

    Returns:
        The ranks whose number is not that of most; of two as frequent the lowest rank's holds.
    """
    values = [numbers[rank] for rank in sorted(numbers)]
    right = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return [rank for rank in sorted(numbers) if numbers[rank] != right]


def _require_same(signature: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Raises Mismatch, on all ranks alike, unless all have the same signature."""
    # Hashes of whole numbers, and of tuples of them, are the same in every process.
    odd = ranks_that_differ(hash(signature), group)
    if odd:
        raise Mismatch(
            f"average_gradients: of ranks {dist.get_process_group_ranks(group)}, {odd} have "
            "gradients of other parameters, shapes or dtypes than the others; nothing was averaged"
        )


@torch.no_grad()
def average_gradients(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replaces each parameter's gradient by its average over the group's ranks.

    Call it on all ranks after backward and before the optimizer's step.  Gradients of 1 MiB or more
    are averaged where they are, and smaller ones of one dtype in buckets, so that many small
    parameters cost little.  Parameters whose `.grad` is None are left out; they must be the same on
    all ranks.

    Args:
        model: its `.parameters()` have gradients of floating or complex dtypes, dense or sparse in
            COO layout, in CPU memory or, where ringreduce was built with CUDA, on GPUs.  A dense
            gradient whose elements share memory (an expanded one) is replaced by a copy.
        group: the ranks to average over; None for the default group.  If it is not ringreduce's, a
            ringreduce group over the same ranks is made once.

    Raises:
        ValueError: a gradient of another layout or dtype, or on another device.
        Mismatch: the ranks have gradients of different parameters, shapes, dtypes or layouts.
        PeerLost, Timeout, Aborted: see `ringreduce.errors`.
    """
    parameters = []
    signature: list[int] = []
    devices = ("cpu", "cuda") if extension().cuda_build() else ("cpu",)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        gradient = parameter.grad
        if gradient is None:
            continue
        if (
            gradient.layout not in (torch.strided, torch.sparse_coo)
            or gradient.device.type not in devices
            or gradient.dtype not in _DTYPES
            or (gradient.is_sparse and gradient.dtype == torch.complex32)  # torch adds none
        ):
            raise ValueError(
                "average_gradients takes dense gradients, and sparse ones in COO layout, of "
                "float32, float64, float16, bfloat16, complex64, complex128 or complex32 (dense) "
                f"on {devices_text()}; that of {name} is {gradient.layout}, {gradient.dtype}, on "
                f"{gradient.device}"
            )
        parameters.append(parameter)
        signature += [index, _DTYPES.index(gradient.dtype), *gradient.shape, -1]
        signature += [devices.index(gradient.device.type), gradient.sparse_dim()]

    group = ringreduce_group(group, call=True)
    with noting_errors(group):
        _require_same(tuple(signature), group)
        gradients = [_writable(parameter) for parameter in parameters]
        pending = []
        for number, bucket in enumerate(_buckets(gradients)):
            flat = bucket[0] if len(bucket) == 1 else _flat(bucket, group, number)
            pending.append((bucket, flat, start_average(flat, group)))
        for bucket, flat, work in pending:
            work.wait()
            if len(bucket) == 1:
                continue
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            torch._foreach_copy_(
                bucket, [part.view(g.shape) for part, g in zip(parts, bucket, strict=True)]
            )
