"""Starts the ranks of a host and, unlike torchrun, lets the others live when one is lost.

    python -m ringreduce.supervise --nproc 4 train.py ...

Each rank is a process of its own.  The store lives here, so it outlives every rank.  A rank that
ends with an error or by a signal is started again, with the same RANK, while restarts are left;
with `ringreduce.elastic` in the script it joins the others.  RINGREDUCE_ON_LOSS=continue is set
unless the environment has another value.

    python -m ringreduce.supervise --nnodes 2 --node-rank K --nproc 4 \\
        --master-addr HOST --master-port 29500 train.py ...

does so on each of several hosts, for ranks K * 4 to K * 4 + 3.  The store lives in the supervisor
of node 0, which ends last.

    python -m ringreduce.supervise --store-only --master-port 29500

holds only the store, for ranks that something else starts, or for supervisors with
--external-store (docs/survive.md).
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringreduce.core import clock
from ringreduce.core.joining import SUPERVISOR
from ringreduce.core.processes import end, exit_at, how_ended, torchrun_variables, uninterrupted

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL

_NODES = "ringreduce/supervise/"  # and the node: what its supervisor tells the others
_TELL_SECONDS = 1.0
_SILENT_SECONDS = 30.0  # after which a supervisor counts as lost
# Longer than a node's news may be late: a rank may just have joined there.
_SETTLE_SECONDS = 5.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.supervise",
        description="Starts the ranks of a host; a lost rank does not end the others.",
    )
    parser.add_argument("--nproc", type=int, help="number of ranks on this host")
    parser.add_argument("--nnodes", type=int, default=1, help="number of hosts (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this host (default: 0)")
    parser.add_argument("--store-only", action="store_true", help="start no ranks")
    parser.add_argument(
        "--external-store",
        action="store_true",
        help="another process holds the store, also for node 0: --store-only, for example",
    )
    parser.add_argument(
        "--restarts", type=int, default=3, help="of all ranks of this host together (default: 3)"
    )
    parser.add_argument("--master-addr", default="127.0.0.1", help="of the store: node 0's host")
    parser.add_argument("--master-port", type=int, default=0, help="of the store (default: any)")
    parser.add_argument("script", nargs="?", help="a Python script, and its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store_only:
        if arguments.script or arguments.nproc or not arguments.master_port:
            parser.error("--store-only goes with --master-port and nothing else")
    elif not arguments.script or not arguments.nproc or arguments.nproc < 1:
        parser.error("--nproc of at least 1 and a script are needed")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        parser.error("--node-rank must be from 0 to --nnodes - 1")
    if (arguments.nnodes > 1 or arguments.external_store) and not arguments.master_port:
        parser.error("--nnodes above 1 and --external-store need --master-addr and --master-port")
    if arguments.restarts < 0:
        parser.error("--restarts must be at least 0")
    return arguments


def say(program: str, text: str) -> None:
    """Writes a line of that program to stderr."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


_say = partial(say, "supervise")


class _Nodes:
    """What the supervisors of several hosts tell each other by the store.

    A thread does it, since a host that vanishes may hold up a call of the store for minutes.
    """

    def __init__(self, store: TCPStore, node: int, count: int, holds_store: bool) -> None:
        self.store, self.node, self.holds_store = store, node, holds_store
        # Ranks that run and have the state, ranks that have ended well, whether all have ended.
        self.own = (0, 0, False)
        self.others: dict[int, tuple[int, int, bool]] = {}  # the same of those that were heard
        self.count = count
        self.store_is_lost = False
        self._heard: dict[int, float] = {}
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        if count > 1:
            self._thread.start()

    def _exchange(self) -> None:
        last: dict[int, bytes] = {}
        beat = 0
        while True:
            beat += 1
            own = self.own
            try:
                self.store.set(f"{_NODES}{self.node}", json.dumps([beat, *own]))
                for node in set(range(self.count)) - {self.node}:
                    key = f"{_NODES}{node}"
                    told = self.store.get(key) if self.store.check([key]) else None
                    if told is not None and told != last.get(node):
                        last[node], self._heard[node] = told, clock.now()
                        self.others[node] = tuple(json.loads(told)[1:])
            except RuntimeError as error:
                self.store_is_lost = True
                _say(f"the store is lost, so no rank is started again: {error}")
                return
            if own[2] and not (self.holds_store and self._running()):
                return
            time.sleep(_TELL_SECONDS)

    def _running(self) -> list[tuple[int, int, bool]]:
        """What other supervisors told last, without those that have ended or are silent."""
        now = clock.now()
        return [
            told
            for node, told in list(self.others.items())
            if not told[2] and now - self._heard[node] < _SILENT_SECONDS
        ]

    def have_members(self) -> bool:
        """Whether ranks that have the state may run on another host."""
        all_heard = len(self.others) == self.count - 1
        return not all_heard or any(members for members, _, _ in self._running())

    def have_finished(self) -> bool:
        """Whether a rank of another host has ended well."""
        return any(finished for _, finished, _ in list(self.others.values()))

    def leave(self) -> None:
        """Says that the ranks of this host have ended; with the store, waits for the others."""
        self.own = (0, self.own[1], True)
        if self.count == 1:
            return
        if self.holds_store and self._running():
            _say("the ranks of this host have ended; the store stays until those of others have")
        self._thread.join(None if self.holds_store else 3 * _TELL_SECONDS)


