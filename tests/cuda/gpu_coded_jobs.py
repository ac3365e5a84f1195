"""Compressed gradients of parameters on a GPU, beside those of the same model on the CPU: what the
ranks of gpu_torch_test.py and of the tests on the fake do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpu_torch_jobs import device_of
from ranks import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Of each kind: coded in several buckets, too small to be coded, with one dimension.
SHAPES = [(40, 100), (100,), (130, 31), (7, 9), (64, 512), (3, 5001)]
STEPS, OVERFLOWS, RESUMES = 8, 3, 5


class Given(nn.Module):
    """Its gradients are what it is given, so they have the same bits on every device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        losses = [(w * g).sum() for w, g in zip(self.weights, given, strict=True)]
        return torch.stack(losses).sum()


def gradients(model: Given, step: int, rank: int) -> list[torch.Tensor]:
    """One rank's, in the host's memory."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(w.shape, generator=draw).to(w.dtype) for w in model.weights]


def attach(model: DDP, way: str, settings: dict[str, Any]) -> Any:
    """`way`: "hook" or "python hook".  Returns the state."""
    import ringreduce

    if way == "hook":
        return ringreduce.register_comm_hook(model, **settings)
    state = ringreduce.CompressionState(model, **settings)
    model.register_comm_hook(state, ringreduce.hooks.compressed)
    return state


def averaged(model: DDP, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that DDP makes of them, in the host's memory."""
    device = model.module.weights[0].device
    model.zero_grad()
    model([g.to(device) for g in given]).backward()
    return [p.grad.detach().cpu() for p in model.parameters() if p.grad is not None]


def have_other_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return not all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def residuals(state: Any) -> list[torch.Tensor]:
    """A hook's residuals, in the host's memory."""
    return [r.cpu() for r in state.state_dict()["residuals"].values()]


def unlike_the_cpus(
    me: Rank,
    way: str,
    settings: dict[str, Any],
    dtype: str = "float32",
    ddp: dict[str, Any] | None = None,
    away: bool = False,
) -> list[str]:
    """What is not as it is on the CPU, in gradients and residuals, bit by bit.

    Rank 1's gradients overflow in one step, and later a new model on the GPU goes on from the state
    that the CPU's has saved.  `away`: the parameters are on another GPU than the current one.
    """
    device, kind = device_of(me.rank), getattr(torch, dtype)
    if away:
        device = torch.device("cuda", (me.rank + 1) % torch.cuda.device_count())
    options = {"bucket_cap_mb": 0.05, **(ddp or {})}
    on_cpu = DDP(Given(kind), process_group=dist.new_group(backend="ringreduce"), **options)
    on_gpu = DDP(Given(kind).to(device), **options)
    cpus, gpus = attach(on_cpu, way, settings), attach(on_gpu, way, settings)
    wrong, coded = [], 0
    for step in range(STEPS):
        given = gradients(on_cpu.module, step, me.rank)
        if step == OVERFLOWS and me.rank == 1:
            given[0][3, 7] = float("inf")
        # A new model's first buckets are others, which changes random roundings only.
        if step == RESUMES and not settings.get("stochastic"):
            on_gpu = DDP(Given(kind).to(device), **options)
            gpus = attach(on_gpu, way, settings)
            gpus.load_state_dict(cpus.state_dict())
        wanted, found = averaged(on_cpu, given), averaged(on_gpu, given)
        if have_other_bits(wanted, found):
            wrong.append(f"the gradients of step {step}")
        if have_other_bits(residuals(cpus), residuals(gpus)):
            wrong.append(f"the residuals after step {step}")
        if step == OVERFLOWS and all(bool(g.isfinite().all()) for g in found):
            wrong.append("the infinity has not arrived")
        every = [gradients(on_cpu.module, step, r)[4].double() for r in range(me.world_size)]
        coded += int((torch.stack(every).mean(0) - found[4].double()).abs().max() > 1e-5)
    if coded < STEPS - settings.get("start_after", 0) - 1:
        wrong.append(f"only {coded} steps were coded")
    if (cpus.residual_bytes() > 0) != settings.get("error_feedback", True):
        wrong.append(f"residuals of {cpus.residual_bytes()} bytes")
    if (cpus.residual_bytes(), cpus.steps) != (gpus.residual_bytes(), gpus.steps):
        wrong.append("the states count otherwise")
    return wrong


def chosen(me: Rank) -> dict[str, Any]:
    """What codec="auto" makes of some steps, and by how much their gradients are off at most."""
    model = DDP(Given(torch.float32).to(device_of(me.rank)))
    state = attach(model, "hook", {"codec": "auto"})
    choices, off = [], 0.0
    for step in range(16):
        found = averaged(model, gradients(model.module, step, me.rank))
        choices.append(state.choice)
        every = [gradients(model.module, step, r) for r in range(me.world_size)]
        for mean, each in zip(found, zip(*every, strict=True), strict=True):
            off = max(off, float((torch.stack(each).mean(0) - mean).abs().max()))
    return {"choices": choices, "why": state.why, "off": off}
