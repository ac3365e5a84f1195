"""One rank of one way to train, as benchmarks/ddp.py starts it: answers what it is asked.

Ways (`kind`): "bare" has no DDP and no sync, "alone" is DDP whose hook sends nothing, "parallel"
is torch.nn.DataParallel in rank 0 alone, "ddp" is DDP on the group's backend, "hook" is the same
with ringreduce's hook beside that backend, "codec" the hook with the codec that the way is named
after ("auto" too), and error feedback.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
from typing import Any

import torch
import torch.distributed as dist
from _ddp_models import WORKLOADS, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ringreduce.tools.bench import oracle
from ringreduce.tools.bench.clocks import clock_for
from ringreduce.tools.bench.engines import TorchEngine
from ringreduce.tools.bench.servant import Servant, run
from ringreduce.tools.bench.settings import Message

# A trial of "auto" is shorter.
MOST_STEPS = 20


def projection(gradient: Tensor, signs: Tensor) -> tuple[float, float]:
    """A linear function of a gradient that sees each of its elements, and the gradient's norm."""
    flat = gradient.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), oracle.PERIOD):
        block = flat[start : start + oracle.PERIOD].double()
        total += torch.dot(block, signs[: block.numel()])
    return float(total), float(torch.linalg.vector_norm(flat, dtype=torch.float64))


def kept(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What a hook returns that sends nothing."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Trainer(Servant):
    """Trains one model after the other."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec["rank"])
        self.kind: str = spec["kind"]
        self.key: str = spec["key"]
        self.world: int = spec["world"]
        self.device = torch.device(spec["device"])
        self.devices: int = spec["devices"]
        self.idle = self.kind == "parallel" and self.rank > 0
        if self.device.type == "cuda" and not self.idle:
            torch.cuda.set_device(self.device)
        self.engine = TorchEngine(spec)
        self.clock = clock_for("cpu" if self.idle else spec["device"])
        self.model: nn.Module = nn.Identity()
        self.state: Any = None  # of a codec

    def prepare(self, model: str, sizes: dict[str, Any], dtype: str) -> Message:
        """Make the model and its batch; those of the model before are freed first."""
        self.model, self.optimizer, self.batch = nn.Identity(), None, ()
        gc.collect()
        if self.idle:
            return {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        workload = WORKLOADS[model]
        torch.manual_seed(1)  # all ranks and all ways start with the same weights
        module = workload.make(sizes).to(self.device)
        self.dtype = getattr(torch, dtype)
        shards = range(self.world) if self.kind == "parallel" else [self.rank]
        parts = [workload.batch(sizes, torch.Generator().manual_seed(100 + r)) for r in shards]
        self.batch = tuple(torch.cat(part).to(self.device) for part in zip(*parts, strict=True))
        self.model = self._wrap(module)
        self.optimizer = workload.optimizer(module)
        return {"parameters": sum(parameter.numel() for parameter in module.parameters())}

    def _wrap(self, module: nn.Module) -> nn.Module:
        if self.kind == "bare":
            return module
        if self.kind == "parallel":
            return DataParallel(module, list(range(min(self.world, self.devices))))
        where = [self.device] if self.device.type == "cuda" else None
        ddp = DistributedDataParallel(module, device_ids=where, gradient_as_bucket_view=True)
        if self.kind == "alone":
            ddp.register_comm_hook(None, lambda _, bucket: kept(bucket))
        elif self.kind == "hook":
            importlib.import_module("ringreduce").register_comm_hook(ddp)
        elif self.kind == "codec":
            ringreduce = importlib.import_module("ringreduce")
            self.state = ringreduce.register_comm_hook(ddp, codec=self.key)
        return ddp

    def choose(self) -> Message:
        """Train until the codec "auto" has chosen; what, and why."""
        for _ in range(MOST_STEPS):
            if self.state.choice != "measuring":
                return {"choice": self.state.choice, "why": self.state.why}
            self._step()
        raise RuntimeError(f"auto has not chosen in {MOST_STEPS} steps: {self.state.why}")

    def check(self) -> Message:
        """What every parameter's gradient is, as projections: before sync and after it."""
        if self.idle:
            return {}
        reply: Message = {}
        if self.kind != "parallel":
            with self._no_sync():
                reply["local"], reply["norms"], _ = self._gradients()
        if self.kind not in ("bare", "alone"):
            reply["synced"], _, reply["digest"] = self._gradients()
        return reply

    def _gradients(self) -> tuple[list[float], list[float], str]:
        """The projections and norms of all gradients of the batch, and a hash of their bits."""
        self.model.zero_grad()
        self._backward()
        table = torch.randint(0, 2, (oracle.PERIOD,), generator=torch.Generator().manual_seed(7))
        signs = (2.0 * table - 1).double().to(self.device)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        pairs = [projection(gradient, signs) for gradient in gradients]
        bits = hashlib.blake2b(digest_size=16)
        for gradient in gradients:
            bits.update(oracle.digest(gradient.contiguous()).encode())
        self.model.zero_grad()
        return [value for value, _ in pairs], [norm for _, norm in pairs], bits.hexdigest()

    def round(self, steps: int, warmup: int) -> Message:
        """Seconds of each of `steps` steps, and of as many under no_sync where there is a sync."""
        idle = self.slept()
        gc.disable()
        reply = {"step": self._laps(steps, warmup)}
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                reply["no_sync"] = self._laps(steps, warmup)
        else:
            self._laps(0, 0)  # all ranks and ways meet as often
        gc.enable()
        return {**reply, **idle}

    def _laps(self, steps: int, warmup: int) -> list[float]:
        self._meet()
        if self.idle:
            self._meet()
            return []
        for _ in range(warmup):
            self._step()
        self._meet()
        return self.clock.laps(self._step, steps)

    def _meet(self) -> None:
        self.clock.settle()
        self.engine.barrier()
        self.clock.settle()

    def _step(self) -> None:
        self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = loss_of(self.model, *self.batch)
        loss.backward()
        return loss.detach()

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()

    def memory(self) -> Message:
        """Bytes: the most that torch had on the GPU; what ringreduce holds, there and outside."""
        reply = {"allocated": 0, "staging": 0, "gpu": 0}
        if self.device.type == "cuda" and not self.idle:
            reply["allocated"] = torch.cuda.max_memory_allocated(self.device)
        if self.kind == "hook" or self.engine.backend == "ringreduce":
            ringreduce = importlib.import_module("ringreduce")
            reply["staging"], reply["gpu"] = ringreduce.staging_bytes(), ringreduce.gpu_bytes()
        return reply

    def where(self) -> Message:
        """The name of this rank's GPU, or "" on a CPU."""
        on_gpu = self.device.type == "cuda"
        return {"gpu": torch.cuda.get_device_name(self.device) if on_gpu else ""}

    def close(self) -> Message:
        """Leave the group; the process ends after this."""
        self.model, self.optimizer = nn.Identity(), None  # DDP's before its group
        gc.collect()
        self.engine.close()
        return {}


if __name__ == "__main__":
    run(Trainer)
