"""Trains a ResNet-50 and a GPT-2 small by every way to train in parallel, in one run, in turns.

    python benchmarks/ddp.py --device cuda --nproc 8 --dtype bfloat16 --out benchmarks/results/ddp_8
    python benchmarks/ddp.py --device cuda --nproc 1            # what the hook adds to a step
    python benchmarks/ddp.py --tiny --models gpt2 --set gpt2.layers=4

The ways: no sync at all ("bare"), torch.nn.DataParallel where one process has several GPUs, DDP
on the stock backend (nccl; gloo on CPUs, and where nccl refuses ranks that share a GPU), DDP on
ringreduce, and DDP with ringreduce's hook beside the stock backend; on CPUs also DDP on ringreduce
with buckets that the ranks do not share, and DDP whose hook sends nothing, which shows what DDP
takes by itself.  Each has rank processes of its
own, which sleep while others are timed (ringreduce.bench's).  The models and their random batches
are the same for all; gradients are checked against the mean of all ranks' own before and after.

A step is forward, backward and the optimizer, timed on GPUs between CUDA events.  Exposed
communication is a step less the same step under no_sync(), or less the bare one.  With --out
P the file P.json is written.  The exit status is 1 if ringreduce was wrong.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import _ddp_report
from _ddp_models import STUDIED, WORKLOADS
from _ddp_report import ModelResult, Run, WayResult

from ringreduce.core.processes import exit_at
from ringreduce.tools.bench.contenders import equipped
from ringreduce.tools.bench.launch import Controller
from ringreduce.tools.bench.machine import describe_gpus, describe_machine
from ringreduce.tools.bench.placing import Placing, nccl_environment, place
from ringreduce.tools.bench.settings import (
    DEVICES,
    BenchError,
    Contender,
    Message,
    Settings,
    Unsupported,
)

PROGRAM = (str(Path(__file__).resolve().parent / "_ddp_rank.py"),)
# How far a gradient's projection may be from the mean of the ranks' own, as a share of the norm:
# two backward passes of the same batch differ by roundings where a GPU adds in any order.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
# The same where gradients travel through a codec: its losses, of which signs cancel most.
CODED_TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "int8": 0.1, "int4": 1.0, "auto": 0.1}


def ways(placing: Placing) -> list[Contender]:
    """All ways to train on this machine, the bare one first; those that are missing say why."""
    nccl = equipped(Contender("stock", "DDP, nccl", "ddp", "nccl"), nccl_environment, placing)
    stock = nccl if not nccl.missing else Contender("stock", "DDP, gloo", "ddp", "gloo")
    hook = replace(stock, key="hook", title=f"{stock.title} + ringreduce hook", kind="hook")
    alone = ""
    if placing.device == "cpu" or placing.devices < 2 or placing.world < 2:
        there = "none" if placing.device == "cpu" else str(min(placing.devices, placing.world))
        alone = f"it is one process over several GPUs, and here it would have {there}"
    found = [
        Contender("bare", "no sync", "bare", "gloo"),
        Contender("parallel", "DataParallel", "parallel", "gloo", optional=True, missing=alone),
        replace(stock, optional=True),
        Contender("ours", "DDP, ringreduce", "ddp", "ringreduce"),
        hook,
    ]
    if placing.device == "cpu":
        private = {"DDP_DISABLE_COMM_MEM": "1"}
        title = "DDP, ringreduce, private buckets"
        found.append(Contender("private", title, "ddp", "ringreduce", environment=private))
        found.append(Contender("alone", "DDP that sends nothing", "alone", "gloo"))
    where = {"device": placing.device, "devices": placing.devices, "program": PROGRAM}
    return [replace(contender, **where) for contender in found]


def why_not_nccl(placing: Placing) -> str:
    """Why stock is gloo on GPUs; "" if it is not, or if that needs no reason."""
    try:
        if placing.device == "cuda":
            nccl_environment(placing)
    except Unsupported as reason:
        return str(reason)
    return ""


def sizes_of(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """The numbers of a model: full or tiny, and what --set says."""
    workload = WORKLOADS[model]
    sizes = dict(workload.tiny if options.tiny else workload.full)
    if options.batch is not None:
        sizes["batch"] = options.batch
    for name, value in options.set:
        which, _, field = name.partition(".")
        if which == model:
            sizes[field] = value
    return sizes


class Race:
    """The ways that train one model, in turns."""

    def __init__(self, controller: Controller, options: argparse.Namespace, model: str) -> None:
        self.controller = controller
        self.options = options
        self.result = ModelResult(model, 0, sizes_of(options, model), {})
        self.skipped: dict[str, str] = {}
        self.bare: list[Message] = []

    def ask(self, key: str, do: str, **arguments: Any) -> list[Message] | None:
        """The ranks' answers; None from an optional way that fails, which is then left out."""
        ranks = self.controller.sets[key]
        try:
            return ranks.ask(do, **arguments)
        except (BenchError, Unsupported) as error:
            if not ranks.contender.optional:
                raise BenchError(str(error)) from error
            self.skipped[key] = "it failed: " + str(error).strip().splitlines()[-1].strip()
            self.controller.skip(key, self.skipped[key])
            self.result.ways.pop(key, None)
            return None

    def run(self) -> ModelResult:
        result, options = self.result, self.options
        for key in list(self.controller.sets):
            arguments = {"model": result.name, "sizes": result.sizes, "dtype": options.dtype}
            prepared = self.ask(key, "prepare", **arguments)
            if prepared is not None:
                result.ways[key] = WayResult()
                result.parameters = prepared[0]["parameters"]
                if key == "auto":
                    chosen = self.controller.sets[key].ask("choose")[0]
                    result.ways[key].choice = f"{chosen['choice']}: {chosen['why']}"
                self.check(key, first=True)
        keys = list(result.ways)
        for turn in range(options.rounds + 1):
            first = turn % len(keys)
            for key in keys[first:] + keys[:first]:
                if key in result.ways:
                    answers = self.ask(key, "round", steps=options.steps, warmup=options.warmup)
                    # The first round starts everybody up: caches, DDP's buckets.
                    if answers is not None and turn > 0:
                        add(result.ways[key], answers)
        for key in list(result.ways):
            self.check(key, first=False)
            memory = self.ask(key, "memory") if key in result.ways else None
            if memory is not None:
                way = result.ways[key]
                way.allocated_bytes = max(answer["allocated"] for answer in memory)
                way.gpu_bytes = max(answer["gpu"] for answer in memory)
                way.staging_bytes = max(answer["staging"] for answer in memory)
        return result

    def check(self, key: str, *, first: bool) -> None:
        """Every gradient is the mean of the ranks' own, and has the same bits on all of them."""
        kind = self.controller.sets[key].contender.kind
        if kind == "parallel" and not first:
            return  # its weights have gone their own way, and it has no ranks to compare with
        answers = self.ask(key, "check")
        if answers is None:
            return
        if kind == "bare":
            self.bare = answers
        if kind in ("bare", "alone"):
            return
        synced = [answer for answer in answers if "synced" in answer]
        own = self.bare if kind == "parallel" else answers
        way = self.result.ways[key]
        tolerance = CODED_TOLERANCE[key] if kind == "codec" else TOLERANCE[self.options.dtype]
        way.wrong += wrong_gradients(own, synced, tolerance)
        way.same_bits &= len({answer["digest"] for answer in synced}) == 1


