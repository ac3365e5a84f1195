"""What all-reduce on GPUs should take, on paper: the model of csrc/cuda/tuning.h, as tables.

    python benchmarks/gpu_model.py

No kernel of ours has been timed: every number printed follows from the few that stand below, which
are taken from what others publish or assumed, and each says which.  Device time, as inside a CUDA
graph: what a call costs its caller is not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)


@dataclass(frozen=True)
class Links:
    """Between the GPUs of one host: `hop` us for a flag, `rate` GB/s that a rank sends in all."""

    ranks: int
    hop: float
    rate: float

    def us(self, size: float) -> float:
        """The time that so many bytes of a rank take on their way."""
        return size / self.rate / 1e3


def one_shot(on: Links, size: int) -> float:
    return on.hop + on.us((on.ranks - 1) * size)


def two_shot(on: Links, size: int) -> float:
    return 2 * on.hop + on.us(2 * (on.ranks - 1) / on.ranks * size)


def ring(on: Links, size: int) -> float:
    return 2 * (on.ranks - 1) * on.hop + on.us(2 * (on.ranks - 1) / on.ranks * size)


ALGORITHMS: dict[str, Callable[[Links, int], float]] = {
    "one-shot": one_shot,
    "two-shot": two_shot,
    "ring": ring,
}


def best(on: Links, size: int) -> tuple[str, float]:
    """The fastest algorithm and its us; of equals the one named first."""
    name = min(ALGORITHMS, key=lambda n: ALGORITHMS[n](on, size))
    return name, ALGORITHMS[name](on, size)


def busbw(ranks: int, size: int, us: float) -> float:
    """GB/s, as nccl-tests defines it."""
    return 2 * (ranks - 1) / ranks * size / us / 1e3


@dataclass(frozen=True)
class Hosts:
    """`count` hosts with GPUs as `inside`, each behind one port: `hop` us, `rate` GB/s."""

    inside: Links
    count: int
    hop: float
    rate: float

    def time(self, size: int) -> float:
        """Reduce inside each host, a ring of hosts in which all shards share the port, and back."""
        between = 2 * (self.count - 1) * self.hop
        between += 2 * (self.count - 1) / self.count * size / self.rate / 1e3
        return two_shot(self.inside, size) + between


# 8 x H100 with NVLink: tuning.h's numbers, and the rate that NCCL's ring is published to reach.
NVLINK = Links(8, hop=3, rate=300)
NVLINK_AS_NCCL = Links(8, hop=3, rate=370)

# Cards without peer access write to pinned memory of the host, from where peers read: assumed are
# 5 us a hop, 25 GB/s of a PCIe 4.0 slot of 16 lanes, and 200 GB/s of the host's memory, through
# which each byte goes twice.
SLOT, HOST_MEMORY, HOST_HOP = 25.0, 200.0, 5.0


def without_peer_access(ranks: int) -> Links:
    return Links(ranks, HOST_HOP, min(SLOT, HOST_MEMORY / (2 * ranks)))


# 100 Gbit/s are 12.5 GB/s; assumed are 11.5 that arrive and 20 us for a ncclSend and its ncclRecv.
PORT_HOP, PORT_RATE = 20.0, 11.5

# GPUs shared by ranks: an H200 copies 4.3 TB/s, bytes read and written.  Bytes a rank, of a message
# of one; docs/gpu.md has the formulas.
COPY = 4300.0
SHARED: dict[str, Callable[[int], float]] = {
    "direct": lambda p: 2,
    "ring": lambda p: (6 * p - 4) / p,
    "two-shot": lambda p: 2 + 4 * (p - 1) / p,
    "one-shot": lambda p: 2 * p + 1,
}

# us at a size, or bus bandwidth from there on: 8 x H100 or H200.
PUBLISHED = (
    ("NCCL, small", 8, 17.0),
    ("NCCL, symmetric kernels", 8, 2.3),
    ("vLLM's", KIB, 5.8),
    ("mscclpp", 2 * KIB, 5.9),
    ("mscclpp", MIB, 14.0),
)
PUBLISHED_BUSBW = (("NCCL's ring", 370.0), ("NCCL with NVLS", 480.0))
LARGE = 1 << 30


def text_of(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"


def rows(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]


def sizes_table() -> list[str]:
    """Time and bus bandwidth of each setting at each size."""
    settings: list[tuple[str, int, Callable[[int], tuple[str, float]]]] = []
    for name, on in (
        ("8 x H100, NVLink at 300 GB/s", NVLINK),
        ("8 x H100, NVLink at 370 GB/s", NVLINK_AS_NCCL),
        ("4 x PCIe without peer access", without_peer_access(4)),
        ("8 x PCIe without peer access", without_peer_access(8)),
    ):
        settings.append((name, on.ranks, lambda size, on=on: best(on, size)))
    for count in (2, 4):
        hosts = Hosts(NVLINK, count, PORT_HOP, PORT_RATE)
        name = f"{count} x 8 x H100, 100 Gbit/s a host"
        settings.append((name, 8 * count, lambda size, h=hosts: ("hierarchical", h.time(size))))
    lines = []
    for name, ranks, of in settings:
        cells = [name]
        for size in SIZES:
            algorithm, us = of(size)
            cells.append(f"{digits(us)} us, {digits(busbw(ranks, size, us))} GB/s, {algorithm}")
        lines.append(cells)
    return rows(["all-reduce", *map(text_of, SIZES)], lines)


def published_table() -> list[str]:
    """What others publish of 8 x H100 beside the model."""
    lines = []
    for who, size, us in PUBLISHED:
        algorithm, ours = best(NVLINK, size)
        # The model is not good to a quarter.
        verdict = "should beat it" if ours < 0.75 * us else "perhaps" if ours < us else "will not"
        lines.append([who, text_of(size), f"{us:g} us", f"{digits(ours)} us, {algorithm}", verdict])
    for who, rate in PUBLISHED_BUSBW:
        cells = []
        for on in (NVLINK, NVLINK_AS_NCCL):
            algorithm, us = best(on, LARGE)
            cells.append(f"{digits(busbw(8, LARGE, us))} GB/s")
        verdict = "as fast at best" if rate <= NVLINK_AS_NCCL.rate else "will not"
        lines.append([who, "large", f"{rate:g} GB/s", " to ".join(cells), verdict])
    return rows(["published", "size", "theirs", "ours, on paper", ""], lines)


def shared_table() -> list[str]:
    """The floor of each algorithm where ranks share one H200, at 256 MiB."""
    size = 256 * MIB
    lines = []
    for name, of in SHARED.items():
        times = [of(p) * size * p / COPY / 1e6 for p in (2, 4)]
        lines.append([name, *(f"{time:.2f} ms" for time in times)])
    return rows(["ranks sharing one H200, 256 MiB", "2 ranks", "4 ranks"], lines)


def main() -> int:
    print("\n".join([*sizes_table(), "", *published_table(), "", *shared_table()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
