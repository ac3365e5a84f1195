"""Kills a rank of a training run: ringreduce.elastic, and Gloo under torchrun with checkpoints.

    python benchmarks/survive.py --out survive_gloo.json

Both train the character GPT of examples/train_gpt.py on one host.  With ringreduce the others go on
and a new process joins; torchrun starts all ranks again, from the last checkpoint.  The rank is
killed half-way between two checkpoints.  The ways take turns; figures are medians of the runs, with
the lowest and the highest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LAUNCHERS = {
    "ringreduce": ["ringreduce.supervise", "--nproc"],
    "gloo": ["torch.distributed.run", "--standalone", "--max-restarts=3", "--nproc-per-node"],
}
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
    if way == "gloo":
        dist.init_process_group("gloo")
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
        "repeated_steps": sum(r["step"] <= last for r in after),
        "step_ms": 1e3 * statistics.median(times),
    }


def run(way: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One run with one death."""
    command = [sys.executable, "-m", *LAUNCHERS[way], str(args.nproc), __file__, "--way", way]
    command += ["--folder", str(folder), "--checkpoint-every", str(args.checkpoint_every)]
    command += ["--width", str(args.width)]
    deadline = time.monotonic() + DEADLINE
    with (folder / "log").open("w+") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
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
                step = records[-1].get("step", 0) if records else 0
                if died:
                    found = figures(records, died, args.nproc)
                elif step >= args.checkpoint_every * 3 // 2:
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
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps, with Gloo")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 4")
    parser.add_argument("--out", type=Path, help="a file for all figures")
    parser.add_argument("--way", choices=LAUNCHERS, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        train(args.way, args.folder, args.checkpoint_every, args.width)
        return
    if args.nproc < 2 or args.runs < 1 or args.checkpoint_every < 10:
        parser.error("--nproc must be at least 2, --runs 1 and --checkpoint-every 10")

    found: dict[str, list[dict[str, float]]] = {way: [] for way in LAUNCHERS}
    for number in range(args.runs):
        for way in LAUNCHERS if number % 2 == 0 else reversed(LAUNCHERS):
            with TemporaryDirectory() as folder:
                found[way].append(run(way, args, Path(folder)))
            print(f"run {number + 1}, {way}: {found[way][-1]}", file=sys.stderr, flush=True)

    print(f"{args.nproc} ranks, Gloo's checkpoint every {args.checkpoint_every} steps")
    print(f"{'after the death of a rank':<36}" + "".join(f"{way:>28}" for way in found))
    for key, title in FIGURES.items():
        cells = []
        for runs in found.values():
            values = [one[key] for one in runs]
            low, high = min(values), max(values)
            cells.append(f"{statistics.median(values):.2f} ({low:.2f}-{high:.2f})")
        print(f"{title:<36}" + "".join(f"{cell:>28}" for cell in cells))
    if args.out:
        settings = {key: getattr(args, key) for key in ("nproc", "checkpoint_every", "width")}
        machine = {"cores": os.cpu_count(), "processor": platform.machine()}
        content = {"settings": settings, "machine": machine, "runs": found}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
