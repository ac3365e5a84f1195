"""Gradient averaging for training loops without DDP."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from ringreduce._backend import ringreduce_group

# The size of DDP's buckets: large enough to be fast, small enough to overlap with the copies.
BUCKET_BYTES = 25 << 20


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups gradients of one dtype, in their order, into lists of about BUCKET_BYTES."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        bucket = open_buckets.setdefault(gradient.dtype, [])
        bucket.append(gradient)
        if sum(g.nbytes for g in bucket) >= BUCKET_BYTES:
            yield open_buckets.pop(gradient.dtype)
    yield from open_buckets.values()


@torch.no_grad()
def average_gradients(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replaces each parameter's gradient by its average over the group's ranks.

    Call it on all ranks after backward and before the optimizer's step.  Gradients are packed
    into buckets of 25 MiB, one dtype each, so that many small parameters cost little.  Parameters
    whose `.grad` is None are left out; they must be the same on all ranks.

    Args:
        model: its `.parameters()` have dense gradients in CPU memory, of any floating dtypes.
        group: the ranks to average over; None for the default group.  If it is not ringreduce's, a
            ringreduce group over the same ranks is made once.

    Raises:
        ValueError: a sparse gradient, or one that is not in CPU memory.
        Mismatch: the ranks' gradients differ in number, shape or dtype.
        PeerLost, Timeout, Aborted: see `ringreduce.errors`.
    """
    gradients = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided or gradient.device.type != "cpu":
            raise ValueError(
                f"average_gradients takes dense gradients in CPU memory; that of {name} is "
                f"{gradient.layout} on {gradient.device}"
            )
        gradients.append(gradient)

    group = ringreduce_group(group)
    if not gradients:  # still meets the others, who get a Mismatch if they have some
        dist.all_reduce(torch.empty(0), op=dist.ReduceOp.AVG, group=group)
    pending = []
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group, async_op=True)
        pending.append((bucket, flat, work))
    for bucket, flat, work in pending:
        work.wait()
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        torch._foreach_copy_(
            bucket, [part.view(g.shape) for part, g in zip(parts, bucket, strict=True)]
        )
