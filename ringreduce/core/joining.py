"""Whether a process makes its group with the others, or takes a lost rank's place in a running one.

A group that goes on after losses leaves a mark in its store once it is made.  A process that finds
it there and was in no such group itself is one that was started again (docs/survive.md).
"""

import contextlib
import os
from typing import Any

import torch.distributed as dist

# In the store of a group that goes on after losses, once it is made.  torchrun's restarts may share
# a store.
_MADE = "ringreduce/elastic/made" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
# The process that has been in such a group: this one, or the one that it was forked from.
_maker = 0

# The variable that says where the memfd of supervise.py is, and the memfd's name.
SUPERVISOR = "_RR_SUPERVISOR"


def when_to_connect(dist_backend_opts: Any, on_loss: str | None, join: bool | str) -> str:
    """When a group is made.

    `Options.join` of a default group that goes on after losses decides; others are made now.  If it
    is "auto", a process joins if the store says that the group was made, but not

    - one that has been in such a group: it makes the default group again after a failure, with
      all others;
    - one of torchrun's: it starts all ranks anew or none.  The store may be that of the last start,
      and so may TORCHELASTIC_RESTART_COUNT: each node has its own count, which leaves out changes
      of nodes.  Those happen without --max-restarts too.

    Args:
        dist_backend_opts: torch's DistributedBackendOptions.
        on_loss: of the caller's options; None: the environment's.
        join: of the same.

    Returns:
        "now"; "join": by `State.restore()`, as one of a group that runs; "reconfigure": by that
        call (torch 2.14).

    Raises:
        ValueError: join=True without on_loss="continue".
    """
    if getattr(dist_backend_opts, "enable_reconfigure", False):
        return "reconfigure"
    if dist.is_initialized():
        return "now"
    if (on_loss or os.environ.get("RINGREDUCE_ON_LOSS")) != "continue":
        if join is True:
            raise ValueError(
                "join=True needs on_loss='continue', in the same options or as RINGREDUCE_ON_LOSS: "
                "no other group takes new ranks"
            )
        return "now"
    if join == "auto":
        is_new = _maker != os.getpid() and not os.environ.get("TORCHELASTIC_RUN_ID")
        join = is_new and dist_backend_opts.store.check([_MADE])
    return "join" if join else "now"


def note_made(store: Any) -> None:
    """A group that goes on after losses was made; this process is in it."""
    note_member()
    store.set(_MADE, "1")


def note_member() -> None:
    """This process has been in a group that goes on after losses."""
    global _maker
    _maker = os.getpid()
    tell_supervisor("made")


def tell_supervisor(name: str) -> None:
    """Adds a line for supervise.py, if there is one: "made", or a rank that has the state."""
    given = os.environ.get(SUPERVISOR)
    if not given:
        return
    process, descriptor, *file = (int(number) for number in given.split(":"))
    # The descriptor that this process was started with.  A program between the two may have closed
    # it; then the supervisor's, which only processes that see it in /proc find.
    for path in (descriptor, f"/proc/{process}/fd/{descriptor}"):
        with contextlib.suppress(OSError):  # not there
            found = os.stat(path)
            if [found.st_dev, found.st_ino] == file:  # and not another file since
                with open(path, "a", closefd=path != descriptor) as lines:
                    lines.write(f"{name}\n")
                return
