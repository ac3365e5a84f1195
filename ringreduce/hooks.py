"""DDP communication hooks.

`register_comm_hook` is the fast way: the hook is C++, and no bucket waits for the interpreter's
lock.  The hooks of this module are the same in Python, for `ddp_model.register_comm_hook`.
"""

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringreduce.compression import CompressionState, Exact
from ringreduce.core.backend import (
    backend_of,
    devices_text,
    extension,
    group_for_bucket,
    noting_errors,
    ringreduce_group,
)

__all__ = ["CompressionState", "allreduce_hook", "compressed", "register_comm_hook"]

# The models with our hook, and the states of those with a codec.
_states: weakref.WeakKeyDictionary[DistributedDataParallel, CompressionState | None] = (
    weakref.WeakKeyDictionary()
)


if not TYPE_CHECKING:  # a type checker would take every name for one of this module

    def __getattr__(name: str) -> Any:
        """An older name of `allreduce_hook`."""
        if name != "all_reduce_hook":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _warn_of_old_name()
        return allreduce_hook


@functools.cache  # once in a process
def _warn_of_old_name() -> None:
    text = "ringreduce.hooks.all_reduce_hook is deprecated: use allreduce_hook"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def hooked_models() -> dict[DistributedDataParallel, CompressionState | None]:
    """The models that have our hook and live, and the states of those with a codec."""
    return dict(_states)


def attach(ddp_model: DistributedDataParallel, state: CompressionState | None) -> None:
    """Gives the model's reducer our hook."""
    group = ringreduce_group(ddp_model.process_group)
    if state is None:
        extension().register_comm_hook(ddp_model.reducer, backend_of(group), group)
    else:
        state._state.register(ddp_model.reducer, backend_of(group), group)
    if ddp_model.logger is not None:
        name = "ringreduce_all_reduce" if state is None else f"ringreduce_{state.codec}"
        ddp_model.logger._set_comm_hook_name(name)


