"""Which backend takes the calls on CUDA tensors that ringreduce's kernels do not perform.

torch's NCCL backend, where it can start; else None, and they go through the host's memory.  All
ranks must come to the same answer, and a send may be the first call of two of them, when the others
are far away: so each rank leaves what it knows of its GPUs in the group's store when the group is
made, and the answer is a function of what all have left there.
"""

import ctypes
import datetime
import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

# The first NCCL that takes several ranks on one GPU, and the switch for it.
SHARING_NCCL = (2, 30)
SHARING_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
OTHER = "RINGREDUCE_CUDA_OTHER"

Version = tuple[int, ...]


@functools.cache
def _host() -> str:
    """Names this host, as hostId() of csrc/bootstrap/process.cc does: by kernel and network.

    RINGREDUCE_HOSTID lets processes of one host pass for several.
    """
    if posed := os.environ.get("RINGREDUCE_HOSTID"):
        return posed
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot + os.readlink("/proc/self/ns/net")


def loaded_nccl() -> Version | None:
    """The version of the NCCL that calls of this process reach, None if there is none.

    torch.cuda.nccl.version() tells what torch was compiled with; LD_PRELOAD brings another.
    """
    for name, mode in ((None, ctypes.DEFAULT_MODE), ("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)):
        number = ctypes.c_int()
        try:
            # A preloaded library is among the process' own symbols; torch's is loaded beside them.
            status = ctypes.CDLL(name, mode=mode).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        if status == 0:
            value = number.value
            return value // 10000, value // 100 % 100, value % 100
    return None


def facts() -> str:
    """What a rank tells the others, as JSON.  Makes no CUDA context."""
    nccl = dist.is_nccl_available()
    version = (loaded_nccl() if nccl else None) or (0,)
    return json.dumps(
        {
            "host": _host(),
            "gpus": torch.cuda.device_count(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "nccl": nccl,
            "shares": os.environ.get(SHARING_SWITCH) == "1" and version >= SHARING_NCCL,
            "other": os.environ.get(OTHER, "auto"),
        }
    )


def why_not_nccl(ranks: list[dict[str, Any]]) -> str:
    """Why NCCL cannot take a group's calls, "" if it can.

    Args:
        ranks: what `facts` said on each rank.

    Raises:
        ValueError: rank 0 asked for another than there are.
    """
    wanted = ranks[0]["other"]
    if wanted not in ("auto", "nccl", "host"):
        raise ValueError(f"{OTHER}={wanted} is none of auto, nccl and host")
    if wanted == "host":
        return f"{OTHER}=host"
    if wanted == "nccl":
        return ""
    for rank, rank_facts in enumerate(ranks):
        if not rank_facts["nccl"]:
            return f"rank {rank} has a torch without NCCL"
        if rank_facts["gpus"] == 0:
            return f"rank {rank} has no GPU"
    for host in {r["host"] for r in ranks}:
        here = [r for r in ranks if r["host"] == host]
        # Ranks that see the same devices see them all; else each was given some of its own.
        gpus = sum({r["visible"]: r["gpus"] for r in here}.values())
        if len(here) > gpus and not all(r["shares"] for r in here):
            return (
                f"{len(here)} ranks of one host share {gpus} GPUs, which NCCL takes since "
                f"{'.'.join(map(str, SHARING_NCCL))} and with {SHARING_SWITCH}=1"
            )
    return ""


def make_inner(timeout: datetime.timedelta, store: Store, rank: int, size: int) -> Any:
    """An NCCL backend over a group's ranks, or None where NCCL cannot start.

    Args:
        timeout: of its operations.
        store: the group's, where every rank has left its `facts`.
        rank: in the group.
        size: the group's world size.
    """
    told = [json.loads(store.get(f"ringreduce/gpus/{r}")) for r in range(size)]
    if why_not_nccl(told):
        return None
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(PrefixStore("ringreduce/nccl", store), rank, size, options)
