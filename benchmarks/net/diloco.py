"""Outer steps on a slow line beside DDP and torch's LocalSGD: the share of time that ranks compute,
tokens, loss and bytes.

    python benchmarks/net/diloco.py      # 100 Mbit/s, 50 ms each way, 0.1 % lost, as root
    python benchmarks/net/diloco.py --rounds 1 -- --steps 60 --overlap 0

Hosts are network namespaces of this machine (tests/hosts.py), with a rank each that runs
examples/train_diloco.py; what follows `--` goes to it.  The same program runs on the line and on
one of no delay and no limit, in turns.  *Utilisation* is its time there over its time on the line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

from hosts import Hosts, HostsError, why_not  # noqa: E402
from train_gpt import BATCH, CONTEXT  # noqa: E402

WAYS = ("DDP", "LocalSGD", "DiLoCo")


def run(hosts: Hosts, program: Sequence[str], timeout: float) -> dict[str, Any]:
    """What rank 0 recorded of all ways.  Raises HostsError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples/train_diloco.py"), *program]
        command += ["--ways", ",".join(WAYS), "--record", folder]
        hosts.start(command).outputs(timeout)
        record: dict[str, Any] = json.loads(Path(folder, "rank0.json").read_text())
        return record


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
    program = options.program or ["--steps", "120", "--fragments", "2", "--overlap", "5"]
    line = {"delay_ms": options.delay_ms, "rate_mbit": options.rate_mbit, "loss": options.loss}
    seconds: dict[tuple[str, bool], list[float]] = {}
    try:
        for _ in range(options.rounds):
            for slow in (False, True):
                with Hosts(options.hosts, **(line if slow else {})) as hosts:
                    record = run(hosts, program, options.timeout)
                for way in WAYS:
                    seconds.setdefault((way, slow), []).append(record[way]["seconds"])
    except HostsError as error:
        print(f"diloco.py: {error}", file=sys.stderr)
        return 1
    steps = record["steps"]
    print(f"{options.hosts} hosts, {options.rate_mbit:g} Mbit/s, {options.delay_ms:g} ms each way, "
          f"{options.loss:.1%} lost; {steps} steps; {' '.join(program)}")  # fmt: skip
    print(f"{'':<8}{'seconds':>9}{'from':>9}{'to':>9}{'tokens/s':>10}{'x DDP':>7}"
          f"{'utilisation':>13}{'loss':>8}{'MB':>9}")  # fmt: skip
    tokens = BATCH * CONTEXT * options.hosts * steps
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    for way in WAYS:
        times, median = seconds[way, True], medians[way, True]
        gain, ended = medians["DDP", True] / median, record[way]
        print(f"{way:<8}{median:>9.1f}{min(times):>9.1f}{max(times):>9.1f}"
              f"{tokens / median:>10.0f}{gain:>7.1f}{medians[way, False] / median:>13.1%}"
              f"{ended['held_out_loss']:>8.4f}{ended['bytes'] / 1e6:>9.2f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    # torch's store asks for the names of addresses, which a namespace has nobody to ask for.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
