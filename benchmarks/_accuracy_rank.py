"""One rank of benchmarks/accuracy.py: trains what it is told to, one run after the other.

A line "run {...}" on standard input names model, way, error feedback, seed and steps; the answer is
a line of JSON with what the run ended with.  "end" ends it.  Models, texts and images are those of
the examples (examples/train_gpt.py, examples/train_mlp.py), smaller, and whatever the number of
ranks, a step sees the same number of samples.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_gpt
import train_mlp
from _common import weights_hash

import ringreduce

GPT_LAYERS, GPT_WIDTH, GPT_SAMPLES = 2, 64, 8  # 137 thousand parameters
GPT_RATE = 3e-3
HELD_OUT_BATCHES, HELD_OUT_PIECES = 64, 8  # 65,536 characters, the same in every run
MLP_WIDTH, MLP_SAMPLES = 512, 32  # 302 thousand parameters
BUCKET_MB = 0.25  # several buckets also of these small models, as large ones have them
# But one for PowerSGD, which starts operations in callbacks: on CPU tensors, where these run when
# an operation ends, ranks would start those of several buckets in different orders.
ONE_BUCKET_MB = 25.0
POWERSGD = "powersgd_"  # and the rank of its matrices


@dataclass
class Task:
    """A model with its data: `step` does forward and backward and returns the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    loss: Callable[[nn.Module], Tensor]
    finish: Callable[[nn.Module], dict[str, float]]


def gpt(seed: int, steps: int) -> Task:
    """The character GPT on the standard library's source."""
    torch.manual_seed(seed)
    model = train_gpt.GPT(GPT_LAYERS, GPT_WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=GPT_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: train_gpt.rate_factor(n, steps)
    )
    train, held_out = texts()
    generator = torch.Generator().manual_seed(1000 * seed + 1 + dist.get_rank())
    share = GPT_SAMPLES // dist.get_world_size()

    def loss(ddp: nn.Module) -> Tensor:
        return train_gpt.text_loss(ddp, *train_gpt.random_batch(train, generator, share))

    @torch.no_grad()
    def finish(trained: nn.Module) -> dict[str, float]:
        same = torch.Generator().manual_seed(7)
        losses = [
            train_gpt.text_loss(trained, *train_gpt.random_batch(held_out, same, HELD_OUT_PIECES))
            for _ in range(HELD_OUT_BATCHES)
        ]
        return {"held_out_loss": torch.stack(losses).mean().item()}

    return Task(model, optimizer, schedule, loss, finish)


def mlp(seed: int, steps: int) -> Task:
    """The MLP on handwritten digits."""
    model = train_mlp.make_model(seed, MLP_WIDTH)
    train, test = train_mlp.load_data(seed)
    data = train_mlp.batches(train, seed, MLP_SAMPLES // dist.get_world_size())

    def loss(ddp: nn.Module) -> Tensor:
        images, labels = next(data)
        return cross_entropy(ddp(images), labels)

    @torch.no_grad()
    def finish(trained: nn.Module) -> dict[str, float]:
        images, labels = test.tensors
        accuracy = train_mlp.accuracy(trained, test)
        held_out = cross_entropy(trained(images), labels).item()
        return {"held_out_loss": held_out, "test_accuracy": accuracy}

    optimizer = torch.optim.SGD(model.parameters(), lr=train_mlp.LEARNING_RATE)
    return Task(model, optimizer, None, loss, finish)


def texts() -> tuple[Tensor, Tensor]:
    """The texts, read once a process."""
    if not _texts:
        _texts.extend(train_gpt.load_text())
    return _texts[0], _texts[1]


_texts: list[Tensor] = []
TASKS: dict[str, Callable[[int, int], Task]] = {"gpt": gpt, "mlp": mlp}


def attach(ddp: DistributedDataParallel, way: str, feedback: bool, seed: int, steps: int) -> Any:
    """Have the gradients of `ddp` averaged in that way; the hook's state, None if it has none."""
    if way == "exact":
        return ringreduce.register_comm_hook(ddp)
    if way == "fp16_hook":
        ddp.register_comm_hook(None, fp16_compress_hook)
        return None
    if way.startswith(POWERSGD):
        # Its own advice: exact for the first tenth.
        state = PowerSGDState(
            None,
            matrix_approximation_rank=int(way.removeprefix(POWERSGD)),
            start_powerSGD_iter=max(2, steps // 10),
            use_error_feedback=feedback,
            random_seed=seed,
        )
        ddp.register_comm_hook(state, powerSGD_hook)
        return state
    return ringreduce.register_comm_hook(ddp, codec=way, error_feedback=feedback)


def train(model: str, way: str, feedback: bool, seed: int, steps: int) -> dict[str, Any]:
    """A whole run; what it ended with, and the loss of every step (that of all ranks' samples)."""
    task = TASKS[model](seed, steps)
    bucket_mb = ONE_BUCKET_MB if way.startswith(POWERSGD) else BUCKET_MB
    ddp = DistributedDataParallel(task.model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    state = attach(ddp, way, feedback, seed, steps)
    losses = []
    begin, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = task.loss(ddp)
        task.optimizer.zero_grad()
        loss.backward()
        task.optimizer.step()
        if task.schedule is not None:
            task.schedule.step()
        losses.append(loss.detach())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - began_cpu
    curve = torch.stack(losses)
    dist.all_reduce(curve)
    last = (curve[-max(1, steps // 20) :] / dist.get_world_size()).tolist()
    record = {
        **(task.finish(task.model) if dist.get_rank() == 0 else {}),
        "train_loss": statistics.fmean(last),
        "curve": thin((curve / dist.get_world_size()).tolist()),
        "weights_hash": weights_hash(task.model),
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
    }
    if isinstance(state, PowerSGDState):
        record["elements_sent"] = 1 / state.compression_stats()[0]
    return record


def thin(losses: list[float], points: int = 50) -> list[float]:
    """Means of as many neighbours as leave at most `points` of them."""
    width = -(-len(losses) // points)
    return [
        round(statistics.fmean(losses[at : at + width]), 5) for at in range(0, len(losses), width)
    ]


def requests() -> Iterator[dict[str, Any]]:
    """What is to be run, until there is no more."""
    while line := sys.stdin.readline():
        what, _, rest = line.partition(" ")
        if what != "run":
            return
        yield json.loads(rest)


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints goes to the log
    torch.set_num_threads(1)  # ranks share the cores of one host
    dist.init_process_group("ringreduce")
    for request in requests():
        print(json.dumps(train(**request)), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
