"""Outer steps on a slow line beside DDP and torch's LocalSGD: the share of time that ranks compute,
tokens and bytes.

    python benchmarks/net/diloco.py      # 100 Mbit/s, 50 ms each way, 0.1 % lost, as root
    python benchmarks/net/diloco.py --rounds 1 -- --steps 60 --overlap 0

Hosts are network namespaces of this machine (tests/hosts.py), with a rank each that runs
examples/train_diloco.py; what follows `--` goes to it.  The same program runs on the line and on
one of no delay and no limit, in turns.  *Utilisation* is its time there over its time on the line.
DDP makes a tenth of the steps, since each takes so long.

Then host 1 takes twice the time for a step, with rounds by steps and by time.  There utilisation is
the steps of all ranks over those that they would have made alone, by their median step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

from hosts import Hosts, HostsError, why_not  # noqa: E402
from train_gpt import CONTEXT  # noqa: E402

WAYS = ("DDP", "LocalSGD", "DiLoCo")
# Of one sequence a step: ranks compute as little for each byte of a gradient as accelerators do.
PROGRAM = ("--steps", "300", "--layers", "8", "--width", "256", "--batch", "1",
           "--fragments", "2", "--overlap", "10")  # fmt: skip


@dataclass
class _Run:
    seconds: float
    tokens: float
    utilisation: float
    megabytes: float  # that rank 0 has sent for a step


def run(hosts: Hosts, program: Sequence[str], way: str, timeout: float) -> list[Any]:
    """What each rank recorded.  Raises HostsError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples/train_diloco.py"), *program]
        hosts.start([*command, "--ways", way, "--record", folder]).outputs(timeout)
        files = [Path(folder, f"rank{rank}.json") for rank in range(len(hosts))]
        return [json.loads(file.read_text()) for file in files]


def each_way(hosts: Hosts, program: Sequence[str], steps: int, timeout: float) -> dict[str, Any]:
    """By the way, what each rank recorded of it."""
    cut = {"DDP": ["--steps", str(max(1, steps // 10))]}
    return {way: run(hosts, [*program, *cut.get(way, [])], way, timeout) for way in WAYS}


def of_way(records: Sequence[Any], way: str, alone: float | None = None) -> _Run:
    """A way of one run.  `alone`: its seconds on the free line; none: by the median steps."""
    ranks = [record[way] for record in records]
    steps, seconds = sum(rank["steps"] for rank in ranks), ranks[0]["seconds"]
    possible = sum(rank["seconds"] / rank["step_seconds"] for rank in ranks)
    return _Run(
        seconds,
        steps * records[0]["batch"] * CONTEXT,
        steps / possible if alone is None else alone / seconds,
        ranks[0]["bytes"] / 1e6 / ranks[0]["steps"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=50.0, help="one way (50)")
    parser.add_argument("--loss", type=float, default=0.001, help="share of packets (0.001)")
    parser.add_argument("--rounds", type=int, default=3, help="runs on each line, in turns (3)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one run (900)")
    parser.add_argument("program", nargs="*", metavar="-- ARGUMENT", help="of train_diloco.py")
    options = parser.parse_args(arguments)
    if min(options.hosts - 1, options.rounds) < 1:
        parser.error("--hosts are at least 2, and --rounds at least 1")
    if reason := why_not():
        print(f"diloco.py: no hosts here: {reason}", file=sys.stderr)
        return 1
    program = options.program or PROGRAM
    of_program = argparse.ArgumentParser(add_help=False)
    of_program.add_argument("--steps", type=int, default=300)
    steps = of_program.parse_known_args(program)[0].steps
    line = {"delay_ms": options.delay_ms, "rate_mbit": options.rate_mbit, "loss": options.loss}
    found: dict[str, list[_Run]] = {}
    try:
        for _ in range(options.rounds):
            with Hosts(options.hosts) as hosts:
                free = each_way(hosts, program, steps, options.timeout)
            with Hosts(options.hosts, **line) as hosts:
                slow = each_way(hosts, program, steps, options.timeout)
                for way in WAYS:
                    one = of_way(slow[way], way, free[way][0][way]["seconds"])
                    found.setdefault(way, []).append(one)
                uneven = [*program, "--half-speed", "1"]
                alone = free["DiLoCo"][0]
                every = alone["sync_every"] * alone["DiLoCo"]["step_seconds"]
                for by, more in (("steps", []), ("time", ["--sync-seconds", f"{every:.3f}"])):
                    records = run(hosts, [*uneven, *more], "DiLoCo", options.timeout)
                    found.setdefault(f"uneven, by {by}", []).append(of_way(records, "DiLoCo"))
    except HostsError as error:
        print(f"diloco.py: {error}", file=sys.stderr)
        return 1
    print(f"{options.hosts} hosts, {options.rate_mbit:g} Mbit/s, {options.delay_ms:g} ms each way, "
          f"{options.loss:.1%} lost; {' '.join(program)}")  # fmt: skip
    print(f"{'':<17}{'tokens/s':>9}{'from':>8}{'to':>8}{'x DDP':>7}{'utilisation':>13}"
          f"{'MB a step':>11}")  # fmt: skip
    rates = {way: [run.tokens / run.seconds for run in runs] for way, runs in found.items()}
    ddp = statistics.median(rates["DDP"])
    for way, runs in found.items():
        rate, share = statistics.median(rates[way]), statistics.median(r.utilisation for r in runs)
        print(f"{way:<17}{rate:>9.0f}{min(rates[way]):>8.0f}{max(rates[way]):>8.0f}"
              f"{rate / ddp:>7.1f}{share:>13.1%}{runs[-1].megabytes:>11.3f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    # torch's store asks for the names of addresses, which a namespace has nobody to ask for.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
