"""What the user asked for, in plain values: sizes, settings, a contender."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# What the controller and the rank processes tell each other, over a Unix socket in a folder that
# only this user can enter.
Message = dict[str, Any]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64",
)  # fmt: skip
OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
DEVICES = ("cpu", "cuda")
# ringreduce's algorithms of all-reduce on each device, and the variable that asks for one.
ALGORITHMS = {
    "cpu": ("auto", "direct", "twoshot", "ring", "bruck", "hierarchical"),
    "cuda": ("auto", "direct", "oneshot", "twoshot", "ring", "ll", "located", "nvls"),
}
ALGORITHM_VARIABLES = {"cpu": "RINGREDUCE_ALGORITHM", "cuda": "RINGREDUCE_CUDA_ALGORITHM"}
# ringreduce's other ways to call all_reduce: of shared tensors, and as an operator of torch.
OWN_WAYS = ("shared", "operator")
PEERS = (
    "gloo", "mpi", "nccl", "symm_mem", *OWN_WAYS,
    *dict.fromkeys((*ALGORITHMS["cuda"][1:], *ALGORITHMS["cpu"][1:])),
)  # fmt: skip
# How float32 values may travel, and who adds them: `--codec int8` or `--codec int8@ring`. The
# number is the distance of neighbouring values, as a share of the greatest value of the block (for
# the halves, of the value itself).
CODECS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "int8": 1 / 127, "int4": 1 / 7}
SCHEDULES = ("auto", "owner", "ring")

OURS = "ours"
ROOFLINE = "roofline"


class BenchError(Exception):
    """Something that ends the benchmark; its text is all that the user needs to see."""


class Unsupported(Exception):
    """A contender cannot do what is asked (a dtype, an operation); its text says why."""


def parse_size(text: str) -> int:
    """Bytes of `text`: a whole number with K, M or G for powers of 1024 ("64K", "25MiB").

    Raises ValueError for anything else.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write bytes, or a number with K, M or G")
    return int(match.group(1)) * UNITS[match.group(2).upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes of a list like "1K,64K" in which "1K:1M:4" stands for 1K, 4K, ... 1M.

    The factor of a range is 2 where it is left out. Raises ValueError.
    """
    sizes: list[int] = []
    for item in text.split(","):
        parts = item.split(":")
        if len(parts) == 1:
            sizes.append(parse_size(item))
        elif len(parts) in (2, 3):
            size, last = parse_size(parts[0]), parse_size(parts[1])
            factor = int(parts[2]) if len(parts) == 3 else 2
            if size < 1 or factor < 2 or last < size:
                raise ValueError(f"{item!r} is no range: write FIRST:LAST:FACTOR, factor >= 2")
            while size <= last:
                sizes.append(size)
                size *= factor
        else:
            raise ValueError(f"{item!r} is no range: write FIRST:LAST or FIRST:LAST:FACTOR")
    return tuple(sizes)


def parse_codec(text: str) -> tuple[str, str]:
    """(codec, schedule) of "int8" or "int8@ring". Raises ValueError."""
    codec, at, schedule = text.partition("@")
    if codec not in CODECS or (at and schedule not in SCHEDULES):
        raise ValueError(
            f"{text!r} is no codec: write {', '.join(CODECS)}, with @ and one of "
            f"{', '.join(SCHEDULES)} after it if you like"
        )
    return codec, schedule or SCHEDULES[0]


def format_size(size: int) -> str:
    """`size` bytes for people: "64 KiB", "1000 B"."""
    for unit in ("G", "M", "K"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class Settings:
    """One run of the benchmark.

    `iterations` of None: as many calls as take `round_seconds`; `warmup` of None: a tenth of them.
    """

    collective: str
    world: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    backend: str = "ringreduce"
    algorithm: str = "auto"
    compare: tuple[str, ...] = ()
    iterations: int | None = None
    round_seconds: float = 0.1
    warmup: int | None = None
    rounds: int = 7
    timeout: float = 120.0
    device: str = "cpu"
    codecs: tuple[str, ...] = ()  # contenders too, each as parse_codec() takes it


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    `key` names it in messages and in the JSON, `title` in tables and plots. `kind` chooses the
    engine ("torch", "codec", "symm_mem", "mpi" or "roofline"), `backend` is for torch.distributed,
    and `environment` is added to that of its rank processes. One that is `optional` is left out if
    it fails, with the reason; if another one fails, all ends. `missing` says why it cannot even
    start.
    """

    key: str
    title: str
    kind: str
    backend: str
    environment: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    devices: int = 1  # rank r uses device r % devices
    optional: bool = False
    missing: str = ""
    # The Python program of a rank; it gets a JSON object as its last argument.
    program: tuple[str, ...] = ("-m", "ringreduce.tools.bench.rank")
