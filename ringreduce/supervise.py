"""Starts the ranks of one host and, unlike torchrun, lets the others live when one is lost.

    python -m ringreduce.supervise --nproc 4 train.py ...

Each rank is a process of its own.  The store lives here, so it outlives every rank.  A rank that
ends with an error or by a signal is started again, with the same RANK, while restarts are left;
with `ringreduce.elastic` in the script it joins the others.  RINGREDUCE_ON_LOSS=continue is set
unless the environment has another value.

    python -m ringreduce.supervise --store-only --master-port 29500

holds only the store, for ranks that something else starts (docs/survive.md).
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringreduce._backend import SUPERVISOR

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.supervise",
        description="Starts the ranks of one host; a lost rank does not end the others.",
    )
    parser.add_argument("--nproc", type=int, help="number of ranks")
    parser.add_argument("--store-only", action="store_true", help="start no ranks")
    parser.add_argument(
        "--restarts", type=int, default=3, help="of all ranks together (default: 3)"
    )
    parser.add_argument("--master-port", type=int, default=0, help="of the store (default: any)")
    parser.add_argument("script", nargs="?", help="a Python script, and its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store_only:
        if arguments.script or arguments.nproc or not arguments.master_port:
            parser.error("--store-only goes with --master-port and nothing else")
    elif not arguments.script or not arguments.nproc or arguments.nproc < 1:
        parser.error("--nproc of at least 1 and a script are needed")
    if arguments.restarts < 0:
        parser.error("--restarts must be at least 0")
    return arguments


def _say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class _Ranks:
    """The processes."""

    def __init__(self, command: list[str], count: int, port: int) -> None:
        self.command, self.count, self.port = command, count, port
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.waiting: set[int] = set()  # those of them that were started again and are not yet in
        self.was_made = False  # whether there has been a group
        self.folder = tempfile.mkdtemp()  # for tell_supervisor

    def start(self, rank: int) -> None:
        environment = {
            "RINGREDUCE_ON_LOSS": "continue",
            # As torchrun does: else each rank computes on all cores.
            **({"OMP_NUM_THREADS": "1"} if self.count > 1 else {}),
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            # torch then takes the store at that port, and rank 0 starts none.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            SUPERVISOR: self.folder,
        }
        Path(self.folder, str(rank)).unlink(missing_ok=True)
        self.running[rank] = subprocess.Popen(self.command, env=environment)
        _say(f"rank {rank} is process {self.running[rank].pid}")

    def start_again(self, rank: int) -> None:
        self.start(rank)
        self.waiting.add(rank)

    def ended(self) -> dict[int, int]:
        """The exit statuses of the ranks that have ended since the last call."""
        told = os.listdir(self.folder)
        self.was_made |= bool(told)
        self.waiting -= {int(name) for name in told if name.isdigit()}
        codes = {r: code for r, p in self.running.items() if (code := p.poll()) is not None}
        for rank in codes:
            del self.running[rank]
        self.waiting -= codes.keys()
        return codes

    def stop(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for process in self.running.values():
            process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self.running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _supervise(ranks: _Ranks, restarts: int) -> int:
    """The exit status: 0 if a rank ended well and none failed without another start."""
    finished, failed = 0, 0
    for rank in range(ranks.count):
        ranks.start(rank)
    while ranks.running:
        time.sleep(_POLL_SECONDS)
        for rank, code in ranks.ended().items():
            if code == 0:
                finished += 1
            elif not finished and restarts > 0:
                restarts -= 1
                _say(f"rank {rank} ended with {_how(code)}; it is started again")
                ranks.start_again(rank)
            else:
                why = "others have ended well" if finished else "no restarts are left"
                _say(f"rank {rank} ended with {_how(code)}; {why}")
                failed += 1
        if ranks.was_made and ranks.running and ranks.waiting.issuperset(ranks.running):
            _say(f"all other ranks have ended, so ranks {sorted(ranks.running)} cannot join")
            break
    return 0 if finished and not failed else 1


def main() -> int:
    arguments = _arguments()
    if arguments.store_only:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    store = TCPStore(
        "127.0.0.1",
        arguments.master_port,
        is_master=True,
        wait_for_workers=False,
    )
    if arguments.store_only:
        _say(f"the store is at port {store.port}, until Ctrl-C")
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
        return 0
    command = [sys.executable, arguments.script, *arguments.arguments]
    ranks = _Ranks(command, arguments.nproc, store.port)

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        return _supervise(ranks, arguments.restarts)
    finally:
        ranks.stop()


if __name__ == "__main__":
    sys.exit(main())
