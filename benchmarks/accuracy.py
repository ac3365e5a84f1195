"""What compressed gradients do to training: every codec, with and without error feedback.

    python benchmarks/accuracy.py                           # all runs: about 70 CPU-minutes
    python benchmarks/accuracy.py --models gpt --worlds 2 --ways exact,int8,int4
    python benchmarks/accuracy.py --report                  # no runs: report what is there

Trains the examples' GPT and MLP, made smaller (_accuracy_rank.py has the sizes), for a fixed number
of steps with three seeds, in every way: exact, each codec through
ringreduce.register_comm_hook(ddp, codec=..., error_feedback=...), and for reference torch's own
fp16 and PowerSGD hooks, over the same backend.  Runs with the same seed begin with the same weights
and see the same samples.  World size 2 has all ways, larger ones those that matter most.

Each run that ends is a line of OUT/accuracy.jsonl, and one that is there is not run again, so that
a study may be stopped and continued.  At the end OUT/accuracy.json and accuracy.png are written
(_accuracy_report.py says what is in them), and the table, which with --docs FILE also goes between
that file's two marks.  The exit status is 1 if ranks ended with different weights.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import _accuracy_report  # noqa: E402
from _launch import Job, JobFailed  # noqa: E402

from ringreduce.bench.machine import describe_machine  # noqa: E402

CODECS = ("bfloat16", "float16", "int8", "int4")
REFERENCES = ("fp16_hook", "powersgd_1", "powersgd_2", "powersgd_4")
WAYS = ("exact", *CODECS, *REFERENCES)
WORLDS = (2, 4, 8)
STEPS = {"gpt": 1000, "mlp": 300}
SEEDS = (0, 1, 2)
RUN_SECONDS = 1800.0  # that a run may take where others use the machine too


@dataclass(frozen=True)
class Training:
    """One run, by all that distinguishes it."""

    model: str
    world: int
    way: str
    feedback: bool
    seed: int
    steps: int


def feedbacks(way: str) -> tuple[bool, ...]:
    """Whether it is run with error feedback, without, or both."""
    if way in CODECS:
        return (True, False)
    return (way.startswith("powersgd"),)  # as its authors mean it to be used


def plan(
    models: Sequence[str],
    worlds: Sequence[int],
    ways: Sequence[str],
    seeds: Sequence[int],
    steps: dict[str, int],
    feedback: str = "both",
) -> list[Training]:
    """All runs that are asked for, those that tell most first."""
    wanted = []
    for world in worlds:
        for model in models:
            for seed in seeds:
                for way in ways:
                    # Larger groups show that an error does not grow: nothing else is new there.
                    if world > min(WORLDS) and way not in ("exact", "int8", "int4"):
                        continue
                    for kept in feedbacks(way):
                        if feedback == "both" or way not in CODECS or kept == (feedback == "with"):
                            wanted.append(Training(model, world, way, kept, seed, steps[model]))
    return wanted


def read_runs(path: Path) -> dict[Training, dict[str, Any]]:
    """The runs that are in a file, by what they are; a last line that was cut off is none."""
    found: dict[Training, dict[str, Any]] = {}
    if not path.exists():
        return found
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise ValueError(f"{path}, line {number + 1} is no JSON; remove it") from None
            continue
        found[Training(**record["training"])] = record["result"]
    return found


def mend_end(path: Path) -> None:
    """Drop a last line that was cut off, so that the next one begins a line."""
    if path.exists() and (text := path.read_text()) and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])


def result_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 found, and whether all ranks have its weights."""
    hashes = {answer["weights_hash"] for answer in answers}
    spent = sum(answer["cpu_seconds"] for answer in answers)
    return {**answers[0], "same_weights": len(hashes) == 1, "cpu_seconds": round(spent, 2)}


