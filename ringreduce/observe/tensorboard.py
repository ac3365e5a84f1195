"""Scalars of each training step, for TensorBoard.

ringreduce.tensorboard(SummaryWriter())
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from ringreduce.core.backend import backend_of, extension, ringreduce_group
from ringreduce.observe.metrics import GONE, Totals, Trial


class Scalars(Protocol):
    """What has torch's SummaryWriter.add_scalar."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class tensorboard:
    """Writes what a group does in a training step as scalars, while torch's optimizers step.

        ringreduce.tensorboard(SummaryWriter())

    The scalars are those of this rank, in milliseconds a step: `ringreduce/in_operations_ms`,
    `ringreduce/waiting_ms` there and for messages, of that `ringreduce/waiting_for_rank_3_ms` for
    delays that began with each rank; and `ringreduce/megabytes` a step.  Those
    of a group that is given have its name: `ringreduce/NAME/megabytes`.  Each is the mean of the
    steps since the last one.  They are written in the thread that calls `optimizer.step`.  An error
    of the writer ends no step: the first is logged, its points are missing, and the next step
    tries again.

    Args:
        writer: torch.utils.tensorboard.SummaryWriter, or anything with its `add_scalar`.
        group: a ringreduce group, or another, beside which one is made if there is none; None for
            the default group.
        every: steps between two points.

    Raises:
        ValueError: `every` is less than 1.
        TypeError: not a group, or one that this rank is not in.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: the group beside it could not be made.
    """

    def __init__(
        self, writer: Scalars, group: dist.ProcessGroup | None = None, *, every: int = 1
    ) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if every < 1:
            raise ValueError(f"tensorboard(every={every}): a point needs a step at least")
        self._writer, self._every = writer, every
        self._group = ringreduce_group(group, again=False)
        self._tag = "ringreduce/" if group is None else f"ringreduce/{self._group.group_name}/"
        self._writing = Trial("write scalars for TensorBoard")
        self._last_step = int(extension().training_step())
        self._before = self._totals()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Writes no more."""
        self._handle.remove()

    def _totals(self) -> list[Totals]:
        backend = backend_of(self._group)
        with contextlib.suppress(*GONE):
            return [] if backend is None else Totals.of(self._group, backend)
        return []

    def _after_step(self, *_: Any) -> None:
        with self._writing:  # the parameters have changed: nothing may be raised here
            step = int(extension().training_step())
            if step - self._last_step >= self._every:
                self._write(step)

    def _write(self, step: int) -> None:
        steps = step - self._last_step
        now, before = self._totals(), self._before
        self._last_step, self._before = step, now
        if not now or not before:  # the group is gone, or was a moment ago
            return

        def mean(value: Callable[[Totals], float]) -> float:  # over all its devices
            grown = sum(map(value, now)) - sum(map(value, before))
            return max(0.0, grown) / steps  # less: the group was made anew

        scalars = {
            "megabytes": mean(lambda of: of.bytes) / 1e6,
            "in_operations_ms": mean(lambda of: of.seconds) * 1e3,
            "waiting_ms": mean(lambda of: sum(of.waited.values())) * 1e3,
        }
        for rank in {rank for of in now for rank in of.waited}:
            waited = mean(lambda of, rank=rank: of.waited.get(rank, 0.0))  # type: ignore[misc]
            scalars[f"waiting_for_rank_{rank}_ms"] = waited * 1e3
        for name, value in scalars.items():
            self._writer.add_scalar(f"{self._tag}{name}", value, step)
