"""A rank process from its start to its end: connect to the controller, answer its questions.

Between two questions the process is blocked in a read of its socket and uses no CPU time.
It ends when the controller says so, or goes away: its death is noticed in the read, and
anywhere else by the signal that the kernel sends when a parent dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import torch

from ringreduce.tools.bench.settings import Message, Unsupported

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None) -> None:
    """Have this process killed when its parent ends; exit if it already has.

    `parent` is the expected parent's process id, None where another program (mpirun) stands
    between.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit("the controller has gone")


def is_refusal(error: Exception) -> bool:
    """Whether `error` may mean "not offered" and not "went wrong".

    Backends raise plain RuntimeErrors for a dtype or operation that they do not have; a
    subclass (a timeout, a lost connection) is another matter.
    """
    return isinstance(error, (Unsupported, NotImplementedError)) or type(error) in (
        RuntimeError,
        ValueError,
        TypeError,
    )


def failure(error: Exception) -> Message:
    """The answer that says what went wrong."""
    text = str(error).strip()
    return {
        "error": "".join(traceback.format_exception(error)).rstrip(),
        "reason": text.splitlines()[0] if text else type(error).__name__,
        "refusal": is_refusal(error),
    }


class Servant:
    """Answers the controller's questions; a subclass has a method for each."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.slept_since = (time.process_time(), time.perf_counter())

    def slept(self) -> Message:
        """CPU and wall time since the last answer."""
        cpu, wall = self.slept_since
        return {"idle_cpu": time.process_time() - cpu, "idle": time.perf_counter() - wall}

    def close(self) -> Message:
        """Leave the group; the process ends after this."""
        return {}

    def serve(self, connection: Any) -> None:
        """Answer until told to close, or until the controller has gone."""
        done = False
        while not done:
            try:
                question = connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # nobody is left to tell, and peers may never join a clean exit
            name = question.pop("do")
            done = name == "close"
            try:
                reply = getattr(self, name)(**question)
            except Exception as error:
                reply = failure(error)
            self.slept_since = (time.process_time(), time.perf_counter())
            connection.send(reply)


def run(make: Callable[[dict[str, Any]], Servant]) -> None:
    """Be the rank process that `sys.argv[1]`, a JSON object, describes."""
    spec = json.loads(sys.argv[1])
    # Ctrl-C is the controller's business: it ends the rank processes in an orderly way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(spec["parent"])
    torch.set_num_threads(1)
    connection = Client(spec["control"])
    identity = {"key": spec["key"], "rank": spec["rank"], "pid": os.getpid()}
    try:
        servant = make(spec)
    except Exception as error:
        connection.send({**identity, **failure(error)})
        sys.exit(1)
    connection.send({**identity, "rank": servant.rank})
    servant.serve(connection)
