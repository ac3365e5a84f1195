"""What the ranks of these tests have in common: their GPU, and streams that stand still."""

from __future__ import annotations

import ctypes
import threading

import torch
from pool import Rank

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def use_gpu(me: Rank) -> torch.device:
    """Takes the rank's GPU as the current one."""
    device = torch.device("cuda", me.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class Gate:
    """Holds a stream at its present end, until it is opened."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._opened = threading.Event()
        self._function = HostFunction(lambda _: self._wait())
        runtime = ctypes.CDLL("libcudart.so.13")
        handle = (stream or torch.cuda.current_stream()).cuda_stream
        assert runtime.cudaLaunchHostFunc(ctypes.c_void_p(handle), self._function, None) == 0

    def _wait(self) -> None:
        if not self._opened.wait(60):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        self._opened.set()
