"""The exceptions of ringreduce groups.

All of them are `torch.distributed.DistBackendError`, so code that catches that keeps working.  They
come from `dist.*`, `Work.wait()`, `Future.wait()` and DDP's backward alike; a Future made by
`.then()` raises RuntimeError with the same text.

A group that has raised one of them has failed on all ranks.  Destroy it and make a new one.  Only a
group with `on_loss="continue"` may go on after PeerLost, where one operation needed data of a lost
rank; its text then says "goes on without it".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import DistBackendError

__all__ = ["Aborted", "Error", "Mismatch", "PeerLost", "Timeout"]


class Error(DistBackendError):
    """A ringreduce group failed, or could not be made.

    Attributes:
        rank: the rank held responsible, the first if the text names several; numbered as in the
            text.  None if there is none, or it is not known.
        reporter: the rank that noticed it, or None.
        group: the name of the group, or "".
        final: whether the group has failed: False if it goes on, None if that is not known here.
    """

    rank: int | None = None
    reporter: int | None = None
    group: str = ""
    final: bool | None = None

    _facts_of: Callable[[str], tuple[int | None, int | None, str, bool | None] | None] | None = None
    _noted: Callable[[Error], None] | None = None  # is told of each that C++ makes (dump.py)

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args)
        # torch makes the exceptions of C++ from the class and the text alone.
        known = self._facts_of(str(args[0])) if self._facts_of and args else None
        if known:
            self.rank, self.reporter, self.group, self.final = known
        self.__dict__.update(facts)
        if known and self._noted:
            self._noted(self)


class PeerLost(Error):
    """A rank's process ended, or left the group, before its part was done.  The text names it."""


class Timeout(Error):
    """A rank did not arrive at an operation, or stopped in it, until the deadline."""


class Mismatch(Error):
    """Ranks called different operations, or the same with other dtypes, sizes, ops or roots."""


class Aborted(Error):
    """A rank gave up: `abort()`, Ctrl-C, or the group has been destroyed."""
