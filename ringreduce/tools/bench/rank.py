"""The program of a rank process that calls a collective."""

from __future__ import annotations

import gc
from itertools import repeat
from typing import Any

import torch

from ringreduce.tools.bench.clocks import clock_for
from ringreduce.tools.bench.collective import Call, Case, Collective
from ringreduce.tools.bench.collectives import COLLECTIVES
from ringreduce.tools.bench.engines import Engine, SharedEngine, make_engine
from ringreduce.tools.bench.servant import Servant, run
from ringreduce.tools.bench.settings import Message


class Rank(Servant):
    """Answers the controller's questions; one method each."""

    def __init__(self, engine: Engine, world: int, device: str = "cpu") -> None:
        super().__init__(engine.rank)
        self.engine = engine
        self.world = world
        self.device = device
        self.clock = clock_for(device)
        self.collective: Collective | None = None
        self.call: Call = lambda: None

    def prepare(self, collective: str, count: int, dtype: str, op: str) -> Message:
        """Make the buffers of a row; those of the row before are freed first."""
        self.collective = None
        self.call = lambda: None
        shares = isinstance(self.engine, SharedEngine)
        case = Case(count, dtype, op, self.engine.rank, self.world, self.device, shares)
        self.collective = COLLECTIVES[collective](case)
        self.call = self.engine.call(self.collective)
        return {}

    def check(self, salt: int, error: bool = False) -> Message:
        """One call with known inputs, compared with the oracle; then fill for timing.

        With `error` also how far it is from what is exact.
        """
        assert self.collective is not None
        reply = self.collective.check(self.call, salt)
        if error:
            reply["distance"] = self.collective.error(salt)
        self.collective.settle()
        return reply

    def settle(self) -> Message:
        """Fill the buffers for timing."""
        assert self.collective is not None
        self.collective.settle()
        return {}

    def round(self, warmup: int, iterations: int) -> Message:
        """Time `iterations` calls back to back: {"seconds": for all of them, ...}."""
        idle = self.slept()
        call = self.call
        gc.disable()
        self._meet()
        for _ in repeat(None, warmup):
            call()
        self._meet()
        times = self.clock.time(call, iterations)
        gc.enable()
        return {**times, **idle}

    def about(self) -> Message:
        """What the contender says about itself."""
        return self.engine.about()

    def where(self) -> Message:
        """The name of this rank's GPU, or "" on a CPU."""
        on_gpu = self.device != "cpu"
        return {"gpu": torch.cuda.get_device_name(self.device) if on_gpu else ""}

    def close(self) -> Message:
        """Leave the group; the process ends after this."""
        self.engine.close()
        return {}

    def _meet(self) -> None:
        """All ranks are here, and their devices are idle."""
        self.clock.settle()
        self.engine.barrier()
        self.clock.settle()


def make(spec: dict[str, Any]) -> Rank:
    """The rank that `spec` describes, its group set up."""
    device = spec["device"]
    if device != "cpu":
        torch.cuda.set_device(device)
    return Rank(make_engine(spec), spec["world"], device)


if __name__ == "__main__":
    run(make)
