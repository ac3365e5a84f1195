"""Kills a rank in the middle of a training run, lets a new process join, and shows what it cost.

    python examples/demo_survive.py    # a minute on two cores

Four ranks train the character GPT by train_elastic.py.  After a third of the steps rank 0 gets
SIGKILL; after two thirds a new process is started in its place, which joins when it has imported
torch.  The ranks never stop between.

Writes survive.png, survive.json, the ranks' records and their logs to ./demo-out.  The exit status
is 0 only if the loss and the join were logged once each, no step was lost or done again, and all
ranks end with the same weights.
"""

import argparse
import json
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import _demo_report
from _launch import Job, JobFailed, machine, run_demo
from tqdm import tqdm

from ringreduce.tools.bench.results import write_json

HERE = Path(__file__).resolve().parent
SECONDS = 600  # deadline
LOGGED = re.compile(r"rank .* is lost: .*|rank .* joined; .*")


def train(args: argparse.Namespace) -> dict[str, float]:
    """Runs train_elastic.py with the kill and the new process; the times of both."""
    records = args.out / "survive"
    shutil.rmtree(records, ignore_errors=True)  # ranks append
    command = [str(HERE / "train_elastic.py"), "--steps", str(args.steps)]
    command += ["--record", str(records)]
    watched = records / f"steps{(args.victim + 1) % args.ranks}.jsonl"  # it is not killed
    times: dict[str, float] = {}
    interval = 0.1 if sys.stderr.isatty() else 10
    bar = tqdm(total=args.steps, desc="training", unit="step", mininterval=interval)
    with bar, Job("survive", command, args.out / "logs", SECONDS, nproc=args.ranks) as job:
        while not job.ended():
            time.sleep(0.02)
            step = watched.read_bytes().count(b"\n") if watched.exists() else 0
            if step > bar.n:
                bar.update(step - bar.n)
            if "kill" not in times and step >= args.steps // 3:
                pid = job.ranks[args.victim].pid
                bar.write(f"step {step}: SIGKILL to rank {args.victim} (pid {pid})")
                times["kill"] = time.monotonic()
                job.kill(args.victim)
            if "start" not in times and step >= args.steps * 2 // 3:
                times["start"] = time.monotonic()
                job.start(args.victim)
                pid = job.ranks[args.victim].pid
                bar.write(f"step {step}: process {pid} is started as rank {args.victim}")
    return times


def read_steps(args: argparse.Namespace) -> list[dict[int, dict[str, Any]]]:
    """For each step, from the first on, its records by rank.

    Raises JobFailed if a rank has done a step twice, or if the ranks disagree on who lives.
    """
    steps: list[dict[int, dict[str, Any]]] = [{} for _ in range(args.steps)]
    for rank in range(args.ranks):
        for line in (args.out / "survive" / f"steps{rank}.jsonl").read_text().splitlines():
            record = json.loads(line)
            ranks = steps[record["step"] - 1]
            if rank in ranks:
                raise JobFailed(f"rank {rank} did step {record['step']} twice")
            ranks[rank] = record
    for number, ranks in enumerate(steps, 1):
        if len({str(record["live"]) for record in ranks.values()}) != 1:
            raise JobFailed(f"the ranks do not agree on who lives after step {number}: {ranks}")
    return steps


def live_ranks(ranks: dict[int, dict[str, Any]]) -> list[int]:
    """After a step, on which all ranks agree."""
    live: list[int] = next(iter(ranks.values()))["live"]
    return live


def lost_steps(steps: list[dict[int, dict[str, Any]]], victim: int) -> list[int]:
    """The steps that were not recorded once by every rank that lived in them."""
    lost = []
    live = set(steps[0])
    for number, ranks in enumerate(steps, 1):
        after = set(live_ranks(ranks))
        # A rank that joins in a step's commit takes part from the next on.  The killed rank may
        # have been killed before it could write the record of its last step.
        missing = (live & after).difference(ranks)
        is_last = number < len(steps) and victim not in steps[number]
        if missing and not (missing == {victim} and is_last):
            lost.append(number)
        live = after
    return lost


def measure(
    steps: list[dict[int, dict[str, Any]]], victim: int, times: dict[str, float]
) -> dict[str, Any]:
    """Where the rank was lost and joined, and how long those steps took, on the slowest rank."""
    live = [live_ranks(ranks) for ranks in steps]
    lost = next((n for n, ranks in enumerate(live) if victim not in ranks), None)
    joined = lost and next((n for n, r in enumerate(live) if n > lost and victim in r), None)
    if lost is None or joined is None:
        raise JobFailed(f"rank {victim} was not lost, or no new one joined; live ranks: {live}")

    def slowest(number: int, what: str) -> float:
        return 1e3 * max(record[what] for record in steps[number].values())

    usual = [n for n in range(5, len(steps)) if n not in (lost, joined)]
    return {
        "losses": [statistics.mean(r["loss"] for r in ranks.values()) for ranks in steps],
        "lost_in_step": lost + 1,
        "joined_in_step": joined + 1,
        "step_ms": statistics.median(slowest(n, "seconds") for n in usual),
        "step_90_ms": statistics.quantiles([slowest(n, "seconds") for n in usual], n=10)[-1],
        "commit_ms": statistics.median(slowest(n, "commit") for n in usual),
        "loss_step_ms": slowest(lost, "seconds"),
        "join_commit_ms": slowest(joined, "commit"),
        "kill_to_next_step_ms": 1e3
        * (max(r["time"] for r in steps[lost].values()) - times["kill"]),
        "start_to_join_s": max(r["time"] for r in steps[joined].values()) - times["start"],
    }


def show(args: argparse.Namespace) -> bool:
    """Runs it and reports; whether all held."""
    began = time.monotonic()
    print(f"Character GPT, {args.ranks} ranks, {args.steps} steps", flush=True)
    times = train(args)
    logs = [(args.out / "logs" / f"survive-rank{r}.log").read_text() for r in range(args.ranks)]
    logged = [line for log in logs for line in LOGGED.findall(log)]
    logged.sort(key=lambda line: " joined; " in line)
    steps = read_steps(args)
    lost = lost_steps(steps, args.victim)
    ends = [
        json.loads((args.out / "survive" / f"rank{r}.json").read_text()) for r in range(args.ranks)
    ]
    results = {
        "machine": machine(),
        "ranks": args.ranks,
        "victim": args.victim,
        "seconds": time.monotonic() - began,
        "logged": logged,
        "lost_steps": lost,
        "equal_weights": len({end["weights_hash"] for end in ends}) == 1,
        **measure(steps, args.victim, times),
    }
    write_json(args.out / "survive.json", results)
    _demo_report.plot_survival(results, args.out / "survive.png")
    print(_demo_report.survival(results, args.out))
    told = [sum(word in line for line in logged) for word in (" is lost: ", " joined; ")]
    return told == [1, 1] and not lost and results["equal_weights"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--victim", type=int, default=0, help="the rank that is killed")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    args = parser.parse_args()
    if not 0 <= args.victim < args.ranks or args.ranks < 2:
        parser.error("--victim must be one of two ranks or more")
    return run_demo(lambda: show(args))


if __name__ == "__main__":
    sys.exit(main())
