"""Nodes come and go under torchrun --nnodes=1:2: seconds to the next step, gloo and ringreduce.

    python benchmarks/membership.py --runs 5 --out membership.json

Two agents of torchrun on this machine are the nodes, with two ranks each.  The ranks name a backend
and go on from their last checkpoint; they know nothing else of ringreduce.  The first node starts
alone.  The second one joins; one of its ranks is killed; all of its processes are killed at once,
as with a lost pod; and it joins again.  Each time torchrun starts all ranks anew.  A run fails if
ranks differ in a bit of their weights, or do not go on from the checkpoint.

In "ringreduce_hosts" the ranks of the two nodes share no memory, as on two machines.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WAYS = {"gloo": "gloo", "ringreduce": "ringreduce", "ringreduce_hosts": "ringreduce"}
RANKS = 2  # of a node
CHECKPOINT_EVERY = 5  # steps
STEPS = 12  # of all ranks before anything happens
DEADLINE = 120  # seconds of a wait
# A lost node is missed after 3 s, where torchrun's default is 15; a round waits 1 s for more nodes,
# not 30.
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
# Else torch 2.13's first agent does not tell the one that joins where the ranks' store is.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
FIGURES = {
    "join_s": "second torchrun started, s",
    "rank_lost_s": "a rank of the second killed, s",
    "node_lost_s": "the second node killed, s",
    "join_again_s": "second torchrun started again, s",
}


def train(backend: str, folder: Path) -> None:
    """A rank: trains until the file `stop` is there, and records each step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    saved, step = folder / "checkpoint.pt", 0
    checkpoint = torch.load(saved) if saved.exists() else None
    if checkpoint:
        net.load_state_dict(checkpoint["model"])
        step = checkpoint["step"]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    attempt = torch.tensor([time.monotonic_ns()])
    dist.broadcast(attempt, 0)
    stop = torch.zeros(1)
    draw = torch.Generator().manual_seed(int(attempt) % 1000 + rank)

    node = os.environ["NODE"]
    with (folder / f"{node}{os.environ['LOCAL_RANK']}.jsonl").open("a", 1) as record:

        def note(**more: Any) -> None:
            weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
            line = {"attempt": int(attempt), "world": size, "rank": rank, "node": node}
            line |= {"pid": os.getpid(), "step": step}
            line |= {"weights": hashlib.sha256(weights).hexdigest()[:16], "time": time.monotonic()}
            record.write(json.dumps(line | more) + "\n")

        note(begins=True)
        while not stop.item():
            x = torch.randn(16, 64, generator=draw)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            note()
            if rank == 0 and step % CHECKPOINT_EVERY == 0:
                content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**content, "step": step}, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)
            time.sleep(0.01)
            stop[0] = (folder / "stop").exists()
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()


