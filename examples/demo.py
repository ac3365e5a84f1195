"""Trains two real models over gloo and over ringreduce, and compares losses, weights and times.

    python examples/demo.py           # a minute on two cores
    python examples/demo.py --full    # two to three minutes

1. train_gpt.py, a character GPT on the source of Python's standard library, once per backend.
   With two ranks a + b = b + a, so both runs must agree in every bit; that is checked.
2. train_mlp.py's wide MLP on handwritten digits, where sync dominates: gloo, ringreduce as the
   backend, ringreduce as a hook beside gloo, and no sync at all, in turns, so that whatever
   else the machine does hits all alike. They are eight processes of about half a GB each.

Writes demo.png, demo.json and the ranks' logs to ./demo-out. The exit status is 0 only if all
runs ended well and agreed in every bit.
"""

import argparse
import importlib.util
import json
import statistics
import struct
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _demo_report
from _launch import Job, machine, run_demo
from tqdm import tqdm

from ringreduce.tools.bench.results import write_json

HERE = Path(__file__).resolve().parent
RANKS = 2
GPT_SECONDS = 600  # deadlines: a whole run of the GPT, and the whole comparison of the MLP
MLP_SECONDS = 600
NOT_TIMED = 2  # first steps of a round: caches are cold from the contender before
TIMED = 6


@dataclass(frozen=True)
class Contender:
    """A way to train the MLP: a name for tables and the arguments of _demo_mlp.py."""

    name: str
    arguments: tuple[str, ...]


