"""What must come out: inputs every rank can make by itself, and the results they imply.

Inputs repeat with a prime period, so one short table stands for a buffer of any size, and
yet a chunk (a multiple of 128 elements) that lands in the wrong place does not go unseen.
Float inputs have few enough bits that their float64 sum over all ranks is exact.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import torch

from ringreduce.tools.bench.settings import CODECS

PERIOD = 1_000_003


@dataclass(frozen=True)
class Inputs:
    """The inputs of one checked call: `count` elements a rank, different for each `salt`.

    `dtype` and `op` are names as in `settings`. Every rank makes those of all ranks.
    """

    dtype: str
    op: str
    world: int
    count: int
    salt: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of that name."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def of(self, rank: int) -> torch.Tensor:
        """One period of rank `rank`'s input: shape (min(count, PERIOD),), dtype `dtype`."""
        generator = torch.Generator().manual_seed(1_000_003 * self.salt + rank)
        shape = (min(self.count, PERIOD),)
        dtype = self.torch_dtype
        if dtype.is_floating_point:
            bits = 40 if dtype == torch.float64 else 24
            values = torch.randint(
                -(1 << bits), 1 << bits, shape, generator=generator, device="cpu"
            )
            scaled = values.double() / (1 << bits)
            if self.op == "product":
                scaled = 1 + scaled / 2  # in [0.5, 1.5): stays in range for many ranks
            return scaled.to(dtype)
        lowest, highest = torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, (1 << 31) - 1)
        lowest = max(lowest, -highest)
        if self.op == "product":
            lowest, highest = 1, 2
        elif self.op in ("sum", "avg"):  # so that the sum fits, up to that many ranks
            lowest = -(-lowest // self.world)
            highest = max(1, highest // self.world)
        values = torch.randint(lowest, highest + 1, shape, generator=generator, device="cpu")
        return values.to(dtype)


@dataclass(frozen=True)
class Expected:
    """One period of a right result, and how far each element may lie from it.

    `bound` is None where the result must be exact; then `reference` has the result's dtype.
    Else both are float64.
    """

    reference: torch.Tensor
    bound: torch.Tensor | None = None


def expect_reduced(inputs: Inputs) -> Expected:
    """What every rank must hold after an all-reduce of `inputs`.

    Integers, minima and maxima: exact. Float sums: n roundings may move a sum by
    n*u/(1 - n*u) * sum(|x|), with u half of the dtype's epsilon and n = world - 1, one for
    each addition, whatever their order and also if each is rounded to a half type. AVG has
    two more (a reciprocal, a multiplication). A product's bound is relative to itself, with
    n doubled for float64, whose reference is rounded as well.
    """
    dtype = inputs.torch_dtype
    op = inputs.op
    exact = op in ("min", "max") or not dtype.is_floating_point
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    total = inputs.of(0).to(wide)
    magnitude = total.abs()
    for rank in range(1, inputs.world):
        values = inputs.of(rank).to(wide)
        total = _combine(op, total, values)
        magnitude = magnitude + values.abs()
    if op == "avg":
        mode = None if dtype.is_floating_point else "trunc"
        total = torch.div(total, inputs.world, rounding_mode=mode)
        magnitude = magnitude / inputs.world
    if exact:
        return Expected(total.to(dtype))
    limits = torch.finfo(dtype)
    steps = inputs.world - 1
    if op == "avg":
        steps += 2
    if op == "product":
        magnitude = total.abs()
        steps *= 2 if dtype == torch.float64 else 1
    rounding = steps * limits.eps / 2
    growth = rounding / (1 - rounding) if rounding < 1 else float("inf")
    smallest_subnormal = limits.tiny * limits.eps
    return Expected(total, growth * magnitude + smallest_subnormal)


def _combine(op: str, total: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if op in ("sum", "avg"):
        return total + values
    if op == "product":
        return total * values
    if op == "min":
        return torch.minimum(total, values)
    if op == "max":
        return torch.maximum(total, values)
    if op == "band":
        return total & values
    if op == "bor":
        return total | values
    if op == "bxor":
        return total ^ values
    raise ValueError(f"the oracle does not know the operation {op!r}")


def coded(expected: Expected, inputs: Inputs, codec: str) -> Expected:
    """`expected` with room for what a codec loses: for each encoding on a value's way a step.

    A partial sum is encoded at each of world - 1 hops and at its end, at most.  No sum is greater
    than the greatest values of all ranks together.
    """
    greatest = sum(float(inputs.of(rank).abs().max()) for rank in range(inputs.world))
    if inputs.op == "avg":
        greatest /= inputs.world
    room = max(2, inputs.world) * CODECS[codec] * greatest
    assert expected.bound is not None  # these are float sums
    return Expected(expected.reference, expected.bound + room)


def error_of(actual: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """How far the one-dimensional `actual` is from `reference`, which repeats.

    {"max", "rms"}: the greatest and the root mean square error over the root mean square of the
    reference; {"cosine"}: of the angle between the two.
    """
    most = square = exact = found = product = 0.0
    for start in range(0, actual.numel(), PERIOD):
        block = actual[start : start + PERIOD].double().cpu()
        right = reference[: block.numel()].double()
        lost = block - right
        worst = float(lost.abs().max())
        most = worst if worst > most or worst != worst else most
        square += float(lost.dot(lost))
        exact += float(right.dot(right))
        found += float(block.dot(block))
        product += float(block.dot(right))
    size = (exact / max(1, actual.numel())) ** 0.5
    if size == 0:
        return {"max": most, "rms": square**0.5, "cosine": 1.0 if found == 0 else 0.0}
    return {
        "max": most / size,
        "rms": (square / exact) ** 0.5,
        "cosine": product / (exact * found) ** 0.5 if found else 0.0,
    }


def fill(buffer: torch.Tensor, table: torch.Tensor) -> None:
    """Repeat `table` over the one-dimensional `buffer`."""
    for start in range(0, buffer.numel(), PERIOD):
        block = buffer[start : start + PERIOD]
        block.copy_(table[: block.numel()])


def count_wrong(actual: torch.Tensor, expected: Expected) -> int:
    """How many elements of the one-dimensional `actual` are not as expected (NaN never is)."""
    wrong = 0
    for start in range(0, actual.numel(), PERIOD):
        block = actual[start : start + PERIOD].cpu()
        reference = expected.reference[: block.numel()]
        if expected.bound is None:
            good = block == reference
        else:
            good = (block.double() - reference).abs() <= expected.bound[: block.numel()]
        wrong += block.numel() - int(torch.count_nonzero(good))
    return wrong


def digest(tensor: torch.Tensor) -> str:
    """A hash of the contiguous `tensor`'s bytes, to compare bits between ranks."""
    tensor = tensor.cpu()
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return ""
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return hashlib.blake2b(memory, digest_size=16).hexdigest()