class Node:
    """An agent of torchrun, with its ranks."""

    def __init__(self, name: str, way: str, folder: Path, port: int, env: dict[str, str]) -> None:
        self.log = (folder / f"{name}.log").open("a+")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
        command += [f"--nproc-per-node={RANKS}", "--max-restarts=5", "--rdzv-id=membership"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command += [f"--rdzv-conf=is_host={int(name == 'a')},{RENDEZVOUS}"]
        command += ["--local-addr=127.0.0.1", __file__, "--way", way, "--folder", str(folder)]
        own = {**ENVIRONMENT, "NODE": name}
        if way == "ringreduce_hosts":
            own["RINGREDUCE_HOSTID"] = f"{name} of {port}"
        self.agent = subprocess.Popen(
            command,
            env={**os.environ, **own, **env},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def ranks(self) -> list[int]:
        """Process numbers of the ranks that run."""
        try:
            text = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text()
        except OSError:  # the agent has ended
            return []
        return [int(pid) for pid in text.split()]

    def kill(self) -> None:
        """All its processes, the agent first, which would start others."""
        os.kill(self.agent.pid, signal.SIGSTOP)
        ranks = self.ranks()
        for pid in [self.agent.pid, *ranks]:
            os.kill(pid, signal.SIGKILL)
        self.agent.wait()
        self.log.close()

    def end(self) -> None:
        from ringreduce.core.processes import end

        end([self.agent], grace=15.0)  # it ends its ranks
        self.log.close()


def recorded(folder: Path) -> list[dict[str, Any]]:
    """What all ranks have recorded, in the order of time."""
    texts = [path.read_text() for path in folder.glob("*.jsonl")]
    # Of a rank that was killed amid a write the last line is not whole.
    lines = [line for text in texts for line in text.splitlines() if line.endswith("}")]
    return sorted(map(json.loads, lines), key=lambda record: record["time"])


def check(records: list[dict[str, Any]]) -> None:
    """Raises if ranks differ, or a start is not that of a checkpoint."""
    by_step = collections.defaultdict(set)
    for record in records:
        by_step[record["attempt"], record["step"]].add(record["weights"])
    wrong = [key for key, weights in by_step.items() if len(weights) > 1]
    if wrong:
        raise RuntimeError(f"ranks have other weights than others: (attempt, step) {wrong[:5]}")
    attempts = list(dict.fromkeys(r["attempt"] for r in records if "begins" in r))
    begun = {r["attempt"]: r["step"] for r in records if "begins" in r}
    for before, after in itertools.pairwise(attempts):
        step = begun[after]
        if step == 0 or by_step[before, step] != by_step[after, step]:
            raise RuntimeError(f"a restart did not go on from the checkpoint of step {step}")


def run(way: str, folder: Path, env: dict[str, str] | None = None) -> dict[str, float]:
    """One run; seconds from each event to the end of the first step that all ranks then make."""
    from torch.distributed import TCPStore

    port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # free again
    nodes: dict[str, Node] = {}

    def wait(what: str, found: Callable[[], float | None]) -> float:
        until = time.monotonic() + DEADLINE
        while (value := found()) is None:
            ended = [name for name, node in nodes.items() if node.agent.poll() is not None]
            if ended or time.monotonic() > until:
                logs = "".join(
                    f"\n--- {path.name}\n" + "".join(path.read_text().splitlines(True)[-60:])
                    for path in sorted(folder.glob("*.log"))
                )
                why = f"torchrun of node {ended[0]} ended" if ended else f"{DEADLINE} s passed"
                raise RuntimeError(f"{way}: {why}, waiting until {what}{logs}")
            time.sleep(0.05)
        return value

    def steps_of(world: int, after: float, count: int = 1) -> float | None:
        """When all ranks of a new attempt had made `count` steps; None if they have not."""
        new = [r["attempt"] for r in recorded(folder) if "begins" in r and r["time"] > after]
        ends = [
            r["time"]
            for r in recorded(folder)
            if new and r["attempt"] == new[-1] and r["world"] == world and "begins" not in r
        ]
        return ends[world * count - 1] if len(ends) >= world * count else None

    def settle(name: str, world: int, since: float) -> None:
        """Waits until the ranks of an attempt made since then have trained for a while."""
        what = f"{world} ranks make a step after {name}"
        found[name] = wait(what, lambda: steps_of(world, since)) - since
        wait(what, lambda: steps_of(world, since, STEPS))

    def goes_on(name: str, since: float) -> None:
        """Waits until the ranks that are left have trained for a while."""

        def steps() -> float | None:
            # A step that was under way may be of all ranks still.
            ends = [r["time"] for r in recorded(folder) if r["time"] > since and "begins" not in r]
            return ends[2 * RANKS] if len(ends) >= STEPS * RANKS else None

        found[name] = wait(f"the others go on after {name}", steps) - since

    found: dict[str, float] = {}
    try:
        start = time.monotonic()
        nodes["a"] = Node("a", way, folder, port, env or {})
        settle("start_s", RANKS, start)
        start = time.monotonic()
        nodes["b"] = Node("b", way, folder, port, env or {})
        settle("join_s", 2 * RANKS, start)
        start = time.monotonic()
        os.kill([r["pid"] for r in recorded(folder) if r["node"] == "b"][-1], signal.SIGKILL)
        settle("rank_lost_s", 2 * RANKS, start)
        start = time.monotonic()
        nodes.pop("b").kill()
        if (env or {}).get("RINGREDUCE_ON_LOSS") == "continue":  # without a new start
            goes_on("node_lost_s", start)
        else:
            settle("node_lost_s", RANKS, start)
        start = time.monotonic()
        nodes["b"] = Node("b", way, folder, port, env or {})
        settle("join_again_s", 2 * RANKS, start)
        (folder / "stop").touch()
        for name, node in nodes.items():
            status = node.agent.wait(DEADLINE)
            if status:
                raise RuntimeError(f"{way}: torchrun of node {name} ended with status {status}")
    finally:
        (folder / "stop").touch()  # also for ranks that outlive their agent
        for node in nodes.values():
            node.end()
    check(recorded(folder))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, help="a file for all figures")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        train(WAYS[args.way], args.folder)
        return
    if args.runs < 1:
        parser.error("--runs must be at least 1")

    from _ways import by_turns, print_table, write

    def once(way: str) -> dict[str, float]:
        with TemporaryDirectory() as folder:
            return run(way, Path(folder))

    found = by_turns(args.ways, args.runs, once)
    print_table("until all ranks end a step, after", FIGURES, found, digits=1)
    if args.out:
        write(args.out, {"rendezvous": RENDEZVOUS, "ranks_of_a_node": RANKS}, found)


if __name__ == "__main__":
    main()
