"""The command line: reads what is asked for and runs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ringreduce.tools.bench import elastic, explain
from ringreduce.tools.bench.collective import item_size
from ringreduce.tools.bench.collectives import COLLECTIVES
from ringreduce.tools.bench.run import run
from ringreduce.tools.bench.settings import (
    ALGORITHM_VARIABLES,
    ALGORITHMS,
    CODECS,
    DEVICES,
    DTYPES,
    OPS,
    PEERS,
    BenchError,
    Settings,
    parse_codec,
    parse_sizes,
)

DEFAULT_SIZES = "1K,64K,1M,25M,256M"
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def make_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.bench",
        description="Time collectives of ringreduce beside its peers, in one run.",
        epilog="Under torchrun leave out --nproc: its number of ranks is taken. The exit status "
        "is 1 if a result was wrong or a rank failed.",
    )
    add = parser.add_argument
    add("collectives", type=_collectives, metavar="NAME[,NAME...]",
        help=f"all, or some of: {', '.join(COLLECTIVES)}")  # fmt: skip
    add("--nproc", type=_positive, help="ranks of each contender (2)")
    add("--sizes", default=DEFAULT_SIZES, type=_sizes, metavar="LIST",
        help="bytes of the whole message, as in 1K,64K,25M or 1K:1M:4 (first, last, factor); "
        f"default {DEFAULT_SIZES}")  # fmt: skip
    add("--device", default="cpu", choices=DEVICES,
        help="where tensors are; of GPUs, rank r uses number r %% their count (cpu)")  # fmt: skip
    add("--dtype", default="float32", choices=DTYPES)
    add("--op", default="sum", choices=OPS, help="for collectives that reduce (sum)")
    add("--compare", default=(), type=_peers, metavar="LIST",
        help="peers: gloo, mpi (needs mpi4py and mpirun), shared (ringreduce on tensors of "
        "ringreduce.empty), operator (torch.ops.ringreduce), on GPUs nccl and symm_mem (torch's "
        "symmetric memory), or ringreduce itself with another algorithm: direct, twoshot, ring; "
        "on GPUs oneshot, ll, located, nvls; between hosts bruck, hierarchical")  # fmt: skip
    add("--codec", default=(), type=_codecs, metavar="LIST", dest="codecs",
        help=f"ringreduce's compressed all-reduce as well, of {', '.join(CODECS)}; int8@owner and "
        "int8@ring ask for a schedule; adds their errors against the exact sum")  # fmt: skip
    add("--algorithm", help="ringreduce's algorithm (that of RINGREDUCE_ALGORITHM, or on GPUs "
        "RINGREDUCE_CUDA_ALGORITHM; else auto)")  # fmt: skip
    add("--seconds", default=0.1, type=_seconds,
        help="how long the timed calls of a round take, 50,000 of them at most (0.1)")  # fmt: skip
    add("--iters", type=_positive, help="timed calls a round, in place of --seconds")
    add("--warmup", type=int, help="untimed calls before them, in every round (a tenth)")
    add("--rounds", type=_positive, default=7)
    add("--timeout", type=_seconds, default=120.0, help="seconds that any one step may take")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="write a picture (needs matplotlib)")
    add("--explain", action="store_true",
        help="time nothing, show what the chooser takes, and why (--explain --help)")  # fmt: skip
    add("--backend", default="ringreduce",
        help="the torch.distributed backend that stands in ringreduce's place")  # fmt: skip
    return parser


def _collectives(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(COLLECTIVES)
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in COLLECTIVES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is neither all nor one of: {', '.join(COLLECTIVES)}"
            )
    return names


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")


def _codecs(text: str) -> tuple[str, ...]:
    codecs = tuple(dict.fromkeys(text.split(",")))
    for codec in codecs:
        try:
            parse_codec(codec)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return codecs


def _peers(text: str) -> tuple[str, ...]:
    peers = tuple(dict.fromkeys(text.split(",")))
    for peer in peers:
        if peer not in PEERS:
            raise argparse.ArgumentTypeError(f"{peer!r} is none of: {', '.join(PEERS)}")
    return peers


def read_plan(
    parser: argparse.ArgumentParser, options: argparse.Namespace, world: int
) -> list[Settings]:
    """The settings of each collective that these options ask for.

    Exits with a usage message if they do not fit together, or if a file cannot be written.
    """
    if options.plot and len(options.collectives) > 1:
        parser.error("--plot draws one collective; of several, --json has the numbers")
    plan = [read_settings(parser, options, name, world) for name in options.collectives]
    if options.json:
        check_output(parser, "--json", options.json)
    if options.plot:
        check_output(parser, "--plot", options.plot)
        check_plot(parser, options)
    return plan


def read_settings(
    parser: argparse.ArgumentParser, options: argparse.Namespace, name: str, world: int
) -> Settings:
    """The settings of the collective `name`; exits with a usage message."""
    cls = COLLECTIVES[name]
    itemsize = item_size(options.dtype)
    if options.seconds >= options.timeout:
        parser.error(f"a round of --seconds {options.seconds:g} would outlast --timeout")
    if world < cls.least_ranks:
        parser.error(f"{name} needs {cls.least_ranks} ranks, and not {world} (--nproc)")
    if cls.has_size:
        for size in options.sizes:
            if cls.fit(size // itemsize, world) == 0:
                parser.error(
                    f"{name}: {size} bytes are too few for {world} ranks and {options.dtype}"
                )
    if cls.reduces and options.op in ("band", "bor", "bxor") and "float" in options.dtype:
        parser.error(f"{options.op} needs an integer type, and not {options.dtype}")
    if os.environ.get("RINGREDUCE_REPLACE") and "gloo" in (options.backend, *options.compare):
        parser.error("gloo's groups are made by ringreduce: unset RINGREDUCE_REPLACE")
    if options.codecs:
        if (name, options.dtype, options.device) != ("all_reduce", "float32", "cpu"):
            parser.error("--codec is for all_reduce of float32 CPU tensors")
        if options.op not in ("sum", "avg"):
            parser.error(f"--codec is for sums and averages, and not for {options.op}")
    variable = ALGORITHM_VARIABLES[options.device]
    algorithm = options.algorithm or os.environ.get(variable, "auto")
    if algorithm not in ALGORITHMS[options.device]:
        parser.error(
            f"{algorithm!r} is no algorithm for {options.device} tensors: choose from "
            f"{', '.join(ALGORITHMS[options.device])}"
        )
    return Settings(
        collective=name,
        world=world,
        sizes=options.sizes if cls.has_size else (0,),
        dtype=options.dtype,
        op=options.op,
        backend=options.backend,
        algorithm=algorithm,
        compare=options.compare,
        iterations=options.iters,
        round_seconds=options.seconds,
        warmup=options.warmup,
        rounds=options.rounds,
        timeout=options.timeout,
        device=options.device,
        codecs=options.codecs,
    )


def check_output(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Exit with a usage message unless the file `path` can be written, as far as that shows."""
    if path.is_dir():
        parser.error(f"{option}: {path} is a folder; name a file")
    if not path.parent.is_dir():
        parser.error(f"{option}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        parser.error(f"{option}: no permission to write {path}")


def check_plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a usage message unless there can be such a picture."""
    name = options.collectives[0]
    if not COLLECTIVES[name].has_size:
        parser.error(f"{name} has no sizes to plot")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    suffix = options.plot.suffix.lower()
    if suffix not in PLOT_SUFFIXES:
        parser.error(f"--plot: {suffix!r} is none of: {', '.join(PLOT_SUFFIXES)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--explain" in arguments:
        return explain.main(arguments)
    parser = make_parser()
    options = parser.parse_args(arguments)
    torchrun = elastic.under_torchrun() and options.nproc is None
    try:
        if not torchrun:
            plan = read_plan(parser, options, options.nproc or 2)
            return run(plan, None, options.json, options.plot)
        store, rank, world = elastic.meet()
        plan = read_plan(parser, options, world)
        if rank > 0:
            return elastic.run_starter(store, rank)
        return run(plan, store, options.json, options.plot)
    except BenchError as error:
        print(f"ringreduce.bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ringreduce.bench: interrupted", file=sys.stderr)
        return 130
