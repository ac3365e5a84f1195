"""How the error of a compressed all-reduce grows with the number of ranks, by codec and schedule.

    python benchmarks/codec_error.py
    python benchmarks/codec_error.py --worlds 2,3,5 --codecs int8 --out error.json

Every rank has values of its own as gradients have them: normal, and every SPAN elements of another
size (log-normal, the same on all ranks).  Their sum is compared with the float64 one; the table has
the root mean square error over the root mean square of the sum, in percent, of one call without
residuals.  An encoding that loses a share e of what it encodes gives
    owner reduces   e sqrt(2 - 1/P)       never more than 1.42 e, however many ranks
    in the ring     e sqrt((P + 1) / 2)   since it encodes every partial sum
which the table shows beside what was measured, with the e of two ranks.  The exit status is 1 if
ranks have different bits, or if the error of "owner reduces" grows by more than that.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ringreduce.bench import oracle
from ringreduce.bench.channel import Message
from ringreduce.bench.engines import TorchEngine
from ringreduce.bench.launch import Controller
from ringreduce.bench.machine import describe_machine
from ringreduce.bench.results import write_json
from ringreduce.bench.servant import Servant, run
from ringreduce.bench.settings import CODECS, BenchError, Contender, Settings, Unsupported

SPAN = 1000  # elements of one size; no multiple of a block
SCHEDULES = ("owner", "ring")
KEY = "ours"
SLACK = 1.05  # the model takes errors of different encodings for independent


def values(rank: int, count: int, seed: int) -> torch.Tensor:
    """What a rank gives."""
    sizes = torch.randn(-(-count // SPAN), generator=torch.Generator().manual_seed(seed)).exp()
    own = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    return torch.randn(count, generator=own) * sizes.repeat_interleave(SPAN)[:count]


class Rank(Servant):
    """One rank: all-reduces what it is told to, and compares."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec["rank"])
        self.world: int = spec["world"]
        self.engine = TorchEngine(spec)

    def error(self, codec: str, schedule: str, count: int, seed: int) -> Message:
        """The errors of one call, and a hash of its result's bits."""
        own = importlib.import_module("ringreduce._backend")
        tensor = values(self.rank, count, seed)
        backend = own.backend_of(own.ringreduce_group(None))
        call = own.extension().compressed_all_reduce
        call(backend, tensor, tensor, codec=codec, schedule=schedule).wait()
        reply: Message = {"digest": oracle.digest(tensor)}
        if self.rank == 0:  # the others have the same bits, or that is the fault to be told
            exact = torch.zeros(count, dtype=torch.float64)
            for rank in range(self.world):
                exact += values(rank, count, seed)
            lost = tensor.double() - exact
            size = float(exact.square().mean().sqrt())
            reply |= {
                "rms": float(lost.square().mean().sqrt()) / size,
                "max": float(lost.abs().max()) / size,
                "cosine": float(torch.cosine_similarity(tensor.double(), exact, dim=0)),
            }
        return reply

    def close(self) -> Message:
        self.engine.close()
        return {}


def growth(schedule: str, world: int) -> float:
    """The error of `world` ranks, in units of one encoding's."""
    return math.sqrt(2 - 1 / world) if schedule == "owner" else math.sqrt((world + 1) / 2)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each codec, schedule and world size. Raises BenchError."""
    rows = []
    program = (str(Path(__file__).resolve()),)
    for world in options.worlds:
        settings = Settings("all_reduce", world, (), timeout=options.timeout)
        with Controller(settings, range(world)) as controller:
            controller.start([Contender(KEY, KEY, "torch", "ringreduce", program=program)])
            ranks = controller.sets[KEY]
            for codec in options.codecs:
                for schedule in SCHEDULES:
                    question = {"codec": codec, "schedule": schedule, "seed": options.seed}
                    answers = ranks.ask("error", count=options.count, **question)
                    row = {"codec": codec, "schedule": schedule, "world": world, **answers[0]}
                    row["same_bits"] = len({answer["digest"] for answer in answers}) == 1
                    rows.append(row)
            controller.close()
    return rows


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each fault; adds to each row what was to be expected of it."""
    faults = []
    for row in rows:
        alike = [r for r in rows if (r["codec"], r["schedule"]) == (row["codec"], row["schedule"])]
        first = min(alike, key=lambda r: int(r["world"]))
        one = first["rms"] / growth(row["schedule"], first["world"])
        row["expected_rms"] = one * growth(row["schedule"], row["world"])
        what = f"{row['codec']}, {row['schedule']}, {row['world']} ranks"
        if not row["same_bits"]:
            faults.append(f"{what}: ranks have different bits")
        if row["schedule"] == "owner" and not row["rms"] <= SLACK * row["expected_rms"]:
            faults.append(f"{what}: the error grew to {row['rms']:.3g}")
    return faults


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row a codec and schedule, a column a world size."""
    worlds = sorted({row["world"] for row in rows})
    heads = [f"{world} ranks" for world in worlds]
    lines = [f"| codec | schedule | {' | '.join(heads)} |", "|---" * (2 + len(worlds)) + "|"]
    for codec in dict.fromkeys(row["codec"] for row in rows):
        for schedule in SCHEDULES:
            cells = []
            for world in worlds:
                for row in rows:
                    if (row["codec"], row["schedule"], row["world"]) == (codec, schedule, world):
                        error, model = 100 * row["rms"], 100 * row["expected_rms"]
                        cells.append(f"{error:.3g} % ({model:.3g})")
            lines.append(f"| {codec} | {schedule} | {' | '.join(cells)} |")
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--worlds", type=lambda text: tuple(int(n) for n in text.split(",")), default=(2, 4, 8))
    add("--codecs", type=lambda text: tuple(text.split(",")), default=CODECS)
    add("--count", type=int, default=1 << 20, help="elements (1048576)")
    add("--seed", type=int, default=1)
    add("--timeout", type=float, default=300.0, help="seconds that any one step may take")
    add("--out", type=Path, metavar="FILE", help="write FILE, JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.codecs) - set(CODECS):
        parser.error(f"--codecs: none of {', '.join(CODECS)}: {', '.join(sorted(unknown))}")
    if min(options.worlds) < 2 or options.count < 1:
        parser.error("--worlds are 2 and more, --count is a number above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        rows = measure(options)
    except (BenchError, Unsupported) as error:
        print(f"codec_error.py: {error}", file=sys.stderr)
        return 1
    faults = judge(rows)
    print(f"rms error over the rms of the sum, {options.count} elements a rank (in brackets: what")
    print("follows from that of the fewest ranks)\n")
    print("\n".join(table(rows)))
    for fault in faults:
        print(f"# WRONG: {fault}")
    if options.out:
        asked = {"count": options.count, "seed": options.seed}
        write_json(options.out, {"schema": 1, "machine": describe_machine(), **asked, "rows": rows})
    return 1 if faults else 0


if __name__ == "__main__":
    # A rank process has one argument, what it is; the program itself has none but options.
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        run(Rank)
    else:
        sys.exit(main())
