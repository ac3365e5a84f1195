"""What benchmarks/accuracy.py found: a JSON file, tables in Markdown, a picture.

The JSON, schema 1 (losses in nats):

    machine     what it ran on
    groups      one for each model, world and way (with or without feedback)
        model, world, way, feedback, steps, parameters
        seeds               those that were run
        held_out_loss       the mean over seeds, on data that training never saw
        train_loss          the mean over seeds, of the last twentieth of the steps
        test_accuracy       likewise, where the model has one
        over_exact          held_out_loss / that of exact with the same seeds - 1
        over_exact_each     the same for each seed
        train_over_exact    train_loss / that of exact - 1
        cpu_seconds         of all ranks, the mean over seeds
        asked, met          the most that over_exact may be, where that was asked for
"""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

from ringreduce.bench.results import write_json

SCHEMA = 1
MARKS = ("<!-- accuracy: begin -->", "<!-- accuracy: end -->")
# How much worse than exact the GPT's final loss may be, as the mean of so many seeds.
LEAST_SEEDS = 3
ASKED = {("gpt", "int8", True): 0.005, ("gpt", "int4", True): 0.02}
COLOURS = {
    "exact": "black", "bfloat16": "#009E73", "float16": "#CC79A7", "int8": "#0072B2",
    "int4": "#D55E00",
}  # fmt: skip
REFERENCE_COLOUR = "#888888"

Record = dict[str, Any]


def name_of(way: str, feedback: bool) -> str:
    """A way's name for people."""
    if way == "fp16_hook":
        return "torch's fp16 hook"
    if way.startswith("powersgd_"):
        return f"torch's PowerSGD, rank {way.rpartition('_')[2]}"
    if way == "exact":
        return way
    return f"{way}, {'with' if feedback else 'without'} feedback"


