"""The program of one rank process: connect to the controller, set up the engine, answer.

Between two questions the process is blocked in a read of its socket and uses no CPU time.
It ends when the controller says so, or goes away: its death is noticed in the read, and
anywhere else by the signal that the kernel sends when a parent dies.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from itertools import repeat
from typing import Any

import torch

from ringreduce.bench.channel import Message, connect, receive, send
from ringreduce.bench.collective import Call, Case, Collective
from ringreduce.bench.collectives import COLLECTIVES
from ringreduce.bench.engines import Engine, make_engine
from ringreduce.bench.settings import Unsupported

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


class Rank:
    """Answers the controller's questions; one method each."""

    def __init__(self, engine: Engine, world: int) -> None:
        self.engine = engine
        self.world = world
        self.collective: Collective | None = None
        self.call: Call = lambda: None
        self.slept_since = (time.process_time(), time.perf_counter())

    def prepare(self, collective: str, count: int, dtype: str, op: str) -> Message:
        """Make the buffers of a row; those of the row before are freed first."""
        self.collective = None
        self.call = lambda: None
        case = Case(count, dtype, op, self.engine.rank, self.world)
        self.collective = COLLECTIVES[collective](case)
        self.call = self.engine.call(self.collective)
        return {}

    def check(self, salt: int) -> Message:
        """One call with known inputs, compared with the oracle; then fill for timing."""
        assert self.collective is not None
        reply = self.collective.check(self.call, salt)
        self.collective.settle()
        return reply

    def settle(self) -> Message:
        """Fill the buffers for timing."""
        assert self.collective is not None
        self.collective.settle()
        return {}

    def round(self, warmup: int, iterations: int) -> Message:
        """Time `iterations` calls back to back: {"seconds": for all of them, ...}."""
        cpu, wall = self.slept_since
        idle = {"idle_cpu": time.process_time() - cpu, "idle": time.perf_counter() - wall}
        call = self.call
        gc.disable()
        self.engine.barrier()
        for _ in repeat(None, warmup):
            call()
        self.engine.barrier()
        start = time.perf_counter()
        for _ in repeat(None, iterations):
            call()
        seconds = time.perf_counter() - start
        gc.enable()
        return {"seconds": seconds, **idle}

    def about(self) -> Message:
        """What the contender says about itself."""
        return self.engine.about()

    def close(self) -> Message:
        """Leave the group; the process ends after this."""
        self.engine.close()
        return {}

    def serve(self, connection: Any) -> None:
        """Answer until told to close, or until the controller has gone."""
        done = False
        while not done:
            try:
                question = receive(connection)
            except (EOFError, OSError):
                os._exit(1)  # nobody is left to tell, and peers may never join a clean exit
            name = question.pop("do")
            done = name == "close"
            try:
                reply = getattr(self, name)(**question)
            except Exception as error:
                reply = failure(error)
            self.slept_since = (time.process_time(), time.perf_counter())
            send(connection, reply)


def failure(error: Exception) -> Message:
    """The answer that says what went wrong."""
    text = str(error).strip()
    return {
        "error": "".join(traceback.format_exception(error)).rstrip(),
        "reason": text.splitlines()[0] if text else type(error).__name__,
        "refusal": is_refusal(error),
    }


def main() -> None:
    """Run the rank process that `sys.argv[1]`, a JSON object, describes."""
    spec = json.loads(sys.argv[1])
    # Ctrl-C is the controller's business: it ends the rank processes in an orderly way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(spec["parent"])
    torch.set_num_threads(1)
    connection = connect(spec["control"])
    identity = {"key": spec["key"], "rank": spec["rank"], "pid": os.getpid()}
    try:
        engine = make_engine(spec)
    except Exception as error:
        send(connection, {**identity, **failure(error)})
        sys.exit(1)
    send(connection, {**identity, "rank": engine.rank})
    Rank(engine, spec["world"]).serve(connection)


if __name__ == "__main__":
    main()
