"""Tensors in memory that the ranks of a host share."""

from collections.abc import Sequence
from typing import Any

import torch

from ringreduce.core.backend import extension


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor in memory that the other ranks of this host can map.

    If all ranks of a group on one host pass such tensors of 64 KiB or more, `all_reduce`, `reduce`
    and `broadcast` use them where they are, without the copies into and out of the group's own
    memory.  `all_gather`, `reduce_scatter` and `all_to_all_single` without split sizes do so if the
    inputs of all ranks are such tensors; those of a `reduce_scatter` from a list must be
    consecutive parts of one.  The call and its bits stay the same.  Other tensors, calls and groups
    work as before.

    Each rank makes its own; no rank waits for another.  The memory belongs to the tensor, not to a
    group; a tensor that grows moves to ordinary memory.  Keep such tensors: the first call with new
    ones maps them on all ranks, and each takes a file descriptor.  A forked child cannot change
    them, but may see what the parent writes later, and zeros after the parent has freed them.

    Args:
        size: the shape, as for `torch.empty`.
        dtype: None for torch's default.

    Returns:
        A contiguous tensor.  Its elements are zero for now, since the system hands out such memory;
        code that needs zeros says `zeros`.

    Raises:
        ValueError: a negative size.
        Error: the system has no memory, or the process no file descriptor left.
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if any(n < 0 for n in torch.Size(shape)):
        raise ValueError(f"a tensor of ringreduce cannot have the shape {tuple(shape)}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor: torch.Tensor = extension().shared_tensor(torch.Size(shape), dtype)
    return tensor


def zeros(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor of zeros in memory as that of `empty`.

    Args:
        size: the shape, as for `torch.zeros`.
        dtype: None for torch's default.

    Returns:
        A contiguous tensor.

    Raises:
        ValueError, Error: as for `empty`.
    """
    return empty(*size, dtype=dtype)


@torch.no_grad()
def share_(tensor: torch.Tensor) -> torch.Tensor:
    """Moves a tensor into memory as that of `empty`, and returns it.

    Other tensors that view the same memory do not move with it: share a model's parameters before
    anything views them, for example before DistributedDataParallel is made.

    Args:
        tensor: dense, on the CPU, of any shape and dtype; a Parameter too.  It becomes contiguous.

    Returns:
        The tensor that was given.

    Raises:
        ValueError: a tensor that is sparse, quantized or on another device.
        Error: as for `empty`.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ValueError(
            "ringreduce.share_ takes dense tensors on the CPU that are not quantized, not one of "
            f"{tensor.dtype} that is {tensor.layout} on {tensor.device}"
        )
    tensor.data = empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor
