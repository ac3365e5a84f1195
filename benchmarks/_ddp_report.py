"""What benchmarks/ddp.py found: JSON and tables.

The JSON, schema 1 (times in seconds, sizes in bytes):

    created, machine, settings, notes, skipped     as ringreduce.bench's reports have them
    titles       {way: its name for people}
    models       one each
        name, parameters, sizes                    of the model and of a rank's batch
        ways     {way: what it did}

    a way        step, no_sync      seconds of each timed step of the slowest rank; of no_sync
                                    only where there is a sync to leave out
                 wrong, same_bits   gradients that were not the mean of all ranks' own, before and
                                    after; whether ranks had the same bits
                 allocated_bytes    torch.cuda.max_memory_allocated; gpu_bytes and staging_bytes are
                                    ringreduce's own, on the GPU and in the host's memory
                 choice             of the codec "auto", and why; else ""
                 samples_per_s, exposed_s, over_bare_s    follow from these; written for readers
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.tools.bench.results import percentile, write_json

SCHEMA = 1
BARE, STOCK = "bare", "stock"
OURS = ("ours", "hook")


@dataclass
class WayResult:
    step: list[float] = field(default_factory=list)
    no_sync: list[float] = field(default_factory=list)
    wrong: int = 0
    same_bits: bool = True
    allocated_bytes: int = 0
    gpu_bytes: int = 0
    staging_bytes: int = 0
    choice: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.step)

    @property
    def exposed(self) -> float | None:
        """A step less the same under no_sync; None where there is no sync."""
        return self.median - statistics.median(self.no_sync) if self.no_sync else None


@dataclass
class ModelResult:
    name: str
    parameters: int
    sizes: dict[str, Any]
    ways: dict[str, WayResult]

    def over_bare(self, key: str) -> float | None:
        """A step less the bare one."""
        if key == BARE or BARE not in self.ways:
            return None
        return self.ways[key].median - self.ways[BARE].median


@dataclass
class Run:
    created: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    titles: dict[str, str]
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    models: list[ModelResult] = field(default_factory=list)

    def samples_per_s(self, model: ModelResult, key: str) -> float:
        return float(self.settings["world"] * model.sizes["batch"] / model.ways[key].median)

    def faults(self) -> list[str]:
        """A sentence for each way with a wrong gradient."""
        found = []
        for model in self.models:
            for key, way in model.ways.items():
                what = f"{model.name}, {self.titles[key]}"
                if way.wrong:
                    found.append(f"{what}: {way.wrong} gradients are not the mean of all ranks'")
                if not way.same_bits:
                    found.append(f"{what}: ranks have different bits")
        return found

    @property
    def ours_is_right(self) -> bool:
        ways = [model.ways[key] for model in self.models for key in OURS if key in model.ways]
        return bool(ways) and all(way.wrong == 0 and way.same_bits for way in ways)

    def write(self, path: Path) -> None:
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        for model, entry in zip(self.models, document["models"], strict=True):
            for key, way in model.ways.items():
                entry["ways"][key].update(
                    samples_per_s=self.samples_per_s(model, key),
                    median_s=way.median,
                    exposed_s=way.exposed,
                    over_bare_s=model.over_bare(key),
                )
        write_json(path, document)


def preamble(report: Run) -> list[str]:
    machine, settings = report.machine, report.settings
    lines = [f"benchmarks/ddp.py, {report.created}"]
    if settings["device"] == "cuda":
        gpus = ", ".join(dict.fromkeys(machine["gpus"]))
        lines.append(f"gpu       {gpus}; CUDA {machine['cuda']}, NCCL {machine['nccl'] or 'none'}")
    lines += [
        f"machine   {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}",
        f"ranks     {settings['world']} for each way, {settings['dtype']}; in turns, "
        f"{settings['rounds']} of {settings['steps']} timed steps; others asleep",
    ]
    if settings["sharing"]:
        lines.append(f"          {settings['sharing'].upper()}: no link between GPUs is measured")
    lines += [f"note      {note}" for note in report.notes]
    lines += [f"skipped   {report.titles[key]}: {why}" for key, why in report.skipped.items()]
    return [f"# {line}" for line in lines]


def table(report: Run, model: ModelResult) -> list[str]:
    """A model's rows.  "exposed" is less no_sync, "over bare" less the step without any sync."""
    sizes = ", ".join(f"{name} {value}" for name, value in model.sizes.items())
    lines = [f"{model.name}: {model.parameters / 1e6:.3g} M parameters; {sizes}"]
    if report.settings["sharing"]:
        lines.append(report.settings["sharing"])
    width = max(len(report.titles[key]) for key in model.ways) + 2
    lines.append(
        f"{'':{width}}{'samples/s':>11}{'step, ms':>10}{'p10-p90':>18}{'exposed':>10}"
        f"{'over bare':>11}{'stock / it':>12}{'torch, MiB':>12}{'ours, MiB':>11}{'staging':>9}"
        f"{'#wrong':>8}"
    )
    for key, way in model.ways.items():
        spread = f"{1e3 * percentile(way.step, 0.1):.2f}-{1e3 * percentile(way.step, 0.9):.2f}"
        over = "-"
        if STOCK in model.ways:
            over = f"{model.ways[STOCK].median / way.median:.2f} x"
        lines.append(
            f"{report.titles[key]:{width}}{report.samples_per_s(model, key):>11.1f}"
            f"{1e3 * way.median:>10.2f}{spread:>18}{_ms(way.exposed):>10}"
            f"{_ms(model.over_bare(key)):>11}{over:>12}{way.allocated_bytes / 2**20:>12.0f}"
            f"{way.gpu_bytes / 2**20:>11.1f}{way.staging_bytes / 2**20:>9.1f}"
            f"{f'{way.wrong}' + '!' * (not way.same_bits):>8}"
        )
    return lines


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"
