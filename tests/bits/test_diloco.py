"""ringreduce.DiLoCo: every round has the bits of an oracle, on all ranks, also after a restart."""

from __future__ import annotations

import copy
import io
import itertools
import os
from collections.abc import Callable
from typing import Any

import diloco_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
from pool import Rank, on_ranks
from ranks import same_on_all
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.core.backend import backend_of, extension

CODECS = (None, "bfloat16", "float16", "int8", "int4")


class Net(torch.nn.Module):
    """Of four dtypes, with a parameter that does not train, one that is tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(37, 41)
        self.middle = torch.nn.Linear(41, 23, dtype=torch.bfloat16)
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.last = torch.nn.Linear(23, 19, dtype=torch.float64)
        self.norm = torch.nn.BatchNorm1d(19)
        self.small = torch.nn.Parameter(torch.full((19, 3), 0.1, dtype=torch.float16))
        self.tied = self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle((self.first(x).tanh() + self.tied).bfloat16())
        x = self.norm(self.last(x.double().tanh()).float())
        return (x @ self.small.float()).square().mean()


# In one fragment, in two and in three, as nearly equal as they can be.
NAMES = ("small", "tied", "first.weight", "middle.weight", "middle.bias", "last.weight", "last.bias",
         "norm.weight", "norm.bias")  # fmt: skip
CUTS = {
    1: [NAMES],
    2: [NAMES[:3], NAMES[3:]],
    3: [NAMES[:3], NAMES[3:4], NAMES[4:]],
}


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def learner(models: list[torch.nn.Module], optimizers: list[Any]) -> Callable[[int, int], None]:
    """The inner step of a rank: two micro-batches, whose gradients add up."""

    def learn(number: int, step: int, rank: int | None = None) -> None:
        draw = torch.Generator().manual_seed(97 * step + (number if rank is None else rank))
        optimizers[number].zero_grad()
        for _ in range(2):
            models[number](torch.randn(4, 37, generator=draw)).backward()
        optimizers[number].step()

    return learn


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def digest(model: torch.nn.Module) -> str:
    return oracle.digest(*model.parameters())


def wanted(size: int, steps: int, cut: int, **settings: Any) -> list[list[str]]:
    models: list[torch.nn.Module] = [net() for _ in range(size)]
    learn = learner(models, [adam(model) for model in models])
    return diloco_oracle.train(models, learn, steps, CUTS[cut], **settings)


COMBINATIONS = [
    # fragments, overlap, alpha
    (1, 0, 0.0), (1, 3, 0.0), (2, 1, 0.25), (3, 0, 0.0), (3, 4, 0.0), (3, 2, 0.5),
]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@on_ranks(3)
def test_rounds_have_the_bits_of_the_oracle(me: Rank, codec: str | None) -> None:
    """Overlap 4 with a fragment each 2 steps: several are under way at a time."""
    for fragments, overlap, alpha in COMBINATIONS:
        for feedback in (True, False) if codec and (fragments, overlap) == (3, 4) else (True,):
            model = net()
            optimizer = adam(model)
            learn = learner([model], [optimizer])
            seen = []
            with ringreduce.DiLoCo(
                model, optimizer, sync_every=6, codec=codec, fragments=fragments, overlap=overlap,
                fragment_update_alpha=alpha, error_feedback=feedback,
            ) as diloco:  # fmt: skip
                while diloco.step < 26:
                    learn(0, diloco.step + 1, me.rank)  # type: ignore[call-arg]
                    seen.append(digest(model))
            case = f"{codec}, {fragments} fragments, overlap {overlap}, alpha {alpha}, {feedback}"
            should = wanted(
                me.world_size, 26, fragments, every=6, overlap=overlap, alpha=alpha, codec=codec,
                feedback=feedback,
            )[me.rank]  # fmt: skip
            at = [step for step in range(26) if seen[step] != should[step]]
            assert not at, f"{case}: other bits from step {at[0] + 1} on"
            diloco.sync()
            same_on_all(digest(model))
