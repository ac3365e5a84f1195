"""Which backend takes the calls on CUDA tensors that ringreduce's kernels do not perform.

torch's NCCL backend, where it can start; else None, and they go through the host's memory.  All
ranks must come to the same answer, and a send may be the first call of two of them, when the others
are far away: so each rank leaves what it knows of its GPUs in the group's store when the group is
made, and the answer is a function of what all have left there.  So is the number of ranks that
share a GPU, some of which may be outside a group.
"""

import contextlib
import ctypes
import datetime
import functools
import json
import logging
import os
import secrets
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

# The first NCCL that takes several ranks on one GPU, and the switch for it.
SHARING_NCCL = (2, 30)
SHARING_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
OTHER = "RINGREDUCE_CUDA_OTHER"

_log = logging.getLogger("ringreduce")

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


class _Library:
    """One of the driver's libraries.

    Raises:
        OSError: there is none, or it does not answer.
    """

    def __init__(self, name: str) -> None:
        self._library = ctypes.CDLL(name)

    def _ask(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise OSError(f"{function} returned {status}")


class _Nvml(_Library):
    """That of management, which knows the GPUs of the host.  Containers may be without it."""

    def __init__(self) -> None:
        super().__init__("libnvidia-ml.so.1")
        self._ask("nvmlInit_v2")

    def _uuid(self, find: str, by: Any) -> str:
        gpu, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        self._ask(find, by, ctypes.byref(gpu))
        self._ask("nvmlDeviceGetUUID", gpu, text, len(text))
        return text.value.decode()

    def uuid(self, index: int) -> str:
        return self._uuid("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))

    def uuids(self) -> list[str]:
        """Of the GPUs that this process may use, which are those that CUDA counts."""
        number = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(number))
        uuids = []
        for index in range(number.value):
            with contextlib.suppress(OSError):  # kept from this process (cgroups), or broken
                uuids.append(self.uuid(index))
        return uuids

    def whole(self, part: str) -> str:
        """The UUID of the GPU that this part (MIG) belongs to."""
        handle = ctypes.c_void_p()
        self._ask("nvmlDeviceGetHandleByUUID", part.encode(), ctypes.byref(handle))
        return self._uuid("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)


class _Cuda(_Library):
    """CUDA itself, which knows the GPUs that it shows.  These calls make no context."""

    def __init__(self) -> None:
        super().__init__("libcuda.so.1")
        self._ask("cuInit", ctypes.c_uint(0))

    def _uuid(self, function: str, gpu: ctypes.c_int) -> str:
        found = ctypes.create_string_buffer(16)
        self._ask(function, found, gpu)
        return str(uuid.UUID(bytes=found.raw))

    def name(self, index: int) -> str:
        gpu = ctypes.c_int()
        self._ask("cuDeviceGet", ctypes.byref(gpu), ctypes.c_int(index))
        # The function's first version gives a part's GPU.
        whole, own = self._uuid("cuDeviceGetUuid", gpu), self._uuid("cuDeviceGetUuid_v2", gpu)
        return f"GPU-{whole}" + (f"#MIG-{own}" if own != whole else "")


def _names_by_nvml(count: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES is read in NVML's order, by PCI address.

    CUDA's order differs on hosts with different GPUs.  That matters only if some ranks name GPUs by
    number and others by UUID.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = map(str, range(count)) if visible is None else map(str.strip, visible.split(","))
    nvml, names = _Nvml(), []
    all_gpus = nvml.uuids()
    for gpu in list(wanted)[:count]:
        if gpu.isdecimal():
            names.append(all_gpus[int(gpu)])
        elif gpu.startswith("MIG-"):
            names.append(f"{nvml.whole(gpu)}#{gpu}")
        else:  # the beginning of a UUID is enough for CUDA
            names.append(next(one for one in all_gpus if one.startswith(gpu)))
    return names


def _names_by_cuda(count: int) -> list[str]:
    cuda = _Cuda()
    return [cuda.name(index) for index in range(count)]


def _visible_gpus(count: int) -> list[str]:
    """Names the GPUs that CUDA shows this process; in all processes a GPU has the same name.

    Their numbers tell nothing: each process may have another GPU as its number 0.  A part of a GPU
    (MIG) has the GPU's name, "#" and its own.  If neither library knows a GPU, the
    process counts as the only one that uses it; if it is not, NCCL reports that.

    Args:
        count: of these GPUs.
    """
    if count == 0:
        return []
    # Where there is no NVML, torch has started CUDA already, to count them.
    for names in (_names_by_nvml, _names_by_cuda):
        with contextlib.suppress(OSError, AttributeError, IndexError, StopIteration):
            return names(count)
    process = secrets.token_hex(8)
    return [f"unknown {process} {index}" for index in range(count)]


def facts() -> str:
    """What a rank tells the others, as JSON.  Makes no CUDA context."""
    nccl = dist.is_nccl_available()
    version = (loaded_nccl() if nccl else None) or (0,)
    return json.dumps(
        {
            "host": _host(),
            "gpus": _visible_gpus(torch.cuda.device_count()),
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
        if not rank_facts["gpus"]:
            return f"rank {rank} has no GPU"
    for host in {r["host"] for r in ranks}:
        here = [r for r in ranks if r["host"] == host]
        if all(r["shares"] for r in here):
            continue
        # Parts of a GPU are one GPU to NCCL.
        for ranks_there, gpus in _shares([[g.partition("#")[0] for g in r["gpus"]] for r in here]):
            if ranks_there > len(gpus):
                return (
                    f"{ranks_there} ranks of one host share {len(gpus)} GPUs, which NCCL takes "
                    f"since {'.'.join(map(str, SHARING_NCCL))} and with {SHARING_SWITCH}=1"
                )
    return ""


def _shares(seen: list[list[str]]) -> list[tuple[int, set[str]]]:
    """Numbers of ranks of one host, and the GPUs that so many share.

    Ranks that see no other GPU share it; else those of a host share all that they see.

    Args:
        seen: the GPUs that each rank sees.
    """
    only = Counter(gpus[0] for gpus in seen if len(gpus) == 1)
    every = {gpu for gpus in seen for gpu in gpus}
    return [(len(seen), every), *((number, {gpu}) for gpu, number in only.items())]


def _key(rank: int) -> str:
    return f"ringreduce/gpus/{rank}"


def _told(store: Store, size: int) -> list[dict[str, Any]]:
    """What `facts` said on each rank of a group."""
    return [json.loads(store.get(_key(r))) for r in range(size)]


def ranks_on_gpu(store: Store, rank: int, size: int) -> int:
    """How many ranks of a group, at least, are on the busiest of the GPUs that `rank` may use.

    Args:
        store: the group's, where every rank has left its `facts`.
        rank: in the group.
        size: the group's world size.

    Returns:
        1 if a rank's facts are not there.
    """
    try:
        if not store.check([_key(r) for r in range(size)]):
            return 1
        told = _told(store, size)
    except dist.DistError as error:
        # The group can do without; one rank that raised here would leave the others waiting.
        _log.warning("rank %d does not know which ranks share its GPU: %s", rank, error)
        return 1
    mine = {*told[rank]["gpus"]}
    near = [r["gpus"] for r in told if r["host"] == told[rank]["host"] and mine & {*r["gpus"]}]
    return max((-(-number // len(gpus)) for number, gpus in _shares(near) if gpus), default=1)


def make_inner(timeout: datetime.timedelta, store: Store, rank: int, size: int) -> Any:
    """An NCCL backend over a group's ranks, or None where NCCL cannot start.

    Args:
        timeout: of its operations.
        store: the group's, where every rank has left its `facts`.
        rank: in the group.
        size: the group's world size.
    """
    told = _told(store, size)
    if why_not := why_not_nccl(told):
        if rank == 0 and told[0]["other"] == "auto":
            _log.warning(
                "calls on CUDA tensors without kernels in ringreduce go through host memory, which "
                "is slow: %s",
                why_not,
            )
        return None
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(PrefixStore("ringreduce/nccl", store), rank, size, options)
