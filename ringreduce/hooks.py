"""DDP communication hooks.

`register_comm_hook` is the fast way: the hook is C++, and no bucket waits for the interpreter's
lock.  The hooks of this module are the same in Python, for `ddp_model.register_comm_hook`.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringreduce._backend import backend_of, extension, ringreduce_group

__all__ = ["all_reduce_hook", "register_comm_hook"]


def register_comm_hook(ddp_model: DistributedDataParallel) -> None:
    """Averages the gradients of a DDP model by ringreduce, whatever the backend of its group.

    On a model whose group is not ringreduce's (gloo, nccl), a ringreduce group over the same ranks
    is made beside it.  Call it on all ranks, once, before the first backward.

    Args:
        ddp_model: a DistributedDataParallel on CPU parameters, of any floating dtypes.

    Raises:
        TypeError: not a DistributedDataParallel model.
        RuntimeError: the model has a hook already, or compiled autograd's Python reducer, which
            ignores C++ hooks.
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
            "ddp_model.register_comm_hook(None, ringreduce.hooks.all_reduce_hook), or another "
            "optimize_ddp"
        )
    group = ringreduce_group(ddp_model.process_group)
    extension().register_comm_hook(ddp_model.reducer, backend_of(group))
    if ddp_model.logger is not None:
        ddp_model.logger._set_comm_hook_name("ringreduce_all_reduce")


def all_reduce_hook(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP insists on this very annotation
) -> torch.futures.Future[torch.Tensor]:
    """Averages one bucket: `ddp_model.register_comm_hook(None, ringreduce.hooks.all_reduce_hook)`.

    Args:
        state: the group to average over; None for the default group.  If it is not ringreduce's, a
            ringreduce group over the same ranks is made at the first bucket.
        bucket: one dense floating-point buffer in CPU memory, averaged in place.

    Returns:
        A Future of the bucket's buffer.

    Raises:
        PeerLost, Timeout, Mismatch, Aborted: by the Future, in DDP's backward.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    extension().average_bucket(backend_of(ringreduce_group(state)), bucket, future)
    return future
