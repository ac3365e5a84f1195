"""The method: contenders take turns, round by round, and whoever is not timed sleeps.

For each size every contender is checked against the oracle, then calibrated (how many calls
fill a round), then timed: in each round, each contender in turn makes its calls back to back;
a round's time is that of its slowest rank, divided by the calls (and by the messages that
follow each other in a call). Who starts a round rotates.
At the end all are checked once more.  A contender that is optional and fails is left out.
"""

from __future__ import annotations

from ringreduce.tools.bench.collectives import COLLECTIVES
from ringreduce.tools.bench.launch import Controller, RankSet
from ringreduce.tools.bench.results import Measurement, Row
from ringreduce.tools.bench.settings import (
    OURS,
    ROOFLINE,
    BenchError,
    Message,
    Settings,
    Unsupported,
)

MOST_ITERATIONS = 50_000
SLEEP_SECONDS = 0.1  # below this the answers' own CPU time hides whether a set has slept


def measure_row(
    controller: Controller, settings: Settings, size: int, itemsize: int, skipped: dict[str, str]
) -> Row:
    """All contenders at `size` bytes, rounded down to what the collective can move.

    A peer that refuses the first call, or an optional one that fails, is added to `skipped` with
    its reason; who stands there is left out. Raises Unsupported if ours refuses, BenchError for all
    else.
    """
    cls = COLLECTIVES[settings.collective]
    count = cls.fit(size // itemsize, settings.world) if cls.has_size else 0
    row = Row(
        bytes=count * itemsize,
        count=count,
        dtype=settings.dtype if cls.has_size else "",
        op=settings.op if cls.reduces else "",
        busbw_factor=cls.busbw_factor(settings.world),
        measurements={},
    )
    calls: dict[str, int] = {}

    def drop(key: str, error: BenchError) -> None:
        """Leave out an optional contender that has failed; raise the error of another one."""
        if not controller.sets[key].contender.optional:
            raise error
        skipped[key] = "it failed: " + str(error).strip().splitlines()[-1].strip()
        controller.skip(key, skipped[key])
        row.measurements.pop(key, None)

    for key, ranks in list(controller.sets.items()):
        if key in skipped:
            continue
        try:
            ranks.ask(
                "prepare",
                collective=settings.collective,
                count=count,
                dtype=settings.dtype,
                op=settings.op,
            )
            measurement = Measurement()
            check(ranks, measurement, salt=1, error=bool(settings.codecs))
            calls[key] = settings.iterations or calibrate(ranks, settings.round_seconds)
        except BenchError as error:
            drop(key, error)
            continue
        except Unsupported as reason:
            if key in (OURS, ROOFLINE):
                raise Unsupported(f"{ranks.contender.title}: {reason}") from reason
            skipped[key] = str(reason)
            continue
        row.measurements[key] = measurement
    keys = list(row.measurements)
    idle: dict[str, list[Message]] = {key: [] for key in keys}
    for turn in range(settings.rounds):
        first = turn % len(keys)
        for key in keys[first:] + keys[:first]:
            if key not in row.measurements:
                continue
            ranks = controller.sets[key]
            try:
                answers = run_round(ranks, calls[key], settings.warmup)
                if not settings.iterations and too_short(
                    answers, calls[key], settings.round_seconds
                ):
                    # It was calibrated in a bad moment, or this is a good one: once more.
                    calls[key] = calibrate(ranks, settings.round_seconds)
                    answers = run_round(ranks, calls[key], settings.warmup)
            except BenchError as error:
                drop(key, error)
                continue
            row.measurements[key].add(answers, calls[key], cls.trips)
            if turn > 0:
                idle[key] += answers
    for key in list(row.measurements):
        try:
            check(controller.sets[key], row.measurements[key], 2, error=bool(settings.codecs))
        except BenchError as error:
            drop(key, error)
            continue
        slept = sum(a["idle"] for a in idle[key])
        used = sum(a["idle_cpu"] for a in idle[key])
        if slept > SLEEP_SECONDS:
            row.measurements[key].idle_cpu = used / slept
    return row


def run_round(ranks: RankSet, calls: int, warmup: int | None) -> list[Message]:
    """One round of one contender: `warmup` calls (None: a tenth), then `calls` timed ones."""
    if warmup is None:
        warmup = max(1, calls // 10)
    return ranks.ask("round", warmup=warmup, iterations=calls)


def too_short(answers: list[Message], calls: int, round_seconds: float) -> bool:
    """Whether a round ended so soon that its time says little."""
    return slowest(answers) < round_seconds / 4 and calls < MOST_ITERATIONS


def slowest(answers: list[Message]) -> float:
    """Seconds that the slowest rank took for all its calls."""
    return max(float(answer["seconds"]) for answer in answers)


def calibrate(ranks: RankSet, round_seconds: float) -> int:
    """How many calls fill a round."""
    ranks.ask("round", warmup=1, iterations=1)
    calls = 1
    while True:
        # The better of two, so that a disturbance does not make for short rounds.
        seconds = min(slowest(ranks.ask("round", warmup=0, iterations=calls)) for _ in range(2))
        wanted = max(1, round(min(MOST_ITERATIONS, round_seconds * calls / seconds)))
        if seconds > round_seconds / 8 or calls == MOST_ITERATIONS:
            return wanted
        calls = max(2 * calls, wanted // 4)
        calls = min(calls, MOST_ITERATIONS)


def check(ranks: RankSet, measurement: Measurement, salt: int, error: bool) -> None:
    """One call against the oracle on every rank; adds what is wrong to the measurement.

    With `error` also how far from exact the worst rank's result is.
    """
    if ranks.contender.kind == "roofline":
        ranks.ask("settle")
        return
    answers = ranks.ask("check", salt=salt, **({"error": True} if error else {}))
    for answer in answers:
        measurement.add_error(answer.get("distance", {}))
    measurement.wrong += sum(answer["wrong"] for answer in answers)
    if "came" in answers[0]:
        last = max(answer["came"] for answer in answers)
        measurement.wrong += sum(answer["left"] < last for answer in answers)
    measurement.same_bits &= len({answer["digest"] for answer in answers}) == 1


def sleepers_warning(row: Row, limit: float = 0.05) -> list[str]:
    """The contenders at this size that did not sleep while others were timed."""
    return [
        f"{key} used {100 * m.idle_cpu:.0f} % of a core a rank while others were timed"
        for key, m in row.measurements.items()
        if m.idle_cpu > limit
    ]
