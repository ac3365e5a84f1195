"""Gradient averaging for training loops without DDP."""

import torch
import torch.distributed as dist

from ringreduce._backend import devices_text, extension, noting_errors, ringreduce_group
from ringreduce.errors import Mismatch

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _meeting_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors lie by which ranks agree: the CPU, unless the group takes none there."""
    if "cpu" in {device.type for device in group._device_types}:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _require_same(signature: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Raises Mismatch, on all ranks alike, unless all have the same signature."""
    # Hashes of whole numbers, and of tuples of them, are the same in every process.
    device = _meeting_device(group)
    number = hash(signature)
    # The greatest and the least, in one call that goes on without lost ranks.
    ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if ends[0].item() == -ends[1].item():
        return
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    values = [value.item() for value in gathered]
    # The most frequent is right, and of two as frequent the one of the lowest rank.
    right = max(values, key=lambda value: (values.count(value), -values.index(value)))
    ranks = dist.get_process_group_ranks(group)
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != right]
    if odd:
        raise Mismatch(
            f"average_gradients: of ranks {ranks}, {odd} have gradients of other parameters, "
            "shapes or dtypes than the others; nothing was averaged"
        )


@torch.no_grad()
def average_gradients(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replaces each parameter's gradient by its average over the group's ranks.

    Call it on all ranks after backward and before the optimizer's step.  Large gradients are
    averaged where they are, and small ones of one dtype in buckets, so that many small parameters
    cost little.  Parameters whose `.grad` is None are left out; they must be the same on all ranks.

    Args:
        model: its `.parameters()` have dense gradients of floating dtypes, in CPU memory or, where
            ringreduce was built with CUDA, on GPUs.
        group: the ranks to average over; None for the default group.  If it is not ringreduce's, a
            ringreduce group over the same ranks is made once.

    Raises:
        ValueError: a gradient that is sparse, of another dtype, or on another device.
        Mismatch: the ranks have gradients of different parameters, shapes or dtypes.
        PeerLost, Timeout, Aborted: see `ringreduce.errors`.
    """
    gradients = []
    signature: list[int] = []
    devices = ("cpu", "cuda") if extension().cuda_build() else ("cpu",)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        gradient = parameter.grad
        if gradient is None:
            continue
        if (
            gradient.layout != torch.strided
            or gradient.device.type not in devices
            or gradient.dtype not in _DTYPES
        ):
            raise ValueError(
                "average_gradients takes dense gradients of float32, float64, float16 or bfloat16 "
                f"on {devices_text()}; that of {name} is {gradient.layout}, {gradient.dtype}, on "
                f"{gradient.device}"
            )
        gradients.append(gradient)
        signature += [index, _DTYPES.index(gradient.dtype), *gradient.shape, -1]
        signature.append(devices.index(gradient.device.type))

    group = ringreduce_group(group, call=True)
    with noting_errors(group):
        _require_same(tuple(signature), group)
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        options.asyncOp = False
        for kind in dict.fromkeys((g.device, g.dtype) for g in gradients):
            some = [g for g in gradients if (g.device, g.dtype) == kind]
            group.allreduce_coalesced(some, options).wait()
