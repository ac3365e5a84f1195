"""The command line: reads the settings, runs the benchmark, prints and writes the report."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ringreduce.bench import elastic
from ringreduce.bench.alternate import measure_row, sleepers_warning
from ringreduce.bench.collectives import COLLECTIVES
from ringreduce.bench.launch import Controller
from ringreduce.bench.machine import describe_machine
from ringreduce.bench.plot import write_plot
from ringreduce.bench.results import Report
from ringreduce.bench.settings import (
    ALGORITHMS,
    DTYPES,
    OPS,
    OURS,
    PEERS,
    BenchError,
    Settings,
    contenders_of,
    parse_sizes,
)
from ringreduce.bench.table import format_row, header

DEFAULT_SIZES = "1K,64K,1M,25M,256M"


def make_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.bench",
        description="Time one collective of ringreduce beside its peers, in one run.",
        epilog="Under torchrun leave out --nproc: its number of ranks is taken. The exit status "
        "is 1 if a result was wrong or a rank failed.",
    )
    add = parser.add_argument
    add("collective", choices=list(COLLECTIVES))
    add("--nproc", type=_positive, help="ranks of each contender (2)")
    add("--sizes", default=DEFAULT_SIZES, type=_sizes, metavar="LIST",
        help="bytes of the whole message, as in 1K,64K,25M or 1K:1M:4 (first, last, factor); "
        f"default {DEFAULT_SIZES}")  # fmt: skip
    add("--dtype", default="float32", choices=DTYPES)
    add("--op", default="sum", choices=OPS, help="for collectives that reduce (sum)")
    add("--compare", default=(), type=_peers, metavar="LIST",
        help="peers: gloo, mpi (needs mpi4py and mpirun), or ringreduce itself with another "
        "algorithm: direct, twoshot, ring")  # fmt: skip
    add("--algorithm", choices=ALGORITHMS,
        default=os.environ.get("RINGREDUCE_ALGORITHM", "auto"))  # fmt: skip
    add("--iters", type=_positive, help="timed calls a round (enough to fill 0.1 s)")
    add("--warmup", type=int, help="untimed calls before them, in every round (a tenth)")
    add("--rounds", type=_positive, default=7)
    add("--timeout", type=float, default=120.0, help="seconds that any one step may take")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="write a picture (needs matplotlib)")
    add("--backend", default="ringreduce",
        help="the torch.distributed backend that stands in ringreduce's place")  # fmt: skip
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _peers(text: str) -> tuple[str, ...]:
    peers = tuple(dict.fromkeys(text.split(",")))
    for peer in peers:
        if peer not in PEERS:
            raise argparse.ArgumentTypeError(f"{peer!r} is none of: {', '.join(PEERS)}")
    return peers


def read_settings(
    parser: argparse.ArgumentParser, options: argparse.Namespace, world: int
) -> Settings:
    """The settings of these options; exits with a usage message if they do not fit together."""
    cls = COLLECTIVES[options.collective]
    itemsize = item_size(options.dtype)
    if cls.has_size:
        for size in options.sizes:
            if cls.fit(size // itemsize, world) == 0:
                parser.error(f"{size} bytes are too few for {world} ranks and {options.dtype}")
    if cls.reduces and options.op in ("band", "bor", "bxor") and "float" in options.dtype:
        parser.error(f"{options.op} needs an integer type, and not {options.dtype}")
    if options.plot:
        if not cls.has_size:
            parser.error(f"{options.collective} has no sizes to plot")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib, which is not installed")
    return Settings(
        collective=options.collective,
        world=world,
        sizes=options.sizes if cls.has_size else (0,),
        dtype=options.dtype,
        op=options.op,
        backend=options.backend,
        algorithm=options.algorithm,
        compare=options.compare,
        iterations=options.iters,
        warmup=options.warmup,
        rounds=options.rounds,
        timeout=options.timeout,
    )


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    torchrun = elastic.under_torchrun() and options.nproc is None
    try:
        if not torchrun:
            settings = read_settings(parser, options, options.nproc or 2)
            return run(settings, None, options.json, options.plot)
        store, rank, world = elastic.meet()
        settings = read_settings(parser, options, world)
        if rank > 0:
            return elastic.run_starter(store, rank)
        return run(settings, store, options.json, options.plot)
    except BenchError as error:
        print(f"ringreduce.bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ringreduce.bench: interrupted", file=sys.stderr)
        return 130


def run(
    settings: Settings,
    store: Store | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> int:
    """Be the controller, with torchrun's `store` if there is one; returns the exit status."""
    signal.signal(signal.SIGTERM, _on_terminate)
    contenders = contenders_of(settings)
    starts = range(settings.world) if store is None else [0]
    with Controller(settings, starts) as controller:
        if store is not None:
            elastic.announce(store, controller.place, contenders)
        controller.start(contenders)
        report = Report(
            collective=settings.collective,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine={
                **describe_machine(),
                "environment": _environment(),
                "mpi": _mpi_version(controller),
            },
            library=_library(controller),
            settings=asdict(settings),
            titles={contender.key: contender.title for contender in contenders},
            skipped=controller.skipped,
        )
        for size in settings.sizes:
            row = measure_row(controller, settings, size, item_size(settings.dtype))
            if not report.rows:
                print("\n".join(header(report)), flush=True)
            report.rows.append(row)
            print(format_row(report, row), flush=True)
            for warning in sleepers_warning(row):
                print(f"# warning: {warning}", flush=True)
        report.library = _library(controller)  # staging memory may have grown
        controller.close()
    for fault in report.faults():
        print(f"# WRONG: {fault}", flush=True)
    if json_path:
        report.write(json_path)
    if plot_path:
        write_plot(report, plot_path)
    return 0 if report.ours_is_right else 1


def _on_terminate(number: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does: through the exit of the controller, which kills the ranks."""
    raise KeyboardInterrupt


def _library(controller: Controller) -> dict[str, object]:
    """What ringreduce says about itself; the greatest staging memory of all ranks."""
    about = controller.sets[OURS].ask("about")
    return max(about, key=lambda entry: int(entry.get("staging_bytes", 0)))


def _mpi_version(controller: Controller) -> str:
    """The MPI library that is compared with, or "" if none is."""
    return (
        str(controller.sets["mpi"].ask("about")[0]["version"]) if "mpi" in controller.sets else ""
    )


def _environment() -> str:
    """The variables that change what ringreduce does, but --algorithm's."""
    names = sorted(name for name in os.environ if name.startswith("RINGREDUCE_"))
    return " ".join(f"{n}={os.environ[n]}" for n in names if n != "RINGREDUCE_ALGORITHM")
