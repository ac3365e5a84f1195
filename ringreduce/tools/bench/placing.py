"""Where the ranks are: on the CPU, or on which GPU; and what must be set for a peer to run there.

Rank r uses device r % the number of devices.  Ranks that share a GPU are a case of their own,
which every report is labelled with: nothing crosses a link there, processes take turns on the GPU,
and stock NCCL refuses unless it is new and told to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringreduce.core.gpu import Version, loaded_nccl
from ringreduce.tools.bench.settings import BenchError, Unsupported

# The first NCCL in which ranks may share a GPU without trouble.  Two may by default; of more, each
# must take so few of the GPU's multiprocessors that the kernels of all can run at the same time.
SHARING_NCCL = (2, 30, 3)
CTAS = 64


@dataclass(frozen=True)
class Placing:
    """`world` ranks on `devices` devices of a type; of a CPU there is one, and it is not shared."""

    device: str = "cpu"
    world: int = 2
    devices: int = 1

    def index_of(self, rank: int) -> int:
        """The number of the device that `rank` uses."""
        return rank % self.devices

    @property
    def sharing(self) -> int:
        """How many ranks use the busiest GPU; 1 on a CPU."""
        return 1 if self.device == "cpu" else -(-self.world // self.devices)

    @property
    def label(self) -> str:
        """What every table and picture must say of this placing, or "" if nothing."""
        if self.sharing == 1:
            return ""
        if self.devices == 1:
            return "ranks sharing one GPU"
        return f"ranks sharing GPUs, up to {self.sharing} on one"


def place(device: str, world: int) -> Placing:
    """Where `world` ranks go on this machine.  Raises BenchError where there is no such device."""
    if device == "cpu":
        return Placing("cpu", world)
    if torch.version.cuda is None:
        raise BenchError(f"--device cuda: this torch ({torch.__version__}) is built without CUDA")
    # Of the ways to ask, the one that leaves no trace of CUDA in this process.
    devices = torch.cuda.device_count()
    if devices == 0:
        raise BenchError("--device cuda: torch finds no GPU here (torch.cuda.device_count() is 0)")
    return Placing(device, world, devices)


def nccl_environment(
    placing: Placing, version: Callable[[], Version | None] = loaded_nccl
) -> dict[str, str]:
    """What NCCL's ranks need in their environment.  Raises Unsupported where it cannot run."""
    if placing.device != "cuda":
        raise Unsupported("NCCL works on CUDA tensors only (--device cuda)")
    found = version()
    if found is None:
        raise Unsupported("there is no NCCL in this torch")
    if placing.sharing == 1:
        return {}
    text, wanted = (".".join(map(str, v)) for v in (found, SHARING_NCCL))
    if found < SHARING_NCCL:
        raise Unsupported(
            f"NCCL {text} refuses ranks that share a GPU; {wanted} and newer can (LD_PRELOAD of a "
            "libnccl.so.2 brings one)"
        )
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if placing.sharing > 2:
        environment["NCCL_MAX_CTAS"] = str(max(1, CTAS // placing.sharing))
    return environment


def symmetric_environment(placing: Placing) -> dict[str, str]:
    """The same for torch's symmetric memory."""
    if placing.device != "cuda":
        raise Unsupported("torch's symmetric memory is used on CUDA tensors only (--device cuda)")
    if placing.sharing == 1:
        return {}
    return {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
