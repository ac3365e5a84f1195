"""DiLoCo said again: all workers in one process, one after the other, and the codecs in torch.

A message is the fragment's parameters of one wide dtype, each from a multiple of 32 elements on.
Coded, chunk c belongs to rank c (the cut of oracle.py): the addends of ranks c+1, c+2, ... are
coded, the owner adds its own last and uncoded, divides, and the average is coded once more.  A
sparse codec ("topk:0.02+int2") codes each rank's message once, and all are added up by rank.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import oracle
import torch

Tensor = torch.Tensor


def coded(codec: str, x: Tensor) -> Tensor:
    """What a float32 message is after coding; its length is a multiple of 32, its values tame."""
    if codec in ("bfloat16", "float16"):
        return x.to(getattr(torch, codec)).float()
    blocks, zero = x.view(-1, 32), torch.zeros(())
    up, down = blocks.amax(1).maximum(zero), (-blocks).amax(1).maximum(zero)
    if codec == "int8":
        scale, sign = up.maximum(down) * torch.tensor(1.0).div(127), torch.ones(())
    else:
        lesser = up.minimum(down) * torch.tensor(1.0).div(torch.tensor(7.47))
        scale, sign = (up.maximum(down) * 0.125).maximum(lesser), torch.where(up > down, -1.0, 1.0)
    scale = torch.where(scale > 0, scale.clamp_min(2.0**-126), 1).bfloat16().float()
    codes = blocks * (1 / (scale * sign))[:, None]
    codes = codes.clamp_max(7) if codec == "int4" else codes
    whole = (codes.round() * sign.view(-1, 1)).int()  # ties to even; no -0
    return (whole * scale[:, None]).view(-1)


def sparse(share: float, x: Tensor) -> Tensor:
    """What a float32 message is with the greatest elements of each 4,096 alone, the first of equal
    ones, which have the mean magnitude of those above the mean, or of the others.  If there are
    zeros among them, these are the others."""
    result = torch.zeros_like(x)
    for values, place in zip(x.split(4096), result.split(4096), strict=True):
        order = values.abs().sort(descending=True, stable=True).indices
        kept = order[: max(1, int(share * len(values) + 0.5))].sort().values
        sizes = values[kept].abs().double()

        def mean(some: Tensor) -> float:  # in order: the sum may round
            return functools.reduce(operator.add, some.tolist(), 0.0) / max(1, len(some))

        above = sizes > (mean(sizes) if sizes.min() > 0 else 0.0)
        for part in (above, ~above):
            exact = torch.tensor(mean(sizes[part]), dtype=torch.float64).float()
            scale = exact.bfloat16().float().clamp(2.0**-126, torch.finfo(torch.bfloat16).max)
            scale = torch.where(exact > 0, scale, 0)
            place[kept[part]] = torch.copysign(scale, values[kept[part]])
    return result


def average(codec: str | None, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The average, and what each rank's coding has lost."""
    errors = [torch.zeros_like(x) for x in inputs]
    if codec is None or inputs[0].dtype != torch.float32:
        return oracle.exact(inputs, "AVG"), errors
    result, ranks = torch.zeros_like(inputs[0]), len(inputs)
    if codec.startswith("topk:"):
        share = float(codec.removeprefix("topk:").removesuffix("+int2"))
        each = [sparse(share, x) for x in inputs]
        errors = [x - sent for x, sent in zip(inputs, each, strict=True)]
        return functools.reduce(operator.add, each, result) / ranks, errors
    size = oracle.chunk_elements(len(result), ranks)
    for owner in range(ranks):
        chunk = slice(owner * size, (owner + 1) * size)
        total = torch.zeros_like(result[chunk])
        for k in range(1, ranks):
            rank = (owner + k) % ranks
            sent = coded(codec, inputs[rank][chunk])
            errors[rank][chunk] = inputs[rank][chunk] - sent
            total = sent if k == 1 else total + sent
        total = (total + inputs[owner][chunk]) / ranks
        result[chunk] = coded(codec, total)
        errors[owner][chunk] = (total - result[chunk]) * ranks
    return result, errors


def train(
    models: Sequence[torch.nn.Module],
    learn: Callable[[int, int], None],  # the inner step of a rank; rank, step
    steps: int,
    cut: Sequence[Sequence[str]],  # the names of each fragment's parameters
    *,
    every: int,
    overlap: int = 0,
    alpha: float = 0.0,
    codec: str | None = None,
    feedback: float = 1.0,
    outer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    weights: Callable[[int, int], int] | None = None,  # of a rank, at the step of a round
) -> list[list[str]]:
    """Digests of each rank's parameters after each step."""
    local = [dict(model.named_parameters()) for model in models]
    wide = {n: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone()
            for n, p in local[0].items() if p.requires_grad}  # fmt: skip
    make = outer or (lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True))
    optimizer, lost, flying, seen = make(list(wide.values())), {}, [], [[] for _ in models]

    def begin(names: Sequence[str], step: int) -> dict[str, Tensor]:
        averages = {}
        for dtype in dict.fromkeys(wide[n].dtype for n in names):
            some, sent = [n for n in names if wide[n].dtype == dtype], []
            w = [weights(r, step) if weights else 1 for r in range(len(models))]
            for rank, own in enumerate(local):
                message = []
                for n in some:
                    moved = wide[n].to(own[n].dtype).to(dtype) - own[n].detach().to(dtype)
                    message += [moved.reshape(-1), torch.zeros(-moved.numel() % 32, dtype=dtype)]
                flat = torch.cat(message) * w[rank]
                sent.append(flat + lost.get((rank, some[0]), torch.zeros(())) * feedback)
            found, errors = average(codec, sent)
            if weights:
                found = found / (sum(w) / len(w))
            if codec and feedback and dtype == torch.float32:
                lost.update({(rank, some[0]): error for rank, error in enumerate(errors)})
            at = 0
            for n in some:
                averages[n] = found[at : at + wide[n].numel()].view(wide[n].shape)
                at += -(-wide[n].numel() // 32) * 32
        return averages

    for step in range(1, steps + 1):
        for rank in range(len(models)):
            learn(rank, step)
        for number, names in enumerate(cut):
            if (step - every * (number + 1) // len(cut)) % every == 0:
                flying.append((step + overlap, begin(names, step)))
        for _, averages in [f for f in flying if f[0] == step]:
            for n, value in wide.items():
                value.grad = averages.get(n)
            optimizer.step()
            for own in local:
                for n in averages:
                    mine = own[n].detach()
                    mixed = mine.to(wide[n].dtype) * alpha + wide[n] * (1 - alpha)
                    mine.copy_(mixed if alpha else wide[n])
        flying = [f for f in flying if f[0] > step]
        for rank, own in enumerate(local):
            seen[rank].append(oracle.digest(*own.values()))
    return seen
