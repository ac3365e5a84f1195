"""The tests of torch's suite that want GPUs, also where there are fewer GPUs than ranks.

torch skips them there.  Most name devices by the rank alone; taken modulo the number of GPUs those
work as well.  What makes a device's name by itself cannot be helped: it fails with CUDA's "invalid
device ordinal", which results.py counts as skipped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Before torch is asked whether there is CUDA: the answer must not start CUDA in a process that will
# be forked.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch
import torch.nn.parallel.distributed as ddp


def needs_gpus(test: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the decorators that skip where there are not enough; `needs_gpus` marks it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    run.needs_gpus = True  # type: ignore[attr-defined]
    return run


def can_fork() -> bool:
    """Whether a forked rank can use CUDA: not if this process has asked CUDA for anything."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def modulo(index: Any, count: int) -> Any:
    """A device's number as one that there is; anything else as it is."""
    return index % count if isinstance(index, int) and index >= 0 and count else index


class Seen:
    """A module as another one sees it: with some things changed."""

    def __init__(self, module: Any, **changed: Any) -> None:
        self.__dict__.update(changed)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def show_enough(distributed_test: ModuleType) -> None:
    """Torch's tests see a GPU for each rank; where they see fewer they run nothing at all."""
    count = max(torch.cuda.device_count(), int(os.environ["WORLD_SIZE"]))
    cuda = Seen(torch.cuda, device_count=lambda: count)
    distributed_test.torch = Seen(torch, cuda=cuda)  # type: ignore[attr-defined]


def take_over(common_distributed: ModuleType) -> None:
    """From now on ranks share the GPUs there are; before torch's tests are imported."""
    count = torch.cuda.device_count()

    def wrap(owner: Any, name: str, place: int) -> None:
        """Takes the argument at this place of a function modulo the number of GPUs."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for key in ("device", "idx"):
                if key in kwargs:
                    kwargs[key] = modulo(kwargs[key], count)
            if len(args) > place:
                args = (*args[:place], modulo(args[place], count), *args[place + 1 :])
            return function(*args, **kwargs)

        setattr(owner, name, call)

    wrap(torch.cuda, "set_device", 0)
    wrap(torch.Tensor, "cuda", 1)
    wrap(torch.nn.Module, "cuda", 1)
    index_of = ddp._get_device_index
    ddp._get_device_index = lambda *args, **kwargs: modulo(index_of(*args, **kwargs), count)

    common_distributed.skip_if_no_gpu = needs_gpus
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, name, lambda *args, **kwargs: needs_gpus)
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [modulo(rank, count)] for rank in range(world_size)
    }
