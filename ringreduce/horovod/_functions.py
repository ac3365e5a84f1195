"""Sends parameters, optimizer states and Python objects from one rank to the others."""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ringreduce.horovod import _world
from ringreduce.horovod._operations import (
    allgather,
    broadcast_,
    broadcast_async_,
    synchronize,
)
from ringreduce.horovod._world import ProcessSet, global_process_set

__all__ = [
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
]  # fmt: skip

try:  # which also takes lambdas and classes of __main__, as Horovod's does
    import cloudpickle as pickler  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:
    pickler = pickle


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Replaces the ranks' parameters by those of `root_rank`.

    Args:
        params: a state dict, or a list of tensors or of (name, tensor), such as
            `model.state_dict()` or `list(model.named_parameters())`.  Values that are no tensors
            are left alone.

    Raises:
        ValueError: something else.
        HorovodInternalError: as `allreduce`.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(
            f"broadcast_parameters takes a dict or a list, not {type(params).__name__}"
        )
    sent = []
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            continue
        tensor = value.detach()
        for d in range(tensor.dim()):  # what expand() repeats is there once
            if tensor.stride(d) == 0 and tensor.shape[d] > 1:
                tensor = tensor.narrow(d, 0, 1)
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        sent.append((tensor, dense, broadcast_async_(dense, root_rank, name)))
    for tensor, dense, handle in sent:
        synchronize(handle)
        if dense is not tensor:
            tensor.copy_(dense)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Replaces the ranks' optimizer state, learning rates and other options by those of a rank.

    A rank whose optimizer has no state yet, as in a process that joins, gets all of it.  As after
    Horovod's, its parameters have gradients then: zeros, where they had none.

    Args:
        optimizer: the same on all ranks; one of `DistributedOptimizer` too.
        root_rank: whose state is sent.
        model: names the embeddings with sparse gradients, for an SGD.

    Raises:
        ValueError: an LBFGS, whose state Horovod cannot send either.
        HorovodInternalError: as `allreduce`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS has no fixed form, so it cannot be broadcast")
    if not optimizer.state:
        _make_gradients(optimizer, model)
    is_root = _world.rank() == root_rank
    tensors: list[torch.Tensor] = []

    def left_out(tensor: torch.Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(tensor.shape, tensor.dtype, tensor.device.type)

    def new(place: _Place) -> torch.Tensor:
        tensors.append(torch.empty(place.shape, dtype=place.dtype, device=place.device))
        return tensors[-1]

    own = tree_map_only(torch.Tensor, left_out, optimizer.state_dict()) if is_root else None
    theirs = broadcast_object(own, root_rank)
    state: Any = None if is_root else tree_map_only(_Place, new, theirs)
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


@dataclass
class _Place:
    """Where a tensor was in a state that is sent."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def _make_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Zeros for parameters without a gradient."""
    sparse = {
        module.weight
        for module in (model.modules() if model else ())
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None or not p.requires_grad:
                continue
            p.grad = torch.zeros_like(p)
            if isinstance(optimizer, torch.optim.SparseAdam) or (
                p in sparse and isinstance(optimizer, torch.optim.SGD)
            ):
                p.grad = p.grad.to_sparse()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of `root_rank`, on all ranks.

    Args:
        obj: what pickle takes, or cloudpickle where it is installed; only the root's matters.
        root_rank: a global rank.
        name: what ranks match the operation by.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError, ValueError: as `allreduce`.
    """
    is_root = _world.rank() == root_rank
    data = torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8) if is_root else None
    # Devices are named, since torch.set_default_device holds for tensors without one.
    size = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64, device="cpu")
    broadcast_(size, root_rank, name and f"{name}.sz", process_set)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, name and f"{name}.t", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in their order.

    Args:
        obj: what pickle takes, or cloudpickle where it is installed.
        name: what ranks match the operation by.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError, ValueError: as `allreduce`.
    """
    data = torch.frombuffer(bytearray(pickler.dumps(obj)), dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    sizes = allgather(size, name and f"{name}.sz", process_set).tolist()
    everything = allgather(data, name and f"{name}.t", process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(everything, sizes)]
