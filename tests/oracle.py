"""What a reduction must give, said twice: exactly, and in float64 without knowing any order.

The exact one keeps the promised order: the message is cut into P equal chunks, ceil(n / P)
rounded up to 128 elements (a reduce-scatter's into its parts); chunk c is added in rank order c+1,
c+2, ..., c (mod P); by rank, every element in the order 0, 1, ..., P-1.  Half types are accumulated
in float32 and rounded once; AVG divides before that, integers towards zero.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
REDUCIBLE = (*FLOATS, *INTEGERS, "bool")
# Types that are only moved.
MOVED = (
    "uint16",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex32",
)
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def supported(dtype: str, op: str) -> bool:
    if op in ("BAND", "BOR", "BXOR"):
        return dtype not in FLOATS
    if op == "PREMUL_SUM":
        return dtype in FLOATS
    return op != "AVG" or dtype != "bool"


PAIRS = [(dtype, op) for dtype in REDUCIBLE for op in OPS if supported(dtype, op)]


def factor(rank: int) -> float:
    """The factor that a rank multiplies with in PREMUL_SUM: not a power of two, not the same."""
    return 0.7 + 0.4 * rank


def make_input(dtype: str, op: str, n: int, rank: int, seed: int) -> Tensor:
    """A rank's addends: signs and magnitudes mixed, so that the order of addition shows."""
    draw = torch.Generator().manual_seed(seed * 1009 + rank)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(n, generator=draw) < (0.8 if op in ("PRODUCT", "MIN", "BAND") else 0.3)
    if dtype in INTEGERS:
        if op == "AVG":  # small: whether a sum that overflows is divided before or after is open
            low, high = (0, 14) if dtype == "uint8" else (-14, 14)
        else:
            info = torch.iinfo(kind)
            low, high = max(info.min, -(2**40)), min(info.max, 2**40)
        return torch.randint(low, high + 1, (n,), generator=draw, dtype=torch.int64).to(kind)
    values = torch.randn(n, generator=draw, dtype=torch.float64)
    spread = 1 if op == "PRODUCT" else 6
    values *= torch.exp2(torch.randint(-spread, spread + 1, (n,), generator=draw).double())
    return values.to(kind)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, with every NaN made the same one."""
    t = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    if not t.numel():
        return torch.empty(0, dtype=torch.uint8)
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    return t.view(torch.uint8)


def digest(*tensors: Tensor) -> str:
    """A short text that is equal if and only if the tensors have the same bits."""
    state = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        state.update(bits(tensor).numpy().tobytes())
    return state.hexdigest()


def chunk_elements(n: int, world_size: int) -> int:
    each = -(-n // world_size)
    return -(-each // 128) * 128


_STEP: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BOOL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **_STEP,
    "SUM": torch.logical_or,
    "MAX": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
}


def scaled(value: Tensor, by: float) -> Tensor:
    """An input times its PREMUL_SUM factor, in float32 (float64: in float64), in its own dtype."""
    wide = value if value.dtype in (torch.float32, torch.float64) else value.float()
    return (wide * torch.tensor(by, dtype=wide.dtype)).to(value.dtype)


def exact(inputs: Sequence[Tensor], op: str, by_rank: bool = False) -> Tensor:
    """The promised bits, from all ranks' inputs (1-D, all alike)."""
    world_size, n = len(inputs), inputs[0].numel()
    size = chunk_elements(n, world_size)
    starts = [min(c * size, n) for c in range(world_size + 1)]
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    return torch.cat(exact_parts(inputs, op, counts, by_rank))


def exact_parts(
    inputs: Sequence[Tensor], op: str, counts: Sequence[int], by_rank: bool = False
) -> list[Tensor]:
    """The same for parts of given sizes, the first of which is added in the order 1, 2, ..., 0."""
    world_size, dtype = len(inputs), inputs[0].dtype
    if op == "PREMUL_SUM":
        inputs = [scaled(t, factor(r)) for r, t in enumerate(inputs)]
    half = dtype in (torch.float16, torch.bfloat16)
    wide = [t.float() if half else t for t in inputs]
    step = (_BOOL if dtype == torch.bool else _STEP)[op]
    parts, end = [], 0
    for c in range(world_size):
        cut = slice(end, end + counts[c])
        end += counts[c]
        first = 0 if by_rank else c + 1
        order = [wide[(first + k) % world_size][cut] for k in range(world_size)]
        total = functools.reduce(step, order)
        if op == "AVG":
            rounding = None if dtype.is_floating_point else "trunc"
            total = torch.div(total, world_size, rounding_mode=rounding)
        parts.append(total.to(dtype))
    return parts


def worst_error(result: Tensor, inputs: Sequence[Tensor], op: str) -> float:
    """The largest |result - float64 result|, in units of what any order of addition may err.

    A sum of P terms in floating point errs by at most (P-1) u sum|x| to first order, u being half
    the spacing at 1 of the type it is accumulated in; an average and a PREMUL_SUM round once more a
    term, and a half type once more at the end, relative to the result.  1.0 is the bound (the
    second order is within the 1 % added).  Integers, minima and the like must be exact: 0 or
    infinity.  Products of floating-point numbers are left to the exact oracle.
    """
    dtype, world_size = result.dtype, len(inputs)
    if op not in ("SUM", "AVG", "PREMUL_SUM") or not dtype.is_floating_point:
        inexact = op == "PRODUCT" and dtype.is_floating_point
        return 0.0 if inexact or torch.equal(result, exact(inputs, op)) else float("inf")
    factors = [factor(r) if op == "PREMUL_SUM" else 1.0 for r in range(world_size)]
    terms = torch.stack([t.double() * f for t, f in zip(inputs, factors, strict=True)])
    divisor = world_size if op == "AVG" else 1
    wanted = terms.sum(0) / divisor
    half = dtype in (torch.float16, torch.bfloat16)
    u_sum = torch.finfo(torch.float32 if half else dtype).eps / 2
    u_end = torch.finfo(dtype).eps / 2
    # float64 has no wider type here: the oracle itself may err as much again.
    roundings = (world_size + 2) * (2 if dtype == torch.float64 else 1)
    bound = roundings * u_sum * terms.abs().sum(0) / divisor
    if half:
        bound += u_end * wanted.abs() + (u_end * terms.abs().sum(0) if op == "PREMUL_SUM" else 0)
        bound += torch.finfo(dtype).smallest_normal * u_end * 2  # subnormal results
    bound = bound * 1.01 + 1e-300
    return float(((result.double() - wanted).abs() / bound).max()) if result.numel() else 0.0
