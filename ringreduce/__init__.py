"""Bucketed ring all-reduce for PyTorch: a torch.distributed backend and a DDP hook.

What there is, in a line each:

    dist.init_process_group("ringreduce")        # as a backend, no import needed
    ringreduce.register_comm_hook(ddp_model)     # as a hook, beside gloo or nccl
    ringreduce.average_gradients(model)          # in a loop without DDP
    ringreduce.DiLoCo(model, optimizer)          # sites that meet once in many steps
    ringreduce.init()                            # as a backend, under torchrun, mpirun or srun
    ringreduce.set_default("cpu")                # for groups that name no backend
    ringreduce.commit()                          # before a step that no lost rank may spoil
    ringreduce.dump_records("dumps")             # what each rank did, for ringreduce.recorder
    ringreduce.timeline("traces")                # a trace of what all ranks did
    ringreduce.prometheus()                      # counts for /metrics
"""

import importlib.metadata

import torch.distributed as dist

import _ringreduce_autoload
from _ringreduce_autoload import replaces, set_default
from ringreduce import hooks, topology
from ringreduce.average import average_gradients
from ringreduce.compression import CompressionState
from ringreduce.core.backend import Options, backend_of, extension, ringreduce_group
from ringreduce.diloco import DiLoCo
from ringreduce.errors import Aborted, Error, Mismatch, PeerLost, Timeout
from ringreduce.hooks import register_comm_hook
from ringreduce.launch import Launch, init
from ringreduce.memory import empty, share_, zeros
from ringreduce.observe import (
    Record,
    dump_records,
    messages,
    prometheus,
    records,
    straggler_detection,
    tensorboard,
)
from ringreduce.step import commit, found_inf
from ringreduce.timeline import timeline

__all__ = [
    "Aborted",
    "CompressionState",
    "DiLoCo",
    "Error",
    "Launch",
    "Mismatch",
    "Options",
    "PeerLost",
    "Record",
    "Timeout",
    "average_gradients",
    "commit",
    "dump_records",
    "empty",
    "found_inf",
    "gpu_bytes",
    "hooks",
    "init",
    "instruction_set",
    "live_ranks",
    "messages",
    "prometheus",
    "records",
    "register_comm_hook",
    "replaces",
    "set_default",
    "share_",
    "staging_bytes",
    "straggler_detection",
    "tensorboard",
    "timeline",
    "topology",
    "zeros",
]

_ringreduce_autoload.register()

__version__ = importlib.metadata.version("ringreduce")


def staging_bytes(group: dist.ProcessGroup | None = None) -> int:
    """Bytes of shared memory that this rank owns for a group: an upper bound of what it uses.

    Args:
        group: a ringreduce group, or another, beside which one is made if there is none; None for
            the default group.

    Returns:
        Bytes, on this rank.

    Raises:
        TypeError: not a group, or one that this rank is not in.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: the group beside it could not be made.
    """
    size: int = extension().staging_bytes(backend_of(ringreduce_group(group, again=False)))
    return size


def gpu_bytes(group: dist.ProcessGroup | None = None) -> int:
    """Bytes of GPU memory that this rank holds for a group's calls on CUDA tensors; 0 before them.

    Args:
        group: as for `staging_bytes`.

    Returns:
        Bytes, on this rank.

    Raises:
        TypeError, RuntimeError, Timeout, PeerLost, Error: as for `staging_bytes`.
    """
    size: int = extension().gpu_bytes(backend_of(ringreduce_group(group, again=False)))
    return size


def live_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks of a group, by their numbers in it, that operations still include.

    In a group with on_loss="continue" ranks that are lost or have left are missing.  Ranks may
    notice a loss at different moments.

    Args:
        group: as for `staging_bytes`.

    Returns:
        Their numbers, ascending.

    Raises:
        TypeError, RuntimeError, Timeout, PeerLost, Error: as for `staging_bytes`.
    """
    ranks: list[int] = extension().live_ranks(backend_of(ringreduce_group(group, again=False)))
    return ranks


def instruction_set() -> str:
    """The instruction set that the reduction kernels use on this machine.

    Returns:
        Its name, such as "x86-64-v4".
    """
    name: str = extension().instruction_set()
    return name
