"""What the demos show at their end: tables for the terminal and a plot, from their results."""

import statistics
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


def survival(results: dict[str, Any], out: Path) -> str:
    """What demo_survive.py shows: ringreduce's log, the losses, times, and whether all held."""
    victim, lost, joined = (results[k] for k in ("victim", "lost_in_step", "joined_in_step"))
    rows = [
        (f"step {lost}, in which rank {victim} was lost", "loss_step_ms"),
        ("from SIGKILL to the end of that step", "kill_to_next_step_ms"),
        ("median of the other steps", "step_ms"),
        ("nine tenths of them are shorter than", "step_90_ms"),
        (f"commit of step {joined}, in which it joined", "join_commit_ms"),
        ("median of the other commits", "commit_ms"),
    ]
    lines = ["", "Logged by ringreduce:", *(f"  {line}" for line in results["logged"])]
    lines += ["", "Loss of each step, mean of the ranks:"]
    lines += _text_curve(results["losses"], {lost: "lost", joined: "joined"})
    lines += ["", "Slowest rank, ms"]
    lines += [f"  {title:<44}{results[key]:>9.1f}" for title, key in rows]
    lines += [f"  from its start to its join the process took {results['start_to_join_s']:.1f} s"]
    lost_steps = results["lost_steps"]
    lines += ["", f"Steps lost: {len(lost_steps)}" + (f" ({lost_steps})" if lost_steps else "")]
    weights = "equal in every bit" if results["equal_weights"] else "DIFFERENT"
    lines += [f"Weights of the {results['ranks']} ranks at the end: {weights}"]
    lines += [
        "",
        f"Plot {out / 'survive.png'}, figures {out / 'survive.json'}, logs {out / 'logs'}/",
    ]
    return "\n".join([*lines, f"Done in {results['seconds']:.0f} s."])


def _text_curve(values: list[float], marks: dict[int, str]) -> list[str]:
    """A curve of `values`, of steps 1 and on, with a vertical line at each marked step."""
    width, height = min(72, len(values)), 12

    def column(step: int) -> int:
        return (step - 1) * width // len(values)

    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in enumerate(values, 1):
        columns[column(step)].append(value)
    means = [statistics.mean(part) for part in columns]
    low, high = min(means), max(means)
    marked = {column(step) for step in marks}
    lines = []
    for row in range(height):
        upper = high - (high - low) * row / height
        lower = high - (high - low) * (row + 1) / height
        label = f"{upper:8.2f} " if row % 4 == 0 else " " * 9
        cells = (
            "*" if lower <= mean <= upper else "|" if place in marked else " "
            for place, mean in enumerate(means)
        )
        lines.append((label + "".join(cells)).rstrip())
    names = [" "] * (width + 8 + 20)
    for step, name in marks.items():
        text = f"{name} ({step})"
        names[9 + column(step) : 9 + column(step) + len(text)] = list(text)
    return [*lines, "".join(names).rstrip()]


def plot_survival(results: dict[str, Any], path: Path) -> None:
    """The loss curve with the moments in which the rank was lost and joined."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    losses = results["losses"]
    axes.plot(range(1, len(losses) + 1), losses, color=DARK, linewidth=1)
    ranks, victim = results["ranks"], results["victim"]
    for key, height, text in (
        ("lost_in_step", 0.95, f"rank {victim} is lost: {ranks - 1} ranks go on "),
        ("joined_in_step", 0.88, f"a new rank {victim} joins: {ranks} ranks go on "),
    ):
        axes.axvline(results[key], color=PALE)
        place = (results[key], height)
        axes.text(*place, text, transform=axes.get_xaxis_transform(), horizontalalignment="right")
    axes.set_title(f"Character GPT: {len(results['lost_steps'])} of {len(losses)} steps lost")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a character")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
