"""Kills a rank of a training run: ringreduce.elastic, and torchrun's restarts with checkpoints.

    python benchmarks/survive.py --out survive_ways.json

All train the character GPT of examples/train_gpt.py on one host.  With ringreduce.elastic the
others go on and a new process joins.  torchrun starts all ranks again, from the last checkpoint;
the script is the same for gloo and for ringreduce ("restarted"), but for the name.  The rank is
killed half-way between two checkpoints.  The ways take turns; figures are medians of the runs, with
the lowest and the highest.

If torchft is installed, two more ways train with its Manager, over Gloo and over ringreduce.  Each
rank is a replica group, and the lighthouse runs here, with torchft's heartbeat timeout of 5 s.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RESTARTED = ("gloo", "restarted")  # all ranks, by torchrun
TORCHRUN = ["torch.distributed.run", "--standalone", "--max-restarts=3", "--nproc-per-node"]
LAUNCHERS = {"ringreduce": ["ringreduce.supervise", "--nproc"]} | dict.fromkeys(RESTARTED, TORCHRUN)
if importlib.util.find_spec("torchft"):
    LAUNCHERS |= dict.fromkeys(("torchft_gloo", "torchft_ringreduce"), LAUNCHERS["ringreduce"])
# Else torchrun's ranks find the last start's addresses in its store (pytorch/pytorch#135712).
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
VICTIM, WATCHED = 1, 0
DEADLINE = 300  # seconds of a run
FIGURES = {
    "next_step_s": "until the next step ends, s",
    "regained_s": "until a step ends that is new, s",
    "all_ranks_s": "until a step of all ranks ends, s",
    "repeated_steps": "steps done again",
    "step_ms": "usual step, ms",
}


def train_with_torchft(way: str, folder: Path, width: int) -> None:
    """A replica group of one rank: trains until it is stopped, and records each step."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import torch.distributed as dist
    import torchft
    from train_gpt import GPT, load_text, random_batch, text_loss

    from ringreduce.torchft import ProcessGroupRingReduce

    class Replicated(torchft.DistributedDataParallel):
        """torchft 0.2's own hook ends the program where an all-reduce fails."""

        @staticmethod
        def _comm_hook(state, bucket):  # torch refuses annotations that are strings
            state.allreduce(bucket.buffer()).wait()
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    torch.set_num_threads(1)
    text, _ = load_text(1 << 20)
    net = GPT(2, width)
    inner = torch.optim.AdamW(net.parameters())

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    rank = int(os.environ["RANK"])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = way == "torchft_ringreduce"
    manager = torchft.Manager(
        pg=ProcessGroupRingReduce() if ours else torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{rank}",
        store_addr="127.0.0.1",
        store_port=server.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    model, optimizer = Replicated(manager, net), torchft.Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(rank)
    with (folder / f"{rank}.jsonl").open("a", buffering=1) as record:
        record.write(json.dumps({"pid": os.getpid(), "time": time.monotonic()}) + "\n")
        while True:
            optimizer.zero_grad()
            text_loss(model, *random_batch(text, generator)).backward()
            optimizer.step()
            step, live = manager.current_step(), manager.num_participants()
            line = {"pid": os.getpid(), "time": time.monotonic(), "live": live}
            line |= {"void": True} if manager.errored() else {"step": step}
            record.write(json.dumps(line) + "\n")


@contextmanager
def lighthouse(ranks: int) -> Iterator[dict[str, str]]:
    """torchft's, and the variable with its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=ranks - 1, quorum_tick_ms=100, join_timeout_ms=10000
    )
    port = server.address().rsplit(":", 1)[1]
    try:
        yield {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    finally:
        server.shutdown()


def train(way: str, folder: Path, checkpoint_every: int, width: int) -> None:
    """A rank: trains until it is stopped, and records each step."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from train_gpt import GPT, load_text, random_batch, text_loss

    import ringreduce
    from ringreduce import elastic

    torch.set_num_threads(1)
    text, _ = load_text(1 << 20)
    net = GPT(2, width)
    if way in RESTARTED:
        dist.init_process_group("gloo" if way == "gloo" else "ringreduce")
        model = DistributedDataParallel(net)
    else:
        ringreduce.init(pg_options=ringreduce.Options(on_loss="continue"))
        model = DistributedDataParallel(net, init_sync=False)
        ringreduce.register_comm_hook(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = folder / "checkpoint.pt"
    first, state = 1, None
    if way == "ringreduce":
        state = elastic.State(model=model, optimizer=optimizer, step=0)
        state.restore()
        first = state.step + 1
    elif saved.exists():
        checkpoint = torch.load(saved)
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"] + 1
    generator = torch.Generator().manual_seed(rank)
    with (folder / f"{rank}.jsonl").open("a", buffering=1) as record:
        record.write(json.dumps({"pid": os.getpid(), "time": time.monotonic()}) + "\n")
        for step in itertools.count(first):
            loss = text_loss(model, *random_batch(text, generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state is not None:
                state.step = step
                state.commit()
            elif rank == 0 and step % checkpoint_every == 0:
                content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**content, "step": step}, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)
            live = size if state is None else len(state.live_ranks)
            line = {"pid": os.getpid(), "time": time.monotonic(), "step": step, "live": live}
            record.write(json.dumps(line) + "\n")


def recorded(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has recorded so far, the beginnings of its processes included."""
    path = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def figures(records: list[dict[str, Any]], died: float, ranks: int) -> dict[str, float] | None:
    """Of one run, by what a rank that was not killed has recorded; None if it is not over yet."""
    steps = [r for r in records if "step" in r]
    steps = list(itertools.dropwhile(lambda r: r["live"] < ranks, steps))
    pid = steps[0]["pid"]
    # The first record without the dead rank: of fewer ranks, or of processes that were restarted.
    split = next((i for i, r in enumerate(steps) if r["live"] < ranks or r["pid"] != pid), None)
    if split is None:
        return None
    before, after = steps[:split], steps[split:]
    last = before[-1]["step"]
    regained = next((r for r in after if r["step"] > last), None)
    # The record in which a rank joins is of a step that it did not take part in.
    joined = [b for a, b in itertools.pairwise([after[0], *after]) if a["live"] == ranks]
    if regained is None or not joined:
        return None
    times = [b["time"] - a["time"] for a, b in itertools.pairwise(before[5:])]
    return {
        "next_step_s": after[0]["time"] - died,
        "regained_s": regained["time"] - died,
        "all_ranks_s": joined[0]["time"] - died,
        "repeated_steps": sum(r["step"] <= last for r in after) + sum("void" in r for r in records),
        "step_ms": 1e3 * statistics.median(times),
    }


def run(way: str, args: argparse.Namespace, folder: Path, env: dict[str, str]) -> dict[str, float]:
    """One run with one death."""
    command = [sys.executable, "-m", *LAUNCHERS[way], str(args.nproc), __file__, "--way", way]
    command += ["--folder", str(folder), "--checkpoint-every", str(args.checkpoint_every)]
    command += ["--width", str(args.width)]
    deadline = time.monotonic() + DEADLINE
    with (folder / "log").open("w+") as log:
        launcher = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | ENVIRONMENT | env,
            start_new_session=True,
        )
        try:
            died, found = 0.0, None
            while found is None:
                time.sleep(0.01)
                if launcher.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    end = "".join(log.readlines()[-40:])
                    raise RuntimeError(f"{way} ended early or took too long:\n{end}")
                records = recorded(folder, WATCHED)
                together = sum(r.get("live") == args.nproc for r in records)
                if died:
                    found = figures(records, died, args.nproc)
                elif together >= args.checkpoint_every * 3 // 2:
                    victim = recorded(folder, VICTIM)[-1]["pid"]
                    died = time.monotonic()
                    os.kill(victim, signal.SIGKILL)
        finally:
            launcher.terminate()
            launcher.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=4, help="ranks")
    parser.add_argument("--runs", type=int, default=3, help="of each way")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps, with torchrun")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 4")
    parser.add_argument("--ways", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--out", type=Path, help="a file for all figures")
    parser.add_argument("--way", choices=LAUNCHERS, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way and args.way.startswith("torchft"):
        train_with_torchft(args.way, args.folder, args.width)
        return
    if args.way:
        train(args.way, args.folder, args.checkpoint_every, args.width)
        return
    if args.nproc < 2 or args.runs < 1 or args.checkpoint_every < 10:
        parser.error("--nproc must be at least 2, --runs 1 and --checkpoint-every 10")

    from _ways import by_turns, print_table, write

    def once(way: str) -> dict[str, float]:
        around = lighthouse(args.nproc) if way.startswith("torchft") else nullcontext({})
        with TemporaryDirectory() as folder, around as env:
            return run(way, args, Path(folder), env)

    found = by_turns(args.ways, args.runs, once)
    print(f"{args.nproc} ranks, torchrun's checkpoint every {args.checkpoint_every} steps")
    print_table("after the death of a rank", FIGURES, found, digits=2)
    if args.out:
        settings = {key: getattr(args, key) for key in ("nproc", "checkpoint_every", "width")}
        write(args.out, settings, found)


if __name__ == "__main__":
    main()