def summarise(records: list[Record], machine: dict[str, Any]) -> dict[str, Any]:
    """The groups of a study, in the order in which they were asked for."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=_place):
        names = ("model", "world", "way", "feedback", "steps")
        grouped.setdefault(tuple(record[name] for name in names), []).append(record)
    groups = []
    for (model, world, way, feedback, steps), runs in grouped.items():
        exact = {r["seed"]: r for r in grouped.get((model, world, "exact", False, steps), [])}
        groups.append(
            {
                "model": model, "world": world, "way": way, "feedback": feedback, "steps": steps,
                "parameters": runs[0]["parameters"],
                "seeds": [run["seed"] for run in runs],
                **_figures(runs, exact, ASKED.get((model, way, feedback))),
            }
        )  # fmt: skip
    return {"schema": SCHEMA, "machine": machine, "groups": groups}


def _place(record: Record) -> tuple[Any, ...]:
    ways = ("exact", *(way for way in COLOURS if way != "exact"))
    way = ways.index(record["way"]) if record["way"] in ways else len(ways)
    return (record["model"], record["world"], record["steps"], way, record["way"],
            not record["feedback"], record["seed"])  # fmt: skip


def _figures(runs: list[Record], exact: dict[int, Record], asked: float | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: statistics.fmean(run[name] for run in runs)
        for name in ("held_out_loss", "train_loss", "test_accuracy", "cpu_seconds", "elements_sent")
        if name in runs[0]
    }
    if runs and all(run["seed"] in exact for run in runs) and runs[0]["way"] != "exact":
        for name, key in (("held_out_loss", "over_exact"), ("train_loss", "train_over_exact")):
            base = [exact[run["seed"]][name] for run in runs]
            figures[key] = figures[name] / statistics.fmean(base) - 1
            if key == "over_exact":
                pairs = zip(runs, base, strict=True)
                figures["over_exact_each"] = [run[name] / of_exact - 1 for run, of_exact in pairs]
    if asked is not None and "over_exact" in figures and len(runs) >= LEAST_SEEDS:
        figures |= {"asked": asked, "met": figures["over_exact"] <= asked}
    return figures


def faults(records: list[Record]) -> list[str]:
    """A sentence for each run whose ranks ended with different weights."""
    return [
        f"{record['model']}, {record['world']} ranks, "
        f"{name_of(record['way'], record['feedback'])}, seed {record['seed']}: "
        "ranks have different weights"
        for record in records
        if not record["same_weights"]
    ]


def tables(report: dict[str, Any]) -> list[str]:
    """A Markdown table for each model, all world sizes in it."""
    lines: list[str] = []
    for model in dict.fromkeys(group["model"] for group in report["groups"]):
        groups = [group for group in report["groups"] if group["model"] == model]
        first = groups[0]
        scored = "test_accuracy" in first
        seeds = sorted({seed for group in groups for seed in group["seeds"]})
        lines += [
            f"{model.upper()}, {first['parameters'] / 1e3:.0f} thousand parameters, "
            f"{first['steps']} steps, mean of seeds {', '.join(map(str, seeds))}:",
            "",
            "| ranks | gradients | held-out loss | over exact | each seed | training loss |"
            + (" test accuracy |" if scored else " asked |"),
            "|---|---|---|---|---|---|---|",
        ]
        for group in groups:
            lines.append("| " + " | ".join(_cells(group, seeds, scored)) + " |")
        lines.append("")
    return lines[:-1]


def _cells(group: dict[str, Any], seeds: list[int], scored: bool) -> list[str]:
    over = [f"{100 * group['over_exact']:+.2f} %"] if "over_exact" in group else ["-"]
    each = " ".join(f"{100 * value:+.2f}" for value in group.get("over_exact_each", [])) or "-"
    name = name_of(group["way"], group["feedback"])
    if group["seeds"] != seeds:
        name += f" (seeds {', '.join(map(str, group['seeds']))} only)"
    last = ""
    if scored:
        last = f"{100 * group['test_accuracy']:.2f} %"
    elif "asked" in group:
        verdict = "met" if group["met"] else "MISSED"
        last = f"at most {100 * group['asked']:+g} %: {verdict}"
    loss = f"{group['held_out_loss']:.4f}"
    return [str(group["world"]), name, loss, *over, each, f"{group['train_loss']:.4f}", last]


def write(report: dict[str, Any], records: list[Record], out: Path, docs: Path | None) -> None:
    """All files. Raises OSError, and ValueError where `docs` has no marks."""
    write_json(out / "accuracy.json", report)
    table = "\n".join(tables(report)) + "\n"
    (out / "accuracy.md").write_text(table)
    plot(report, records, out / "accuracy.png")
    if docs is not None:
        docs.write_text(between_marks(docs.read_text(), table))


def between_marks(text: str, table: str) -> str:
    """`text` with what stands between its marks replaced by `table`."""
    before, begin, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"the document has no {MARKS[0]} ... {MARKS[1]} to put the table between")
    return f"{before}{begin}\n\n{table}\n{end}{after}"


def plot(report: dict[str, Any], records: list[Record], path: Path) -> bool:
    """Loss curves to the left, how far each way ends from exact to the right; False without
    matplotlib, or where there is nothing to draw."""
    smallest = min(record["world"] for record in records)
    shown = [r for r in records if r["model"] == "gpt" and r["world"] == smallest]
    if importlib.util.find_spec("matplotlib") is None or not shown:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 5), layout="constrained", width_ratios=(1, 1.2)
    )
    _draw_curves(left, shown)
    _draw_distances(right, [g for g in report["groups"] if g["model"] == "gpt"])
    figure.suptitle(
        f"Character GPT, {shown[0]['parameters'] / 1e3:.0f} thousand parameters, "
        f"{shown[0]['steps']} steps"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _draw_curves(axes: Any, records: list[Record]) -> None:
    ways = dict.fromkeys((r["way"], r["feedback"]) for r in sorted(records, key=_place))
    for way, feedback in ways:
        if way not in ("exact", "int8", "int4"):
            continue
        curves = [r["curve"] for r in records if (r["way"], r["feedback"]) == (way, feedback)]
        steps = records[0]["steps"]
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        places = [(number + 0.5) * steps / len(means) for number in range(len(means))]
        style = "-" if feedback or way == "exact" else ":"
        axes.plot(places, means, style, color=COLOURS[way], label=name_of(way, feedback))
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a character (mean of seeds)")
    axes.set_title(f"{records[0]['world']} ranks")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_distances(axes: Any, groups: list[dict[str, Any]]) -> None:
    shown = [group for group in groups if "over_exact" in group]
    for row, group in enumerate(shown):
        colour = COLOURS.get(group["way"], REFERENCE_COLOUR)
        face = colour if group["feedback"] else "white"
        axes.barh(row, 100 * group["over_exact"], color=face, edgecolor=colour)
        each = [100 * value for value in group["over_exact_each"]]
        axes.plot(each, [row] * len(each), "k|", markersize=9)
    labels = [f"{name_of(g['way'], g['feedback'])}, {g['world']} ranks" for g in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1)
    axes.set_xlabel("held-out loss over that of exact, % (bars: mean, marks: each seed)")
    axes.grid(alpha=0.3, axis="x")
