"""The benchmark under torchrun: every torchrun rank starts the rank processes with its number.

Rank 0 is also the controller. It says through torchrun's store where it listens; the others
are starters, who start their processes, watch them, and end when the controller does. None
of them takes part in what is timed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Client, wait

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ringreduce.tools.bench.processes import Place, Process, start_rank
from ringreduce.tools.bench.settings import BenchError, Contender, Message

KEY = "ringreduce.bench"


def under_torchrun() -> bool:
    """Whether torchrun (or whoever sets the same variables) has started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def meet() -> tuple[Store, int, int]:
    """Torchrun's store, this process' rank and the world size."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None and local != os.environ["WORLD_SIZE"]:
        raise BenchError("the benchmark runs on one host; torchrun has started several")
    store, rank, world = next(rendezvous("env://"))
    assert isinstance(store, Store)
    return store, rank, world


def announce(store: Store, place: Place, contenders: Sequence[Contender]) -> None:
    """Tell the starters where to report and what to start; for the controller."""
    plan = {
        "place": asdict(place),
        "contenders": [asdict(c) for c in contenders if c.kind != "mpi" and not c.missing],
    }
    store.set(KEY, json.dumps(plan))


def run_starter(store: Store, rank: int) -> int:
    """Start rank `rank` of every contender, and stay until the controller has ended.

    Returns the exit status.
    """
    plan = json.loads(store.get(KEY))
    place = Place(**plan["place"])
    processes: list[Process] = []
    try:
        connection = Client(place.control)
        connection.send({"starter": rank})
        for contender in plan["contenders"]:
            processes.append(start_rank(Contender(**contender), rank, place))
        watched = {os.pidfd_open(p.popen.pid): p for p in processes}
        while True:
            for source in wait([connection, *watched]):
                if source is connection:
                    return _end(connection.recv(), processes, place.timeout)
                assert isinstance(source, int)
                process = watched.pop(source)
                os.close(source)
                connection.send({"dead": process.key, "rank": rank})
    except (EOFError, OSError):
        return 1  # the controller has gone, and has said why
    finally:
        for process in processes:
            process.kill()


def _end(ending: Message, processes: Sequence[Process], timeout: float) -> int:
    left = [process for process in processes if process.key not in ending["skipped"]]
    codes = [process.popen.wait(timeout) for process in left]
    return int(ending["exit"]) or max(map(abs, codes), default=0)
