"""A run of the benchmark: the controller measures one collective after the other and reports."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from ringreduce.core.processes import exit_at
from ringreduce.tools.bench import elastic
from ringreduce.tools.bench.alternate import measure_row, sleepers_warning
from ringreduce.tools.bench.collective import item_size
from ringreduce.tools.bench.contenders import contenders_of
from ringreduce.tools.bench.launch import Controller
from ringreduce.tools.bench.machine import describe_gpus, describe_machine
from ringreduce.tools.bench.placing import Placing, place
from ringreduce.tools.bench.plot import write_plot
from ringreduce.tools.bench.results import Report, Suite
from ringreduce.tools.bench.settings import (
    ALGORITHM_VARIABLES,
    OURS,
    BenchError,
    Contender,
    Settings,
    Unsupported,
)
from ringreduce.tools.bench.summary import summary
from ringreduce.tools.bench.table import codec_table, format_row, header, preamble


def run(
    plan: Sequence[Settings],
    store: Store | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> int:
    """Be the controller, with torchrun's `store` if there is one; returns the exit status.

    `plan` has the settings of each collective, alike in all else but sizes. If there are
    several, the roofline is left out, what ringreduce refuses is passed over, and the JSON file
    is written after each of them. Raises BenchError.
    """
    exit_at(signal.SIGTERM, signal.SIGHUP)
    first, alone = plan[0], len(plan) == 1
    placing = place(first.device, first.world)
    contenders = contenders_of(first, placing, roofline=alone)
    starts = range(first.world) if store is None else [0]
    suite = Suite()
    try:
        with Controller(first, starts) as controller:
            if store is not None:
                elastic.announce(store, controller.place, contenders)
            controller.start(contenders)
            for settings in plan:
                try:
                    report = measure(controller, settings, contenders, placing, suite)
                    suite.reports.append(report)
                except Unsupported as reason:
                    if alone:
                        raise BenchError(str(reason)) from reason
                    suite.refused[settings.collective] = str(reason)
                    print(f"\n# {settings.collective}\n# refused by {reason}", flush=True)
                if json_path and not alone:
                    save(suite.write, json_path)
            controller.close()
    finally:  # if a rank fails in one collective, the others' numbers are still good
        for report in suite.reports:
            for fault in report.faults():
                print(f"# WRONG: {report.collective}: {fault}", flush=True)
        if not alone and suite.reports:
            print("\n".join(["", *summary(suite)]), flush=True)
    if json_path and alone:
        save(suite.reports[0].write, json_path)
    if plot_path:
        save(partial(write_plot, suite.reports[0]), plot_path)
    right = all(report.ours_is_right for report in suite.reports)
    return 0 if right and not suite.refused else 1


def measure(
    controller: Controller,
    settings: Settings,
    contenders: Sequence[Contender],
    placing: Placing,
    suite: Suite,
) -> Report:
    """One collective, printed as it goes, after those in `suite`.

    Raises Unsupported if ringreduce refuses it.
    """
    report = Report(
        collective=settings.collective,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine={
            **describe_machine(),
            "environment": _environment(),
            "mpi": _mpi_version(controller),
            **_gpus(controller, placing),
        },
        library=_library(controller),
        settings=asdict(settings),
        titles={contender.key: contender.title for contender in contenders},
        skipped=dict(controller.skipped),
    )
    if not suite.reports and not suite.refused:
        print("\n".join(preamble(report)), flush=True)
    for size in settings.sizes:
        before = set(report.skipped)
        row = measure_row(controller, settings, size, item_size(settings.dtype), report.skipped)
        report.rows.append(row)
        if len(report.rows) == 1:
            print("\n".join(["", *header(report)]), flush=True)
        elif late := set(report.skipped) - before:
            for key in sorted(late):
                print(f"# left out: {report.titles[key]}: {report.skipped[key]}", flush=True)
        print(format_row(report, row), flush=True)
        for warning in sleepers_warning(row):
            print(f"# warning: {warning}", flush=True)
    if report.codecs:
        print("\n".join(["", *codec_table(report)]), flush=True)
    report.library = _library(controller)  # staging memory may have grown
    return report


def save(write: Callable[[Path], None], path: Path) -> None:
    """Call `write` for a file; raises BenchError where that cannot be written."""
    try:
        write(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def _library(controller: Controller) -> dict[str, object]:
    """What ringreduce says about itself; the greatest staging memory of all ranks."""
    about = controller.sets[OURS].ask("about")
    return max(about, key=lambda entry: int(entry.get("staging_bytes", 0)))


def _mpi_version(controller: Controller) -> str:
    """The MPI library that is compared with, or "" if none is."""
    return (
        str(controller.sets["mpi"].ask("about")[0]["version"]) if "mpi" in controller.sets else ""
    )


def _gpus(controller: Controller, placing: Placing) -> dict[str, object]:
    """The ranks' GPUs and what of CUDA is there, nothing on a CPU."""
    if placing.device == "cpu":
        return {}
    names = [str(answer["gpu"]) for answer in controller.sets[OURS].ask("where")]
    return {**describe_gpus(names), "sharing": placing.label}


def _environment() -> str:
    """The variables that change what ringreduce does, but --algorithm's."""
    names = sorted(name for name in os.environ if name.startswith("RINGREDUCE_"))
    asked = ALGORITHM_VARIABLES.values()
    return " ".join(f"{name}={os.environ[name]}" for name in names if name not in asked)
