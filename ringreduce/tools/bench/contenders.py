"""Who is compared: what `--compare` and the device imply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ringreduce.tools.bench.placing import Placing, nccl_environment, symmetric_environment
from ringreduce.tools.bench.settings import (
    ALGORITHM_VARIABLES,
    ALGORITHMS,
    OURS,
    OWN_WAYS,
    ROOFLINE,
    Contender,
    Settings,
    Unsupported,
)

# torch's two all-reduces on symmetric memory, each a contender: its key, and its title.
SYMMETRIC = {"symm_one_shot": "1-shot symm", "symm_two_shot": "2-shot symm"}


def contenders_of(
    settings: Settings, placing: Placing | None = None, roofline: bool = True
) -> list[Contender]:
    """Ours first, codecs and peers in the order asked for, the roofline if there are sizes.

    `placing` of None is that of a CPU.  `roofline` of False leaves that out.
    """
    placing = placing or Placing("cpu", settings.world)
    title = settings.backend
    if title != "ringreduce":
        title += " (as ours)"
    if settings.algorithm != "auto":
        title += f" ({settings.algorithm})"
    algorithm = {ALGORITHM_VARIABLES[placing.device]: settings.algorithm}
    found = [Contender(OURS, title, "torch", settings.backend, algorithm)]
    # One group each, as peers have: who is not timed sleeps.
    found += [Contender(codec, codec, "codec", "ringreduce") for codec in settings.codecs]
    for peer in settings.compare:
        found += _peers(peer, placing)
    if roofline and any(settings.sizes):
        # Its ranks need a group for its barriers only, and gloo is always there.
        found.append(Contender(ROOFLINE, ROOFLINE, "roofline", "gloo"))
    return [replace(c, device=placing.device, devices=placing.devices) for c in found]


def _peers(peer: str, placing: Placing) -> Iterator[Contender]:
    """The contenders that one name of `--compare` stands for."""
    on_gpu = placing.device == "cuda"
    if peer == "mpi":
        missing = "it is measured on CPU tensors only" if on_gpu else ""
        yield Contender(peer, peer, "mpi", "", optional=True, missing=missing)
    elif peer == "nccl":
        nccl = Contender(peer, peer, "torch", "nccl", optional=True)
        yield equipped(nccl, nccl_environment, placing)
    elif peer == "symm_mem":
        for key, title in SYMMETRIC.items():
            symmetric = Contender(key, title, "symm_mem", "gloo", optional=True)
            yield equipped(symmetric, symmetric_environment, placing)
    elif peer in OWN_WAYS:
        missing = "it is measured on CPU tensors only" if on_gpu else ""
        yield Contender(peer, peer, peer, "ringreduce", missing=missing)
    elif peer in ALGORITHMS["cuda"] or peer in ALGORITHMS["cpu"]:
        other = "CPU" if on_gpu else "CUDA"
        missing = "" if peer in ALGORITHMS[placing.device] else f"it is for {other} tensors only"
        environment = {ALGORITHM_VARIABLES[placing.device]: peer}
        yield Contender(peer, peer, "torch", "ringreduce", environment, missing=missing)
    else:
        yield Contender(peer, peer, "torch", peer, optional=on_gpu)


def equipped(
    contender: Contender, needs: Callable[[Placing], dict[str, str]], placing: Placing
) -> Contender:
    """The contender with the environment that it needs, or with why it is missing."""
    try:
        return replace(contender, environment=needs(placing))
    except Unsupported as reason:
        return replace(contender, missing=str(reason))
