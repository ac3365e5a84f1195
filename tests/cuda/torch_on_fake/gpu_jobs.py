"""What the ranks of these tests have in common: their GPU, and streams that stand still."""

from __future__ import annotations

import ctypes

import fake_rules
import torch
from pool import Rank


def use_gpu(me: Rank) -> torch.device:
    """Takes the rank's GPU as the current one."""
    device = torch.device("cuda", me.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class Gate(fake_rules.Gate):
    """Holds a stream at its present end, until it is opened."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        handle = (stream or torch.cuda.current_stream()).cuda_stream
        super().__init__(ctypes.c_void_p(handle))