@overload
def register_comm_hook(ddp_model: DistributedDataParallel) -> None: ...
@overload
def register_comm_hook(
    ddp_model: DistributedDataParallel,
    codec: str | CompressionState,
    error_feedback: bool = True,
    start_after: int = 0,
    exact: Exact | None = None,
    schedule: str = "auto",
    stochastic: bool = False,
    seed: int = 0,
) -> CompressionState: ...
def register_comm_hook(
    ddp_model: DistributedDataParallel,
    codec: str | CompressionState | None = None,
    error_feedback: bool = True,
    start_after: int = 0,
    exact: Exact | None = None,
    schedule: str = "auto",
    stochastic: bool = False,
    seed: int = 0,
) -> CompressionState | None:
    """Averages the gradients of a DDP model by ringreduce, whatever the backend of its group.

    On a model whose group is not ringreduce's (gloo, nccl), a ringreduce group over the same ranks
    is made beside it.  Call it on all ranks, once, before the first backward.

    Args:
        ddp_model: a DistributedDataParallel whose parameters, of any floating dtypes, are on the
            CPU or, where ringreduce was built with CUDA, on one GPU.  Gradients may be sparse, and
            then travel exactly.
        codec: how gradients travel: None for exactly, or as `CompressionState` has it; or a
            CompressionState of the same model, as in `register_comm_hook(ddp_model, state)`: a new
            one, or that of an earlier DDP to go on with.
        error_feedback, start_after, exact, schedule, stochastic, seed: as `CompressionState` has
            them; the same on all ranks.

    Returns:
        None if gradients travel exactly, else the state, whose `state_dict` belongs into
        checkpoints.

    Raises:
        TypeError: not a DistributedDataParallel model; TypeError and ValueError of
            `CompressionState`.
        ValueError: parameters on a device that this build does not know; settings beside a state,
            which has its own, or without a codec; a state of another model.
        RuntimeError: the model has a hook already, or compiled autograd's Python reducer, which
            ignores C++ hooks.
        Mismatch: ranks gave different codecs, settings or models.
        Timeout, PeerLost, Error: the group could not be made; names the ranks.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"register_comm_hook takes a DistributedDataParallel model, not "
            f"{type(ddp_model).__name__}"
        )
    if ddp_model._use_python_reducer:
        raise RuntimeError(
            "this model uses DDP's Python reducer (torch._dynamo.config.optimize_ddp = "
            '"python_reducer"), which ignores C++ hooks; use '
            "ddp_model.register_comm_hook(None, ringreduce.hooks.allreduce_hook), or another "
            "optimize_ddp"
        )
    if ddp_model.device_type != "cpu" and not (
        ddp_model.device_type == "cuda" and extension().cuda_build()
    ):
        raise ValueError(
            f"this ringreduce averages gradients on {devices_text()}, and the model's parameters "
            f"are on {ddp_model.device_type}"
        )
    state: CompressionState | None = None
    settings: dict[str, Any] = {
        "error_feedback": error_feedback,
        "start_after": start_after,
        "exact": exact,
        "schedule": schedule,
        "stochastic": stochastic,
        "seed": seed,
    }
    if codec is None or isinstance(codec, CompressionState):
        known = inspect.signature(register_comm_hook).parameters
        given = [name for name, value in settings.items() if value != known[name].default]
        if given:
            why = (
                "a CompressionState has its own"
                if codec
                else "gradients without a codec go exactly"
            )
            raise ValueError(f"{', '.join(given)} cannot be set here: {why}")
    if isinstance(codec, CompressionState):
        state = codec
        state._require_parameters_of(ddp_model)
    elif codec is not None:
        state = CompressionState(ddp_model, codec, **settings)
    _states[ddp_model] = state
    if state is not None:
        state.process_group = ddp_model.process_group
        state._agree(ringreduce_group(ddp_model.process_group))
    attach(ddp_model, state)
    return state


def _average(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    start: Callable[[Any, Any, Any], Any],
) -> torch.futures.Future[torch.Tensor]:
    """Starts the average of a bucket."""
    found = group_for_bucket(group, bucket)
    with noting_errors(found):
        work = start(backend_of(found), bucket, found)
        average: torch.futures.Future[torch.Tensor] = work.get_future()
    return average


def allreduce_hook(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP insists on this very annotation
) -> torch.futures.Future[torch.Tensor]:
    """Averages one bucket: `ddp_model.register_comm_hook(None, ringreduce.hooks.allreduce_hook)`.

    Args:
        state: the group to average over; None for the default group.  If it is not ringreduce's, a
            ringreduce group over the same ranks is made at the first bucket.
        bucket: one buffer of floating-point numbers, or one sparse gradient, averaged in place.

    Returns:
        A Future of the bucket's buffer.

    Raises:
        PeerLost, Timeout, Mismatch, Aborted: by the Future, in DDP's backward.
    """
    return _average(state, bucket, extension().average_bucket)


def compressed(
    state: CompressionState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages one bucket as `state` has it.

    `ddp_model.register_comm_hook(state, ringreduce.hooks.compressed)`; the faster way is
    `ringreduce.register_comm_hook(ddp_model, codec=...)`.

    Args:
        state: made of the model whose bucket this is.
        bucket: one buffer, averaged in place.  A sparse gradient travels exactly.

    Returns:
        A Future of the bucket's buffer.

    Raises:
        TypeError: not such a state.
        ValueError: a bucket of another model, or on a GPU where ringreduce was built without CUDA.
        PeerLost, Timeout, Mismatch, Aborted: by the Future, in DDP's backward.
    """
    if not isinstance(state, CompressionState):
        raise TypeError(
            "the hook compressed takes a ringreduce.CompressionState as its state, not "
            f"{type(state).__name__}"
        )
    return _average(state.process_group, bucket, state._state.average_bucket)