class Ranks:
    """The processes of this host, by their ranks.

    Args:
        command: of each.
        count: the number of ranks on this host.
        port: of the store.
        address: of the store.
        host: number of this host.
        hosts: the number of hosts.
        variables: more of their environment.
        name: of the program that reports; "" for no reports.
    """

    def __init__(
        self,
        command: list[str],
        count: int,
        port: int,
        address: str = "127.0.0.1",
        host: int = 0,
        hosts: int = 1,
        variables: Mapping[str, str] | None = None,
        name: str = "supervise",
    ) -> None:
        self.command, self.name, self._variables = command, name, variables or {}
        self._place = (count * hosts, port, address, hosts)
        self.all = range(host * count, (host + 1) * count)
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.waiting: set[int] = set()  # those of them that were started again and are not yet in
        self.was_made = False  # whether there has been a group
        # Lines of tell_supervisor.  There is no file that could be cleaned away.
        self.told = open(os.memfd_create(SUPERVISOR), "rb", buffering=0)  # noqa: SIM115
        self._heard_bytes = 0
        # The ranks inherit the descriptor, so they move its offset too.
        fcntl.fcntl(self.told, fcntl.F_SETFL, os.O_APPEND)

    def say(self, text: str) -> None:
        """Writes a line to stderr."""
        if self.name:
            say(self.name, text)

    def _environment(self, rank: int) -> dict[str, str]:
        descriptor = self.told.fileno()
        file = os.fstat(descriptor)
        return {
            "RINGREDUCE_ON_LOSS": "continue",
            # As torchrun does: else each rank computes on all cores.
            **({"OMP_NUM_THREADS": "1"} if len(self.all) > 1 else {}),
            **os.environ,
            **torchrun_variables(rank, *self._place),
            **self._variables,
            SUPERVISOR: f"{os.getpid()}:{descriptor}:{file.st_dev}:{file.st_ino}",
        }

    def start(self, rank: int) -> None:
        """Starts the process of that rank."""
        self._listen()  # what the last process of this rank has said
        with uninterrupted():
            self.running[rank] = subprocess.Popen(
                self.command, env=self._environment(rank), pass_fds=[self.told.fileno()]
            )
        self.say(f"rank {rank} is process {self.running[rank].pid}")

    def start_again(self, rank: int) -> None:
        """Starts another process of that rank, which has to join the others."""
        self.start(rank)
        self.waiting.add(rank)

    def _listen(self) -> None:
        descriptor = self.told.fileno()
        told = os.pread(descriptor, os.fstat(descriptor).st_size, self._heard_bytes)
        self._heard_bytes += len(told)
        names = told.decode().split()
        self.was_made |= bool(names)
        self.waiting -= {int(name) for name in names if name.isdecimal()}

    def ended(self) -> dict[int, int]:
        """Which ranks have ended since the last call.

        Returns:
            Their exit statuses by rank, negative for a signal.
        """
        self._listen()
        codes = {r: code for r, p in self.running.items() if (code := p.poll()) is not None}
        for rank in codes:
            del self.running[rank]
        self.waiting -= codes.keys()
        return codes

    def run(self) -> Iterator[dict[int, int]]:
        """Starts all, and looks at them until none runs.

        Returns:
            What `ended` returns, at each look.
        """
        for rank in self.all:
            self.start(rank)
        while self.running:
            time.sleep(_POLL_SECONDS)
            yield self.ended()

    def end(self) -> None:
        """Ends all processes: SIGTERM, and SIGKILL for those that are left after 5 s."""
        end(self.running.values(), _GRACE_SECONDS)
        self.running = {}

    def end_waiting(self) -> None:
        """Ends those that wait for others, of which none is left."""
        if self.running:
            self.say(f"all other ranks have ended, so ranks {sorted(self.running)} cannot join")
            self.end()

    def close(self) -> None:
        """Ends all processes, and hears nothing more of them."""
        self.end()
        self.told.close()


def _supervise(ranks: Ranks, nodes: _Nodes, restarts: int) -> int:
    """The exit status: 0 if a rank ended well and none failed without another start."""
    finished, failed = 0, 0
    could_join = clock.now()
    for codes in ranks.run():
        for rank, code in codes.items():
            if code == 0:
                finished += 1
                continue
            if finished or nodes.have_finished():
                why = "others have ended well"
            elif nodes.store_is_lost:
                why = "the store is lost"
            elif restarts == 0:
                why = "no restarts are left"
            else:
                restarts -= 1
                _say(f"rank {rank} ended with {how_ended(code)}; it is started again")
                ranks.start_again(rank)
                continue
            _say(f"rank {rank} ended with {how_ended(code)}; {why}")
            failed += 1
        nodes.own = (len(ranks.running.keys() - ranks.waiting), finished, False)
        if not ranks.was_made or nodes.own[0] > 0 or nodes.have_members():
            could_join = clock.now()
        elif nodes.count == 1 or clock.now() - could_join > _SETTLE_SECONDS:
            ranks.end_waiting()
    return 0 if finished and not failed else 1


def main() -> int:
    """Starts the ranks that the command line asks for, and waits for them.

    Returns:
        The exit status: 0 if a rank ended well and none failed without another start.
    """
    arguments = _arguments()
    if arguments.store_only:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    holds_store = arguments.node_rank == 0 and not arguments.external_store
    store = TCPStore(
        arguments.master_addr,
        arguments.master_port,
        is_master=holds_store,
        wait_for_workers=False,
    )
    if arguments.store_only:
        _say(f"the store is at port {store.port}, until Ctrl-C")
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
        return 0
    nodes = _Nodes(store, arguments.node_rank, arguments.nnodes, holds_store)
    command = [sys.executable, arguments.script, *arguments.arguments]
    place = (arguments.master_addr, arguments.node_rank, arguments.nnodes)
    exit_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with contextlib.closing(Ranks(command, arguments.nproc, store.port, *place)) as ranks:
        status = _supervise(ranks, nodes, arguments.restarts)
        nodes.leave()
    return status


if __name__ == "__main__":
    sys.exit(main())