def carry_out(
    wanted: Iterable[Training],
    path: Path,
    logs: Path,
    say: Callable[[str], None],
    program: Path = HERE / "_accuracy_rank.py",
) -> None:
    """Do the runs, each appended to `path` as it ends. Raises JobFailed."""
    remaining = list(wanted)
    mend_end(path)
    while remaining:
        world = remaining[0].world
        turn = [training for training in remaining if training.world == world]
        remaining = [training for training in remaining if training.world != world]
        allowed = RUN_SECONDS * len(turn)
        with Job(
            f"accuracy-{world}", [str(program)], logs, allowed, nproc=world, conversation=True
        ) as job:
            for place, training in enumerate(turn):
                begin = time.monotonic()
                request = {k: v for k, v in asdict(training).items() if k != "world"}
                result = result_of(job.ask(f"run {json.dumps(request)}"))
                with path.open("a") as file:
                    file.write(json.dumps({"training": asdict(training), "result": result}) + "\n")
                say(
                    f"{place + 1}/{len(turn)}  {training.model}, {world} ranks, "
                    f"{_accuracy_report.name_of(training.way, training.feedback)}, seed "
                    f"{training.seed}: loss {result['held_out_loss']:.4f} on held-out data, "
                    f"{time.monotonic() - begin:.0f} s"
                )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=_some_of(tuple(STEPS)), default=tuple(STEPS), help="gpt,mlp")
    add("--ways", type=_some_of(WAYS), default=WAYS, help=f"of {', '.join(WAYS)}")
    add("--feedback", choices=("both", "with", "without"), default="both", help="of codecs")
    add("--worlds", type=_numbers, default=WORLDS, help="numbers of ranks (2,4,8)")
    add("--seeds", type=_numbers, default=SEEDS, help="0,1,2")
    add("--steps", type=int, help="of every run (GPT 1000, MLP 300)")
    add("--out", type=Path, default=HERE / "results", help="the folder of all files written")
    add("--logs", type=Path, default=HERE.parent / "build" / "accuracy", help="what ranks write")
    add("--docs", type=Path, help="put the table between this file's marks")
    add("--report", action="store_true", help="no runs, only table and plot")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error("--steps is a number above 0")
    if any(world < 2 or 8 % world for world in options.worlds):
        parser.error("--worlds: the samples of a step can be shared by 2, 4 and 8 ranks")
    if not options.out.is_dir():
        parser.error(f"--out: there is no folder {options.out}; make it first")
    if options.docs:
        try:
            _accuracy_report.between_marks(options.docs.read_text(), "")
        except (OSError, ValueError) as error:
            parser.error(f"--docs: {error}")
    return options


def _some_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of: {', '.join(known)}")
        return names

    return read


def _numbers(text: str) -> tuple[int, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not all(name.isdecimal() for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers")
    return tuple(int(name) for name in names)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is still to be done and write the report; the exit status."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _on_terminate)
    steps = {model: options.steps or STEPS[model] for model in STEPS}
    asked = (options.models, options.worlds, options.ways, options.seeds)
    wanted = plan(*asked, steps, options.feedback)
    path = options.out / "accuracy.jsonl"
    status = 0
    try:
        done = read_runs(path)
        todo = [] if options.report else [one for one in wanted if one not in done]
        print(f"# {len(todo)} runs to do, {len(done)} are in {path}", flush=True)
        carry_out(todo, path, options.logs, lambda text: print(text, flush=True))
    except JobFailed as failure:
        print(f"accuracy.py: {failure}", file=sys.stderr)
        status = 1
    except ValueError as error:
        print(f"accuracy.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("accuracy.py: interrupted; it continues where it was when started again",
              file=sys.stderr)  # fmt: skip
        status = 130
    found = {run: result for run, result in read_runs(path).items() if run in wanted}
    records = [{**asdict(run), **result} for run, result in found.items()]
    if not records:
        return status
    report = _accuracy_report.summarise(records, describe_machine())
    _accuracy_report.write(report, records, options.out, options.docs)
    print("\n".join(["", *_accuracy_report.tables(report)]))
    for fault in _accuracy_report.faults(records):
        print(f"# WRONG: {fault}")
        status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
