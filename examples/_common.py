"""What both training examples need beside training: a fingerprint of the weights, what a step
waits for its gradients, and one record a rank that a program can compare afterwards."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters, in order: equal only where every bit is equal."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def time_sync(
    model: DistributedDataParallel, forward_backward: Callable[[], object], pairs: int
) -> dict[str, float]:
    """What gradient sync adds to a step: the same step with and without it, in turns.

    A step here is forward and backward. With no_sync() DDP leaves the gradients alone, so the
    difference of the two medians is what the step waits for its gradients (what overlaps with
    backward costs nothing and is not counted). Ranks start each step together: otherwise the
    lead that one rank won without sync would be billed to the next step with it.

    Returns milliseconds on this rank: "step_ms", "no_sync_ms", "sync_ms"; gradients are cleared.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(pairs):
        for sync in (True, False):
            dist.barrier()
            start = time.perf_counter()
            if sync:
                forward_backward()
            else:
                with model.no_sync():
                    forward_backward()
            times[sync].append(1e3 * (time.perf_counter() - start))
            model.zero_grad()
    step, no_sync = statistics.median(times[True]), statistics.median(times[False])
    return {"step_ms": step, "no_sync_ms": no_sync, "sync_ms": step - no_sync}


def write_record(folder: Path | None, record: dict[str, Any]) -> None:
    """Writes `record` as folder/rank<r>.json; nothing where no folder was asked for.

    Floats keep all their digits in JSON, so losses can be compared bit for bit later.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(record))