def wrong_gradients(own: list[Message], synced: list[Message], tolerance: float) -> int:
    """How many gradients of all ranks are not the mean of `own`."""
    wrong = 0
    local = list(zip(*(answer["local"] for answer in own), strict=True))
    norms = [max(values) for values in zip(*(answer["norms"] for answer in own), strict=True)]
    for answer in synced:
        for values, norm, value in zip(local, norms, answer["synced"], strict=True):
            # NaN is never right.
            wrong += not abs(value - statistics.mean(values)) <= tolerance * norm + 1e-12
    return wrong


def add(way: WayResult, answers: list[Message]) -> None:
    """A round: each step is as long as that of its slowest rank."""
    for name in ("step", "no_sync"):
        ranks = [answer[name] for answer in answers if answer.get(name)]
        getattr(way, name).extend(max(laps) for laps in zip(*ranks, strict=True))


def run(options: argparse.Namespace) -> int:
    """All models, one after the other; returns the exit status."""
    placing = place(options.device, options.nproc)
    contenders = ways(placing)
    settings = Settings("ddp", options.nproc, (), timeout=options.timeout, device=options.device)
    report = Run(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(),
        settings={
            "device": options.device, "world": options.nproc, "dtype": options.dtype,
            "rounds": options.rounds, "steps": options.steps, "sharing": placing.label,
        },
        titles={contender.key: contender.title for contender in contenders},
    )  # fmt: skip
    if why := why_not_nccl(placing):
        report.notes.append(f"stock is gloo: {why}")
    with Controller(settings, range(options.nproc)) as controller:
        controller.start(contenders)
        report.skipped.update(controller.skipped)
        if placing.device == "cuda":
            names = [str(answer["gpu"]) for answer in controller.sets["ours"].ask("where")]
            report.machine.update(describe_gpus(names))
        print("\n".join(_ddp_report.preamble(report)), flush=True)
        for model in options.models:
            race = Race(controller, options, model)
            report.models.append(race.run())
            report.skipped.update(race.skipped)
            print("\n".join(["", *_ddp_report.table(report, report.models[-1])]), flush=True)
            for key, why in race.skipped.items():
                print(f"# left out: {report.titles[key]}: {why}", flush=True)
            if options.out:
                report.write(options.out.with_suffix(".json"))
        controller.close()
    if options.out:
        print(f"\nwritten: {options.out}.json")
    for fault in report.faults():
        print(f"# WRONG: {fault}", flush=True)
    return 0 if report.ours_is_right else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=DEVICES, default="cpu")
    add("--nproc", type=int, default=2, help="ranks (2)")
    add("--models", type=lambda text: text.split(","), default=list(STUDIED),
        help=f"of {', '.join(WORKLOADS)}; {' and '.join(STUDIED)}")  # fmt: skip
    add("--dtype", choices=tuple(TOLERANCE), default="float32", help="bfloat16: by autocast")
    add("--tiny", action="store_true", help="models of some thousand parameters, to try it")
    add("--batch", type=int, help="samples a rank and step (ResNet 32, GPT 4)")
    add("--set", type=_setting, action="append", default=[], metavar="MODEL.NAME=NUMBER",
        help="another size of a model, as in resnet50.side=128 or gpt2.tokens=1024")  # fmt: skip
    add("--rounds", type=int, default=5, help="timed turns of each way (5)")
    add("--steps", type=int, default=10, help="timed steps in a turn (10)")
    add("--warmup", type=int, default=2, help="steps before them (2)")
    add("--timeout", type=float, default=300.0, help="seconds that any one turn may take")
    add("--out", type=Path, metavar="P", help="write P.json")
    options = parser.parse_args(arguments)
    for model in options.models:
        if model not in WORKLOADS:
            parser.error(f"--models: {model!r} is none of {', '.join(WORKLOADS)}")
    for name, _ in options.set:
        model, _, field = name.partition(".")
        if field not in WORKLOADS.get(model, WORKLOADS["gpt2"]).full or model not in WORKLOADS:
            parser.error(f"--set: there is no {name}")
    if min(options.nproc, options.rounds, options.steps) < 1:
        parser.error("--nproc, --rounds and --steps are numbers above 0")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}; make it first")
    return options


def _setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL.NAME=NUMBER")
    return name, int(value)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    exit_at(signal.SIGTERM, signal.SIGHUP)
    try:
        return run(options)
    except BenchError as error:
        print(f"ddp.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ddp.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
