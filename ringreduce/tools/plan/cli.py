"""The command line of the planner."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringreduce.core.backend import extension
from ringreduce.sparse import share_of
from ringreduce.tools.bench.machine import describe_machine
from ringreduce.tools.bench.settings import format_size, parse_sizes
from ringreduce.tools.bench.summary import format_time
from ringreduce.tools.plan import check, constants, curve, lines, measure
from ringreduce.tools.plan import step as steps
from ringreduce.tools.plan.model import CODECS, KINDS, Job, Model

_DEFAULT_SIZES = "1K,64K,1M,25M,256M"
_Answer = tuple[dict[str, Any], list[str]]  # a document, and the same as lines
_Call = tuple[str, float, str, int]  # kind, bytes, codec, bytes of an element
_MOST_RANKS = 1_000_000
_LONGEST_SPAN = 60.0
_JITTER = "2%"
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
    add("--jitter", help="its standard deviation between ranks and steps (2%%)")
    add("--dtype", choices=["float32", "bfloat16"], help="of the gradients (float32)")
    add("--no-overlap", action="store_true", help="the program waits for each call of a timeline")
    add("--codec", help=f"of gradients, or of --sync-every (int4): {', '.join(CODECS)}, best, or "
        "of --sync-every topk:SHARE+int2")  # fmt: skip
    add("--sync-every", type=int, help="hosts average parameters once in so many steps (DiLoCo)")
    add("--overlap", type=int, help="of --sync-every: steps beside which a round travels (0)")
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
    add("--ranks", help="numbers of ranks, with commas (2)")
    add("--hosts", type=int, help="that hold them, as many each (1; with --link as many as ranks)")
    add("--per-host", type=int, help="ranks on each host, instead of --hosts")
    add("--link", help="of each host: 10Gbit,0.2ms,0.01%%[,mtu=9000][,burst=64K][,bbr]")
    add("--cores", type=int, help="of each host, for its ranks (those of this machine)")
    add("--emulated", action="store_true", help="the hosts are on one machine and share its cores")
    add("--bandwidth-known", action="store_true",
        help="RINGREDUCE_BANDWIDTH_MBIT tells the group the line's rate")  # fmt: skip
    add("-c", "--constants", type=Path, default=constants.default_path(), metavar="FILE")


def _counts(text: str) -> list[int]:
    """Numbers of ranks. Raises ValueError."""
    words = text.split(",")
    if not all(word.isdecimal() and 0 < int(word) <= _MOST_RANKS for word in words):
        raise ValueError(f"--ranks are numbers from 1 to {_MOST_RANKS:,} with commas, not '{text}'")
    return [int(word) for word in words]


def _job(options: argparse.Namespace, ranks: int, model: Model) -> Job:
    line = None if options.link is None else lines.parse(options.link)
    cores = model.cores if options.cores is None else options.cores
    for name in ("hosts", "per_host", "cores"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is at least 1")
    if options.per_host and options.hosts:
        raise ValueError("--hosts and --per-host say the same: give one of them")
    if options.per_host:
        if ranks % options.per_host:
            raise ValueError(f"{ranks} ranks do not fill hosts of {options.per_host}")
        hosts = ranks // options.per_host
    else:
        hosts = options.hosts or (ranks if line else 1)
    return Job(ranks, hosts, line, cores, options.emulated, options.bandwidth_known)


def _seconds(text: str) -> float:
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit) and text[: -len(unit)].replace(".", "", 1).isdecimal():
            return float(text[: -len(unit)]) * factor
    raise ValueError(f"--compute is a number with us, ms or s, such as 350ms, and not '{text}'")


def _part(text: str) -> float:
    number = text.removesuffix("%")
    if number == text or not number.replace(".", "", 1).isdecimal() or float(number) > 100:
        raise ValueError(f"--jitter is 0% to 100%, and not '{text}'")
    return float(number) / 100


def _step(options: argparse.Namespace, model: Model) -> tuple[steps.Step, str]:
    """What is synchronized, and what is assumed of it."""
    width = 2 if options.dtype == "bfloat16" else 4
    if options.model.startswith("from:"):
        if options.compute or options.jitter or options.dtype:
            raise ValueError("a timeline has its own computation, jitter and dtype")
        found = steps.replayed(Path(options.model[5:]), not options.no_overlap)
        text = f"collectives in a step: {len(found.step.buckets)}, of {found.ranks} ranks, as in "
        return found.step, "; ".join((text + options.model[5:], *found.notes))
    if options.no_overlap:
        raise ValueError("--no-overlap is for timelines: a described model is one of DDP")
    count = steps.parameters_of(options.model)
    if options.compute:
        compute, why = _seconds(options.compute), "as given"
    else:
        compute = 6 * count * _TOKENS / model.flops
        why = (
            f"{_TOKENS} tokens, 6 operations a parameter, at {model.flops / 1e9:.0f} GFLOP/s, this "
            "machine's at best"
        )
    jitter = _part(options.jitter or _JITTER)
    step = steps.described(count, width, compute, jitter)
    return step, (
        f"{count / 1e6:,.3g} M parameters, {options.dtype or 'float32'}, buckets: "
        f"{len(step.buckets)}; {format_time(compute)} of computation ({why}), two thirds of it "
        f"backward, jitter {jitter:.1%}"
    )


def _hints(model: Model, job: Job, calls: Iterable[_Call]) -> list[str]:
    """What the group should be told of its line, by the call for which that matters most."""
    found = [(call, told) for call in calls if (told := model.told(*call[:2], job, *call[2:]))]
    if not found or job.line is None:
        return []
    (kind, size, *_), (taken, better) = max(found, key=lambda f: f[1][0].seconds / f[1][1].seconds)
    believed = 8e-6 / extension().wire_cost(None)["byte"]
    return [
        f"hint: {job.ranks} ranks, {kind} of {format_size(int(size))}: the group takes "
        f"{taken.algorithm}, which is {taken.seconds / better.seconds:.1f} times slower than "
        f"{better.algorithm}, as it believes in {believed:.0f} Mbit/s: set "
        f"RINGREDUCE_BANDWIDTH_MBIT={job.line.rate * 8e-6:.6g} for all ranks (or "
        "RINGREDUCE_RING=measure), and --bandwidth-known here"
    ]


def _collectives(options: argparse.Namespace, model: Model, jobs: Sequence[Job]) -> _Answer:
    """The times of collectives."""
    rows, text = [], [_columns("ranks", "size", "time", "interval", "busbw Mbit/s", "algorithm")]
    hints: list[str] = []
    width, kind = 2 if options.dtype == "bfloat16" else 4, options.collective
    for job in jobs:
        calls: list[_Call] = []
        for size in parse_sizes(options.sizes):
            if options.codec == "best":
                codec, found = model.best(size, job, width)
            else:
                codec = options.codec if job.hosts > 1 else ""
                found = model.collective(kind, size, job, codec, width)
            calls.append((kind, size, codec, width))
            rows.append({"ranks": job.ranks, "bytes": size, "codec": codec, **asdict(found)})
            factor = {"all_reduce": 2 * (job.ranks - 1) / job.ranks, "broadcast": 1.0}
            busbw = factor.get(kind, (job.ranks - 1) / job.ranks) * size / max(found.seconds, 1e-12)
            way = " ".join(filter(None, (found.algorithm, codec)))
            text.append(
                _columns(
                    str(job.ranks), format_size(size), format_time(found.seconds),
                    _interval(found.low, found.high), f"{busbw * 8e-6:.0f}",
                    f"{way or 'slots'}, bound by {found.bound}",
                )
            )  # fmt: skip
        hints += _hints(model, job, calls)
    if options.codec and any(job.hosts == 1 for job in jobs):
        text.append("# on one host nothing is coded")
    return {"collectives": rows, "hints": hints}, [*text, *(f"# {hint}" for hint in hints)]


def _steps(options: argparse.Namespace, model: Model, jobs: Sequence[Job]) -> _Answer:
    """The times of training steps."""
    step, assumed = _step(options, model)
    every, overlap = _rounds(options)
    if every:
        assumed += f"; a round in {every} steps, beside {overlap} of them"
    heads = ("ranks", "hosts", "step", "interval", "compute", "efficiency  codec")
    rows, text = [], [f"# {assumed}", _columns(*heads)]
    hints: list[str] = []
    codec: str | None
    for job in jobs:
        codecs: list[str | None] = [options.codec]
        if options.codec == "best":
            codecs = ["", *CODECS]
        elif options.codec == "" and options.model.startswith("from:"):
            codecs = [None]
        if job.hosts == 1:
            codecs = [""]
        if every and job.hosts > 1:
            found, codec = min(
                (
                    (steps.predict_outer(step, job, model, every, overlap, one or ""), one or "")
                    for one in codecs
                ),
                key=lambda pair: pair[0].seconds,
            )
            calls = {(*steps.round_call(step, job, codec or ""), 4)}
        else:
            if every:
                text.append(f"# {job.ranks} ranks are on one host: no rounds")
            found, codec = min(
                ((steps.predict(step, job, model, one), one) for one in codecs),
                key=lambda pair: pair[0].seconds,
            )
            calls = {
                (b.kind, b.size, steps.codec_of(b, step, codec), b.width) for b in step.buckets
            }
        hints += _hints(model, job, calls)
        row = asdict(found)
        del row["buckets"]
        row |= {"ranks": job.ranks, "hosts": job.hosts, "codec": codec or ""}
        rows.append(row | {"efficiency": found.efficiency})
        coded = "as recorded" if codec is None else codec or "exact"
        text.append(
            _columns(
                str(job.ranks), str(job.hosts), format_time(found.seconds),
                _interval(found.low, found.high), format_time(found.compute),
                f"{found.efficiency:10.1%}  {coded}",
            )
        )  # fmt: skip
    document = {"assumed": assumed, "steps": rows, "hints": hints}
    return document, [*text, *(f"# {hint}" for hint in hints)]


def _rounds(options: argparse.Namespace) -> tuple[int, int]:
    """Steps from a round of DiLoCo to the next (0: there are none), and those beside it."""
    if options.sync_every is None:
        if options.overlap is not None:
            raise ValueError("--overlap is of rounds: --sync-every 30")
        return 0, 0
    overlap = options.overlap or 0
    if options.sync_every < 1 or not 0 <= overlap < options.sync_every:
        raise ValueError("--sync-every is at least 1, and --overlap from 0 on and less than that")
    return options.sync_every, overlap


def _curve(options: argparse.Namespace, model: Model, job: Job, about: dict[str, Any]) -> _Answer:
    """The picture of the efficiency."""
    step, assumed = _step(options, model)
    ranks = curve.counts(job.per_host)
    machine = f"{about['machine']['cpu']}, {about['created']}"
    warning = constants.warning(about["others"])
    drawn = curve.draw(
        options.curve, step, model,
        lambda count: replace(job, ranks=count, hosts=count // job.per_host),
        ranks, ["", *CODECS],
        [assumed, f"{job.per_host} rank(s) on a host; each host's line: {job.line}",
         f"constants of {machine}; each host has its own cores; shaded: 9 of 10 predictions",
         *([warning] if warning else [])],
    )  # fmt: skip
    return {"curve": {"ranks": ranks, **drawn}}, [f"# drawn: {options.curve}"]


def _columns(ranks: str, size: str, time: str, interval: str, rate: str, rest: str) -> str:
    return f"{ranks:>7} {size:>8} {time:>10} {interval:>20} {rate:>13}  {rest}"


def _interval(low: float, high: float) -> str:
    return f"{format_time(low)} - {format_time(high)}"


def _check_arguments(options: argparse.Namespace) -> None:
    """Refuses what cannot be predicted, whatever the constants; fills in the codec."""
    _counts(options.ranks or "2")
    _rounds(options)
    if options.sync_every is not None and (options.model is None or options.curve):
        raise ValueError("--sync-every is for a table of steps: --model gpt:7B, and no --curve")
    if options.curve and options.model is None:
        raise ValueError("a curve is of a model: --model gpt:7B")
    if options.codec is None:
        options.codec = "" if options.sync_every is None else "int4"
    if share_of(options.codec) is not None:
        if options.sync_every is None:
            raise ValueError(f"{options.codec} is a codec of rounds: --sync-every 30")
    elif options.codec not in ("", *CODECS, "best"):
        raise ValueError(f"there is no codec '{options.codec}': {', '.join(CODECS)} and best are")
    if options.codec and options.model is None and options.collective != "all_reduce":
        raise ValueError(f"a codec is for all_reduce only, and not for {options.collective}")


def _plan(options: argparse.Namespace) -> int:
    _check_arguments(options)
    model, about = constants.load(options.constants)
    jobs = [_job(options, count, model) for count in _counts(options.ranks or "2")]
    answer = (_collectives if options.model is None else _steps)(options, model, jobs)
    document, text = {"constants": about, **answer[0]}, answer[1]
    if options.curve:
        more = _curve(options, model, jobs[0], about)
        document, text = document | more[0], text + more[1]
    machine = about["machine"]
    head = [f"# constants: {machine['cpu']}, {machine['cores']} cores, {about['created']}"]
    if warning := constants.warning(about["others"]):
        head.append(f"# {warning}")
        document["warning"] = warning
    print(json.dumps(document) if options.json else "\n".join([*head, *text]))
    return 0


def _measure(options: argparse.Namespace) -> int:
    def tell(what: str) -> None:
        print(f"# {what}", file=sys.stderr, flush=True)

    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if options.rounds < 1 or not 0 < options.span < _LONGEST_SPAN:
        raise ValueError(f"--rounds is at least 1, --span above 0 and below {_LONGEST_SPAN:g}")
    if bool(options.link) != launched:
        raise ValueError("--link is for a launcher that starts a rank on each host, which needs it")
    if not launched:
        constants.require_writable(options.constants)
        points = measure.measure_here(options.rounds, options.span, tell)
    else:
        line = lines.parse(options.link)
        dist.init_process_group("ringreduce")
        points = measure.measure_between(line, options.rounds, options.span, options.emulated)
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank != 0:
            return 0
    base, earlier = Model(), []
    if options.constants.exists():
        try:
            base, _ = constants.load(options.constants)
            earlier = constants.load_points(options.constants)
        except ValueError as error:
            tell(f"what was there is replaced: {error}")
    if not launched:
        base = replace(base, cores=len(os.sched_getaffinity(0)), flops=measure.flops_of_a_rank())
    points = constants.joined(earlier, points, options.add)
    model = constants.fit(points, replace(base, spread={}))
    about = {"machine": describe_machine(), "created": constants.today()}
    constants.save(options.constants, model, about, points)
    print(f"fitted to {len(points)} times; the constants are in {options.constants}")
    if warning := constants.warning(max(point.others for point in points)):
        print(warning)
    return 0


def _check(options: argparse.Namespace) -> int:
    model, about = constants.load(options.constants)
    overlaps = not options.no_overlap
    ran = steps.replayed(options.directory, overlaps)
    base = steps.replayed(options.base, overlaps) if options.base else ran
    counts = [ran.ranks] if options.ranks is None else _counts(options.ranks)
    if counts != [ran.ranks]:
        raise ValueError(f"the timeline is of {ran.ranks} ranks, and not of {options.ranks}")
    job = _job(options, ran.ranks, model)
    rows = check.compared(ran, base, job, model)
    calls = [shape for shape in ran.moving if shape[0] in KINDS]
    for said in (constants.warning(about["others"]), *_hints(model, job, calls)):
        if said:
            print(f"# {said}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(
            json.dumps([asdict(row) | {"error": row.error, "inside": row.inside} for row in rows])
        )
    else:
        print("\n".join([*check.table(rows), *(f"# {note}" for note in ran.notes)]))
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
    except (ValueError, RuntimeError, OSError, ArithmeticError) as error:
        print(f"python -m ringreduce.plan: {error}", file=sys.stderr)
        return 2
