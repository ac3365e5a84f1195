"""How a round of calls is timed: by the host's clock, or on a GPU by events as well.

On a GPU a call of torch.distributed returns before it is done, so one round gives three times:

    seconds   device time: between an event before the first call and one behind the last
    wall      until the GPU is idle again: back-to-back throughput
    issue     until the last call has returned to Python: what a call costs its caller
"""

from __future__ import annotations

import time
from itertools import pairwise, repeat
from typing import Any, Protocol

import torch

from ringreduce.tools.bench.collective import Call


class Clock(Protocol):
    """What a rank process times its calls by."""

    def settle(self) -> None:
        """Wait for all that this process has put on its device."""

    def time(self, call: Call, iterations: int) -> dict[str, float]:
        """Call back to back; the seconds of all calls together."""

    def laps(self, call: Call, iterations: int) -> list[float]:
        """Call back to back; the seconds of each call, on a GPU the device's."""


class HostClock:
    """For calls that are done when they return."""

    def settle(self) -> None:
        pass

    def time(self, call: Call, iterations: int) -> dict[str, float]:
        start = time.perf_counter()
        for _ in repeat(None, iterations):
            call()
        return {"seconds": time.perf_counter() - start}

    def laps(self, call: Call, iterations: int) -> list[float]:
        stamps = [time.perf_counter()]
        for _ in repeat(None, iterations):
            call()
            stamps.append(time.perf_counter())
        return [after - before for before, after in pairwise(stamps)]


class DeviceClock:
    """For calls that put work into the current stream; `cuda` is torch.cuda."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.cuda = cuda

    def settle(self) -> None:
        self.cuda.synchronize()

    def time(self, call: Call, iterations: int) -> dict[str, float]:
        first = self.cuda.Event(enable_timing=True)
        last = self.cuda.Event(enable_timing=True)
        start = time.perf_counter()
        first.record()
        for _ in repeat(None, iterations):
            call()
        last.record()
        issue = time.perf_counter() - start
        # The stream has by then waited for the streams of the collectives, by whose end it goes on.
        self.cuda.synchronize()
        wall = time.perf_counter() - start
        milliseconds: float = first.elapsed_time(last)
        return {"seconds": 1e-3 * milliseconds, "wall": wall, "issue": issue}

    def laps(self, call: Call, iterations: int) -> list[float]:
        events = [self.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        self.cuda.synchronize()
        return [1e-3 * before.elapsed_time(after) for before, after in pairwise(events)]


def clock_for(device: str) -> Clock:
    """The clock for calls on tensors of `device`, "cpu" or "cuda:0"."""
    return HostClock() if device == "cpu" else DeviceClock()
