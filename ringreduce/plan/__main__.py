"""The command line of the planner."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringreduce.bench.machine import describe_machine
from ringreduce.bench.settings import format_size, parse_sizes
from ringreduce.bench.summary import format_time
from ringreduce.plan import check, constants, curve, lines, measure
from ringreduce.plan import step as steps
from ringreduce.plan.model import CODECS, KINDS, Job, Model

_DEFAULT_SIZES = "1K,64K,1M,25M,256M"
_Answer = tuple[dict[str, Any], list[str]]  # a document, and the same as lines
_TOKENS = 2048  # of a rank in a step, of the GPT, where nothing says how long it computes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.plan",
        description="Predict the time of collectives and of training steps, with an interval, "
        "from constants that `measure` finds once for an installation.",
        epilog="`plan measure` measures the constants (a minute); `plan check DIR` sets "
        "predictions beside a timeline (RINGREDUCE_TIMELINE).",
    )
    _add_job(parser)
    add = parser.add_argument
    add("--model", help="predict steps: mlp, gpt:7B, 350M (parameters), or from:FOLDER, a timeline")
    add("--compute", help="seconds of a rank's computation in a step: 350ms")
    add("--jitter", default="2%", help="its standard deviation between ranks and steps (2%%)")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the gradients")
    add("--no-overlap", action="store_true", help="the program waits for each call of a timeline")
    add("--codec", default="", choices=["", *CODECS, "best"], help="of the gradients")
    add("--collective", default="all_reduce", choices=KINDS)
    add("--sizes", default=_DEFAULT_SIZES, help=f"of collectives ({_DEFAULT_SIZES})")
    add("--curve", type=Path, metavar="FILE.png", help="draw the efficiency up to 100,000 ranks")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    return parser


def _measure_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ringreduce.plan measure")
    add = parser.add_argument
    add("-o", "--constants", type=Path, default=constants.default_path(), metavar="FILE")
    add("--rounds", type=int, default=7)
    add("--span", type=float, default=0.03, help="seconds of each call in a round (0.03)")
    add("--link", help="the line between the hosts, under a launcher: 10Gbit,0.2ms")
    add("--emulated", action="store_true", help="the hosts are on one machine and share its cores")
    add("--add", action="store_true", help="fit to the times in the file too, of other hosts")
    return parser


def _check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ringreduce.plan check")
    parser.add_argument("directory", type=Path, metavar="DIR", help="of the timeline of a run")
    parser.add_argument(
        "--from", dest="base", type=Path, metavar="DIR",
        help="predict the step from this timeline, of another run (DIR itself)",
    )  # fmt: skip
    parser.add_argument("--no-overlap", action="store_true", help="as for a plan")
    parser.add_argument("--json", action="store_true")
    _add_job(parser)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", default="2", help="numbers of ranks, with commas (2)")
    add("--hosts", type=int, help="that hold them, as many each (1; with --link as many as ranks)")
    add("--per-host", type=int, help="ranks on each host, instead of --hosts")
    add("--link", help="of each host: 10Gbit,0.2ms,0.01%%[,mtu=9000][,burst=64K][,bbr]")
    add("--cores", type=int, help="of each host, for its ranks (those of this machine)")
    add("--emulated", action="store_true", help="the hosts are on one machine and share its cores")
    add("--bandwidth-known", action="store_true",
        help="RINGREDUCE_BANDWIDTH_MBIT tells the group the line's rate")  # fmt: skip
    add("-c", "--constants", type=Path, default=constants.default_path(), metavar="FILE")


def _job(options: argparse.Namespace, ranks: int, model: Model) -> Job:
    line = lines.parse(options.link) if options.link else None
    if options.per_host:
        if ranks % options.per_host:
            raise ValueError(f"{ranks} ranks do not fill hosts of {options.per_host}")
        hosts = ranks // options.per_host
    else:
        hosts = options.hosts or (ranks if line else 1)
    cores = model.cores if options.cores is None else options.cores
    return Job(ranks, hosts, line, cores, options.emulated, options.bandwidth_known)


def _seconds(text: str) -> float:
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            return float(text[: -len(unit)]) * factor
    raise ValueError(f"'{text}' has no unit: 350ms, 2s")


def _step(options: argparse.Namespace, model: Model) -> tuple[steps.Step, str]:
    """What is synchronized, and what is assumed of it."""
    if options.model.startswith("from:"):
        found = steps.replayed(Path(options.model[5:]), not options.no_overlap)
        return found, f"{len(found.buckets)} collectives a step, as in {options.model[5:]}"
    count = steps.parameters_of(options.model)
    if options.compute:
        compute, why = _seconds(options.compute), "as given"
    else:
        compute = 6 * count * _TOKENS / model.flops
        why = f"{_TOKENS} tokens at {model.flops / 1e9:.0f} GFLOP/s of this machine, 6 a parameter"
    width = 2 if options.dtype == "bfloat16" else 4
    jitter = float(options.jitter.rstrip("%")) / 100
    found = steps.described(count, width, compute, jitter)
    return found, (
        f"{count / 1e6:,.0f} M parameters, {options.dtype}, {len(found.buckets)} buckets; "
        f"{format_time(compute)} of computation ({why}), two thirds of it backward, "
        f"jitter {jitter:.0%}"
    )


def _collectives(options: argparse.Namespace, model: Model, jobs: Sequence[Job]) -> _Answer:
    """The times of collectives."""
    rows, text = [], [_columns("ranks", "size", "time", "interval", "busbw Mbit/s", "algorithm")]
    for job in jobs:
        for size in parse_sizes(options.sizes):
            if options.codec == "best":
                codec, found = model.best(size, job, ("", *CODECS) if job.hosts > 1 else ("",))
            else:
                codec = options.codec
                found = model.collective(options.collective, size, job, codec)
            rows.append({"ranks": job.ranks, "bytes": size, "codec": codec, **asdict(found)})
            factor = 2 if options.collective == "all_reduce" else 1
            busbw = factor * (job.ranks - 1) / job.ranks * size / max(found.seconds, 1e-12)
            way = " ".join(filter(None, (found.algorithm, codec)))
            text.append(
                _columns(
                    str(job.ranks), format_size(size), format_time(found.seconds),
                    _interval(found.low, found.high), f"{busbw * 8e-6:.0f}",
                    f"{way}, bound by {found.bound}",
                )
            )  # fmt: skip
    return {"collectives": rows}, text


def _steps(options: argparse.Namespace, model: Model, jobs: Sequence[Job]) -> _Answer:
    """The times of training steps."""
    step, assumed = _step(options, model)
    heads = ("ranks", "hosts", "step", "interval", "compute", "efficiency  codec")
    rows, text = [], [f"# {assumed}", _columns(*heads)]
    for job in jobs:
        codecs: list[str | None] = [options.codec]
        if job.hosts == 1:
            codecs = [""]
        elif options.codec == "best":
            codecs = ["", *CODECS]
        elif options.codec == "" and options.model.startswith("from:"):
            codecs = [None]
        found, codec = min(
            ((steps.predict(step, job, model, one), one) for one in codecs),
            key=lambda pair: pair[0].seconds,
        )
        row = asdict(found)
        del row["buckets"]
        row |= {"ranks": job.ranks, "hosts": job.hosts, "codec": codec or ""}
        rows.append(row | {"efficiency": found.efficiency})
        text.append(
            _columns(
                str(job.ranks), str(job.hosts), format_time(found.seconds),
                _interval(found.low, found.high), format_time(found.compute),
                f"{found.efficiency:10.1%}  {'as recorded' if codec is None else codec or 'exact'}",
            )
        )  # fmt: skip
    return {"assumed": assumed, "steps": rows}, text


def _curve(options: argparse.Namespace, model: Model, job: Job, about: dict[str, Any]) -> _Answer:
    """The picture of the efficiency."""
    step, assumed = _step(options, model)
    ranks = curve.counts(job.per_host)
    machine = f"{about['machine']['cpu']}, {about['created']}"
    drawn = curve.draw(
        options.curve, step, model,
        lambda count: replace(job, ranks=count, hosts=count // job.per_host),
        ranks, ["", *CODECS],
        [assumed, f"{job.per_host} rank(s) on a host; each host's line: {job.line}",
         f"constants of {machine}; each host has its own cores; shaded: 9 of 10 predictions"],
    )  # fmt: skip
    return {"curve": {"ranks": ranks, **drawn}}, [f"# drawn: {options.curve}"]


def _columns(ranks: str, size: str, time: str, interval: str, rate: str, rest: str) -> str:
    return f"{ranks:>7} {size:>8} {time:>10} {interval:>20} {rate:>13}  {rest}"


def _interval(low: float, high: float) -> str:
    return f"{format_time(low)} - {format_time(high)}"


def _plan(options: argparse.Namespace) -> int:
    model, about = constants.load(options.constants)
    jobs = [_job(options, int(word), model) for word in options.ranks.split(",")]
    answer = (_steps if options.model else _collectives)(options, model, jobs)
    document, text = {"constants": about, **answer[0]}, answer[1]
    if options.curve:
        if not options.model:
            raise ValueError("a curve is of a model: --model gpt:7B")
        more = _curve(options, model, jobs[0], about)
        document, text = document | more[0], text + more[1]
    machine = about["machine"]
    head = f"# constants: {machine['cpu']}, {machine['cores']} cores, {about['created']}"
    print(json.dumps(document) if options.json else "\n".join([head, *text]))
    return 0


def _measure(options: argparse.Namespace) -> int:
    def tell(what: str) -> None:
        print(f"# {what}", file=sys.stderr, flush=True)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    earlier: list[constants.Point] = []
    base = Model()
    if options.constants.exists() and (world > 1 or options.add):
        base, _ = constants.load(options.constants)
        earlier = constants.load_points(options.constants)
    if world > 1:
        if not options.link:
            raise ValueError("between hosts `measure` needs their line: --link 10Gbit,0.2ms")
        dist.init_process_group("ringreduce")
        points = measure.measure_between(
            lines.parse(options.link), options.rounds, options.span, options.emulated
        )
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank != 0:
            return 0
        if not options.add:
            earlier = [p for p in earlier if p.job.hosts == 1]
    else:
        points = measure.measure_here(options.rounds, options.span, tell)
        base = replace(base, cores=len(os.sched_getaffinity(0)), flops=measure.flops_of_a_rank())
        earlier = []
    model = constants.fit([*earlier, *points], replace(base, spread={}))
    about = {"machine": describe_machine(), "created": constants.today()}
    constants.save(options.constants, model, about, [*earlier, *points])
    print(f"{len(points)} times measured; the constants are in {options.constants}")
    return 0


def _check(options: argparse.Namespace) -> int:
    model, _ = constants.load(options.constants)
    ran = steps.replayed(options.directory, not options.no_overlap)
    base = steps.replayed(options.base, not options.no_overlap) if options.base else ran
    job = _job(options, int(options.ranks), model)
    rows = check.compared(options.directory, base, ran, job, model)
    if options.json:
        print(
            json.dumps([asdict(row) | {"error": row.error, "inside": row.inside} for row in rows])
        )
    else:
        print("\n".join(check.table(rows)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 2 for bad usage or no constants."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if command == "measure":
            return _measure(_measure_parser().parse_args(rest))
        if command == "check":
            return _check(_check_parser().parse_args(rest))
        return _plan(_parser().parse_args(arguments))
    except (ValueError, RuntimeError) as error:
        print(f"python -m ringreduce.plan: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
