"""What the demo shows at its end: a table for the terminal and a plot, both from its results."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files, needs no screen
from matplotlib import pyplot

GREY, PALE, DARK = "#b8bcc4", "#f2a65a", "#1f4e79"


def summary(results: dict[str, Any], out: Path) -> str:
    """The tables, whether all bits were equal, and where the files are."""
    lines = [*_sample(results["gpt"]), *_gpt_table(results["gpt"]), *_mlp_table(results["mlp"])]
    lines += ["", "Bits"]
    for title, part in (("GPT", results["gpt"]), ("MLP", results["mlp"])):
        lines += _verdicts(title, part["runs"])
    lines += ["", f"Plot {out / 'demo.png'}, figures {out / 'demo.json'}, logs {out / 'logs'}/"]
    lines += [f"Done in {results['seconds']:.0f} s."]
    return "\n".join(lines)


def _sample(gpt: dict[str, Any]) -> list[str]:
    name, run = list(gpt["runs"].items())[-1]
    text = [f"    | {line}".rstrip() for line in run["sample"].rstrip().splitlines()]
    return ["", f"Text that the GPT trained over {name} writes:", *text]


def _gpt_table(gpt: dict[str, Any]) -> list[str]:
    runs = gpt["runs"]
    size = next(iter(runs.values()))["parameters"] / 1e6
    rows = [
        ("loss, last 20 steps", "final_loss", ".4f"),
        ("loss on held-out files", "held_out_loss", ".4f"),
        ("tokens a second, all ranks", "tokens_per_s", ",.0f"),
        ("forward and backward, ms *", "step_ms", ".1f"),
        ("the same without sync, ms *", "no_sync_ms", ".1f"),
        ("waiting for gradients, ms *", "sync_ms", ".1f"),
    ]
    lines = ["", f"GPT: {size:.1f} M parameters, {gpt['ranks']} ranks, {gpt['steps']} steps"]
    lines += [" " * 30 + "".join(f"{name:>16}" for name in runs)]
    for title, key, form in rows:
        lines += [f"  {title:<28}" + "".join(f"{run[key]:>16{form}}" for run in runs.values())]
    return [*lines, "  * medians of steps with sync and under no_sync() in turns; the difference"]


def _mlp_table(mlp: dict[str, Any]) -> list[str]:
    runs = mlp["runs"]
    base = next(iter(runs))
    lines = ["", f"Wide MLP: 17.1 M parameters, {mlp['ranks']} ranks, 16 images a rank and step"]
    lines += [
        f"  {'':<16}{'step, ms':>10}{'quartiles':>16}{'sync, ms *':>12}"
        f"{f'{base} / it':>14}{'test accuracy':>15}"
    ]
    for name, run in runs.items():
        low, high = run["quartiles_ms"]
        line = f"  {name:<16}{run['step_ms']:>10.1f}{f'{low:.1f} - {high:.1f}':>16}"
        if "sync_ms" in run:
            line += f"{run['sync_ms']:>12.1f}{run['speedup']:>12.2f} x{run['test_accuracy']:>15.2%}"
        lines += [line]
    steps = next(iter(runs.values()))["steps"]
    return [*lines, f"  * step less {mlp['no_sync']} step; medians of {steps} steps (all ranks')"]


def _verdicts(title: str, runs: dict[str, Any]) -> list[str]:
    """One line a run that was compared: equal in every bit, or where it first differs."""
    base = next(iter(runs))
    lines = []
    for name, run in runs.items():
        if name == base or "differs" not in run:
            continue
        if run["differs"]:
            verdict = f"DIFFERENT: {run['differs']}"
        else:
            verdict = "equal (every loss of every rank, and all weights at the end)"
        lines.append(f"  {title}, {base} and {name}: {verdict}")
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """Left the GPT's loss curves, one over the other; right what the MLP's steps consist of."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _plot_losses(left, results["gpt"])
    _plot_steps(right, results["mlp"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_losses(axes: Any, gpt: dict[str, Any]) -> None:
    styles = [{"color": PALE, "linewidth": 5}, {"color": DARK, "linewidth": 1}]
    for (name, run), style in zip(gpt["runs"].items(), styles, strict=True):
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name, **style)
    equal = not any(run["differs"] for run in gpt["runs"].values())
    axes.set_title("Character GPT: " + ("every loss has the same bits" if equal else "DIFFERENT"))
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a character")
    axes.grid(alpha=0.3)
    axes.legend()


def _plot_steps(axes: Any, mlp: dict[str, Any]) -> None:
    runs = mlp["runs"]
    alone = runs[mlp["no_sync"]]["step_ms"]
    for row, (name, run) in enumerate(runs.items()):
        median = run["step_ms"]
        low, high = run["quartiles_ms"]
        axes.barh(row, min(median, alone), color=GREY)
        if "sync_ms" in run:
            color = DARK if "ringreduce" in name else PALE
            axes.barh(row, max(median - alone, 0), left=alone, color=color)
        axes.errorbar(median, row, xerr=[[median - low], [high - median]], color="black", capsize=4)
        text = f"{median:.0f} ms"
        if "sync_ms" in run:
            text += f", sync {run['sync_ms']:.0f}"
        axes.annotate(text, (high, row), xytext=(8, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(run["quartiles_ms"][1] for run in runs.values()))
    axes.set_xlabel("ms a step (grey: without sync; colour: sync; whiskers: quartiles)")
    axes.set_title("Wide MLP, 17 M parameters: time a step")