def first_difference(ours: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """Where two runs differ, over the records of all their ranks; "" where every bit agrees."""
    for rank, (a, b) in enumerate(zip(ours, base, strict=True)):
        if len(a["losses"]) != len(b["losses"]):
            return f"rank {rank}: not the same number of steps"
        for step, pair in enumerate(zip(a["losses"], b["losses"], strict=True)):
            if struct.pack("d", pair[0]) != struct.pack("d", pair[1]):
                return f"rank {rank}, step {step}: losses {pair[0]!r} and {pair[1]!r}"
        if a["weights_hash"] != b["weights_hash"]:
            return f"rank {rank}: the losses are equal, the weights at the end are not"
    return ""


def train_gpt(labels: dict[str, str], steps: int, out: Path) -> dict[str, Any]:
    """Runs train_gpt.py once per backend; the first one is what the others are compared with."""
    print(
        f"1. Character GPT on the standard library's source, {RANKS} ranks, {steps} steps",
        flush=True,
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    for label, backend in labels.items():
        records = out / "records" / label
        command = [str(HERE / "train_gpt.py"), "--backend", backend, "--steps", str(steps)]
        command += ["--sync-pairs", str(min(steps, 20)), "--record", str(records)]
        with Job(f"gpt-{label}", command, out / "logs", GPT_SECONDS, terminal=True) as job:
            job.wait()
        runs[label] = [json.loads((records / f"rank{r}.json").read_text()) for r in range(RANKS)]

    base = next(iter(runs))
    result: dict[str, Any] = {"ranks": RANKS, "steps": steps, "runs": {}}
    for label, ranks in runs.items():
        curve = [statistics.mean(all_) for all_ in zip(*(r["losses"] for r in ranks), strict=True)]
        copied = ("held_out_loss", "tokens_per_s", "parameters", "sample")
        result["runs"][label] = (
            {key: ranks[0][key] for key in copied}
            | {
                "losses": curve,  # mean of the ranks
                "final_loss": statistics.mean(curve[-20:]),
                "sync_ms": statistics.mean(r["sync_ms"] for r in ranks),
                "step_ms": statistics.mean(r["step_ms"] for r in ranks),
                "no_sync_ms": statistics.mean(r["no_sync_ms"] for r in ranks),
                "differs": first_difference(ranks, runs[base]),
            }
        )
    return result


def train_mlp(contenders: list[Contender], width: int, rounds: int, out: Path) -> dict[str, Any]:
    """Trains one MLP per contender, in turns of a few steps; the first one is the base."""
    print(f"\n2. Wide MLP on handwritten digits, {RANKS} ranks, in turns: ", end="")
    print(", ".join(contender.name for contender in contenders), flush=True)
    losses: dict[str, list[list[float]]] = {c.name: [[] for _ in range(RANKS)] for c in contenders}
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    with ExitStack() as stack:
        jobs = {}
        for c in contenders:
            command = [str(HERE / "_demo_mlp.py"), "--width", str(width), *c.arguments]
            job = Job(f"mlp-{c.name}", command, out / "logs", MLP_SECONDS, conversation=True)
            jobs[c.name] = stack.enter_context(job)

        # The first round starts everybody up, so nothing of it is timed.
        bar = stack.enter_context(tqdm(total=1 + rounds, desc="    rounds", unit="round"))
        for turn in range(1 + rounds):
            shift = turn % len(contenders)  # so that no one always follows the same other
            for c in contenders[shift:] + contenders[:shift]:
                for rank, answer in enumerate(jobs[c.name].ask(f"train {NOT_TIMED + TIMED}")):
                    losses[c.name][rank] += answer["losses"]
                    if turn > 0:
                        times[c.name] += answer["step_ms"][NOT_TIMED:]
            if turn > 0:
                medians = (f"{c.name} {statistics.median(times[c.name]):.0f}" for c in contenders)
                bar.set_postfix_str("ms a step: " + ", ".join(medians), refresh=False)
            bar.update()

        ends = {}
        for name, job in jobs.items():
            ends[name] = job.ask("finish")
            job.wait()

    records = {
        name: [{"losses": losses[name][rank]} | end for rank, end in enumerate(ranks)]
        for name, ranks in ends.items()
    }
    base = contenders[0].name
    alone = next(c.name for c in contenders if "--no-sync" in c.arguments)
    medians_ms = {name: statistics.median(values) for name, values in times.items()}
    result: dict[str, Any] = {"ranks": RANKS, "no_sync": alone, "runs": {}}
    for name, ranks in records.items():
        low, _, high = statistics.quantiles(times[name], n=4)
        run = {"step_ms": medians_ms[name], "quartiles_ms": [low, high], "steps": len(times[name])}
        if name != alone:  # there every rank has its own weights: only its time means something
            run |= {
                "sync_ms": medians_ms[name] - medians_ms[alone],
                "speedup": medians_ms[base] / medians_ms[name],
                "test_accuracy": ranks[0]["test_accuracy"],
                "differs": first_difference(ranks, records[base]),
            }
        result["runs"][name] = run
    return result


def compare(args: argparse.Namespace) -> bool:
    """Runs both parts and reports them; whether all runs agreed in every bit."""
    began = time.monotonic()
    first, second = args.backends
    labels = {first: first, second if second != first else f"{second}-again": second}
    contenders = [Contender(label, ("--backend", backend)) for label, backend in labels.items()]
    if second == "ringreduce":
        contenders.append(Contender("ringreduce-hook", ("--backend", first, "--hook")))
    contenders.append(Contender("no-sync", ("--backend", first, "--no-sync")))

    gpt = train_gpt(labels, args.gpt_steps, args.out)
    mlp = train_mlp(contenders, args.mlp_width, args.mlp_rounds, args.out)
    results = {
        "machine": machine(),
        "seconds": time.monotonic() - began,
        "gpt": gpt,
        "mlp": mlp,
    }
    write_json(args.out / "demo.json", results)
    _demo_report.plot(results, args.out / "demo.png")
    print(_demo_report.summary(results, args.out))
    return not any(run.get("differs") for part in (gpt, mlp) for run in part["runs"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--backends",
        type=lambda text: text.split(","),
        default=["gloo", "ringreduce"],
        help="two names, base first: gloo,ringreduce; gloo,gloo shows what noise does",
    )
    parser.add_argument("--full", action="store_true", help="train for longer")
    parser.add_argument("--gpt-steps", type=int, help="default: 100, or 350 with --full")
    parser.add_argument(
        "--mlp-rounds", type=int, help=f"of {TIMED} timed steps each; default: 4, or 12 with --full"
    )
    parser.add_argument("--mlp-width", type=int, default=4096, help="of its hidden layers")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    args = parser.parse_args()
    args.gpt_steps = args.gpt_steps or (350 if args.full else 100)
    args.mlp_rounds = args.mlp_rounds or (12 if args.full else 4)
    if len(args.backends) != 2:
        parser.error("--backends takes two names with a comma between")
    if "ringreduce" in args.backends and importlib.util.find_spec("ringreduce") is None:
        print("ringreduce is not installed in this Python: see the README", file=sys.stderr)
        return 1

    return run_demo(lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
