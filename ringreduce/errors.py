"""The exceptions of ringreduce groups.

All of them are `torch.distributed.DistBackendError`, so code that catches that keeps working.  They
come from `dist.*`, `Work.wait()`, `Future.wait()` and DDP's backward alike; a Future made by
`.then()` raises RuntimeError with the same text.

A group that has raised one of them has failed on all ranks.  Destroy it and make a new one.  Only a
group with `on_loss="continue"` may go on after PeerLost, where one operation needed data of a lost
rank; its text then says "goes on without it".
"""

from torch.distributed import DistBackendError

__all__ = ["Aborted", "Error", "Mismatch", "PeerLost", "Timeout"]


class Error(DistBackendError):
    """A ringreduce group failed, or could not be made."""


class PeerLost(Error):
    """A rank's process ended, or left the group, before its part was done.  The text names it."""


class Timeout(Error):
    """A rank did not arrive at an operation, or stopped in it, until the deadline."""


class Mismatch(Error):
    """Ranks called different operations, or the same with other dtypes, sizes, ops or roots."""


class Aborted(Error):
    """A rank gave up: `abort()`, Ctrl-C, or the group has been destroyed."""
