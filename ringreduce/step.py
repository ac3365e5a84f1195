"""Keeps optimizers from steps with the gradients of a call that failed.

On a GPU `Work.wait()` does not wait on the host.  If a rank is lost, the outputs of the calls that
it was needed for become NaN, and the next call raises.  An optimizer's step between the two would
write NaN into the parameters.  `commit` waits before the step, and raises.  `found_inf` is a flag
on the GPU by which fused optimizers skip the step; the host waits for nothing.
"""

import torch
import torch.distributed as dist

from ringreduce.core.backend import backend_of, existing_group, extension, noting_errors

__all__ = ["commit", "found_inf"]


def commit(group: dist.ProcessGroup | None = None) -> None:
    """Returns once all calls of a group so far have ended on this rank; raises if one failed.

        loss.backward()
        ringreduce.commit()  # raises before anything is written to the parameters
        optimizer.step()

    It waits for asynchronous calls, whether or not their Works were waited for, and on GPUs for the
    current stream too.  Messages (send, recv), and on GPUs the calls that go to NCCL, are waited
    for if their Works were.  The wait ends at the group's timeout, by an abort, by Ctrl-C and with
    the group's failure.  If it raises, the parameters are as before the step.  Ranks may be a step
    apart then: a rank that was lost late may have done its part for some.  So take the state of one
    rank (`broadcast` it in a new group) before the training goes on.

    The host waits for the GPU here, as `loss.item()` does.  `found_inf` needs no wait.

    Args:
        group: a group with a ringreduce backend for CPU or CUDA tensors; or one of another backend
            beside which a ringreduce hook averages gradients: then the hook's calls are meant.
            None for the default group.

    Raises:
        PeerLost, Timeout, Mismatch, Aborted: the group's error.  In a group that goes on after
            losses, a call that needs data of a lost rank raises in its own `wait()` only.
        Timeout: a GPU was busy for longer than the group's timeout.
        TypeError: a group without ringreduce, or one that this rank is not in.
        ValueError: the current stream is captured into a CUDA graph; use `found_inf` there.
        RuntimeError: there is no default group.
    """
    found = existing_group(group, "ringreduce.commit")
    with noting_errors(found):
        extension().commit(backend_of(found))


def found_inf(
    group: dist.ProcessGroup | None = None, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """A flag for fused optimizers: 1 once outputs of the group's calls must not be used.

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.found_inf = ringreduce.found_inf()

    Fused Adam, AdamW, SGD and Adagrad skip their step while it is 1.  Kernels set it in the stream,
    together with the NaN in the output, so no step comes between; in replayed CUDA graphs too.  It
    stays 1, since a group that has failed is over; ask for the flag of the new group.  A group that
    goes on keeps its flag when ranks join.  Optimizers that are not fused refuse the attribute: use
    `commit`.

    `torch.amp.GradScaler` needs no flag to skip steps with NaN in a gradient, and sets and deletes
    the attribute itself.  To add the flag to what it has found, take the maximum: a fused optimizer
    skips its step if the value is exactly 1.

        scaler.unscale_(optimizer)
        for found in scaler._found_inf_per_device(optimizer).values():
            torch.maximum(found, ringreduce.found_inf(), out=found)
        scaler.step(optimizer)

    The flag covers the calls on CUDA tensors with kernels of ringreduce: all_reduce,
    reduce_scatter, all_gather and broadcast, between hosts all_reduce.  It does not cover calls
    that go to NCCL.
    After a Mismatch, calls that had ended before it was found may be wrong without it.  `commit`
    covers both, a Mismatch only on one host.

    Args:
        group: as for `commit`.
        device: a GPU, or the CPU.  None: the current GPU if the process uses CUDA and the group's
            calls there are ringreduce's, else the CPU.  The first use of a GPU in a group takes all
            its ranks, so all must ask for its flag, or none before the first call there.

    Returns:
        A float32 tensor without dimensions on the device; only to be read.  On the CPU it is set
        when a call first raises the group's error, and before its Work tells that it is done.

    Raises:
        ValueError: the group's calls on that device are not ringreduce's.
        TypeError, RuntimeError: as `commit`.
        Timeout, PeerLost, Error: not all ranks came to the first use of the GPU.
    """
    found = existing_group(group, "ringreduce.found_inf")
    if device is None:
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = "cuda" if uses_cuda and backend_of(found, "cuda") is not None else "cpu"
    where = torch.device(device)
    backend = backend_of(found, where.type) if where.type in ("cpu", "cuda") else None
    if backend is None:
        raise ValueError(
            f"ringreduce.found_inf: the calls of this group on {where.type} tensors are not "
            "ringreduce's"
        )
    if where == torch.device("cuda"):  # without a number
        where = torch.device("cuda", torch.cuda.current_device())
    with noting_errors(found):
        flag: torch.Tensor = extension().found_inf(backend, where)
    return flag
