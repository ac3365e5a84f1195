"""The benchmark: what it refuses, whom it compares and how, that wrong results are seen."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from ringreduce.tools.bench import oracle
from ringreduce.tools.bench.alternate import measure_row
from ringreduce.tools.bench.cli import main
from ringreduce.tools.bench.collective import Case
from ringreduce.tools.bench.collectives import COLLECTIVES
from ringreduce.tools.bench.contenders import contenders_of
from ringreduce.tools.bench.placing import Placing
from ringreduce.tools.bench.rank import Rank
from ringreduce.tools.bench.reducing import AllReduce
from ringreduce.tools.bench.results import Measurement, Report, Row, Suite
from ringreduce.tools.bench.settings import (
    CODECS,
    DTYPES,
    OPS,
    OURS,
    Settings,
)
from ringreduce.tools.bench.summary import summary

# --- What it is asked for -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_a_round_takes_some_time(text, capsys):
    for option in ("--seconds", "--timeout"):
        with pytest.raises(SystemExit):
            main(["all_reduce", option, text])
        said = capsys.readouterr().err
        assert option in said and "is no number of seconds above 0" in said
    with pytest.raises(SystemExit):
        main(["all_reduce", "--seconds", "5", "--timeout", "5"])
    assert "would outlast --timeout" in capsys.readouterr().err


def test_the_choice_of_algorithm_is_explained(capsys):
    def table(arguments: str) -> dict[str, str]:
        assert main(["--explain", *arguments.split()]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line[:1] != "#"]
        return {"".join(w[:2]): " ".join(w[2:]) for w in map(str.split, lines[1:])}

    rows = table("--nproc 4 --sizes 1K,25M --round-trip-ms 50 --bandwidth-mbit 500")
    assert rows["1KiB"].startswith("bruck") and "1 hop(s)" in rows["1KiB"]
    assert "1.50 of the message" in rows["25MiB"]
    rows = table("--nproc 8 --hosts 2 --sizes 64,25M")
    assert not rows["64B"].startswith("hier") and rows["25MiB"].startswith("hierarchical")
    rows = table("--nproc 8 --hosts 2 --sizes 64 --algorithm hierarchical")
    assert "asked for" in rows["64B"]
    rows = table("--nproc 8 --hosts 2 --sizes 64,25M --order rank")
    assert rows["64B"].startswith("bruck") and rows["25MiB"].startswith("twoshot")
    rows = table("--nproc 4 --hosts 1 --sizes 1K,1M")  # inside a host there are no times
    assert rows["1KiB"].startswith("direct") and rows["1MiB"].startswith("twoshot - - - -")


@pytest.mark.parametrize("option", ["--round-trip-ms", "--bandwidth-mbit"])
@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e9"])
def test_a_line_that_cannot_be_is_not_explained(option, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--explain", "--nproc", "4", option, text])
    assert ended.value.code == 2
    assert f"{option} can be" in capsys.readouterr().err


# --- How it measures ------------------------------------------------------------------------------


class Ranks:
    """The ranks of a contender, which take 10 us a call."""

    def __init__(self, contender, log):
        self.contender, self.log = contender, log
        self.asked: list[str] = []

    def ask(self, do, **arguments):
        self.asked.append(do + " with error" * arguments.get("error", False))
        self.log.append((self.contender.key, do))
        if do == "check":
            return [{"wrong": 0, "digest": ""}] * 2
        if do == "round":
            seconds = 1e-5 * arguments["iterations"]
            return [{"seconds": s, "idle": 1.0, "idle_cpu": 0.0} for s in (seconds, 0.0)]
        return [{}] * 2


def measure(collective="all_reduce", rounds=2, codecs=(), **more):
    """The row, and what was asked of whom in which order."""
    settings = Settings(collective, 2, (1024,), compare=("gloo",), rounds=rounds, codecs=codecs,
                        **{"iterations": 100} | more)  # fmt: skip
    log: list[tuple[str, str]] = []
    contenders = contenders_of(settings, Placing("cpu", 2, 2), roofline=False)
    sets = {contender.key: Ranks(contender, log) for contender in contenders}
    skipped: dict[str, str] = {}
    row = measure_row(SimpleNamespace(sets=sets), settings, 1024, 4, skipped)  # type: ignore[arg-type]
    assert skipped == {}
    return row, sets, log


def test_contenders_take_turns_and_each_begins_a_round():
    _, sets, log = measure(rounds=4)
    assert [key for key, do in log if do == "round"] == ["ours", "gloo", "gloo", "ours"] * 2
    for ranks in sets.values():  # checked before and after
        assert ranks.asked == ["prepare", "check", *["round"] * 4, "check"]
    checks = [what for r in measure(codecs=("int8",))[1].values() for what in r.asked]
    assert set(checks) == {"prepare", "round", "check with error"}


def test_time_is_that_of_one_call_of_the_slowest_rank():
    for collective, seconds in (("all_reduce", 1e-5), ("sendrecv", 5e-6)):  # there and back: half
        row, _, _ = measure(collective)
        assert {key: m.seconds for key, m in row.measurements.items()} == {
            key: [pytest.approx(seconds)] * 2 for key in ("ours", "gloo")
        }


def test_calls_fill_a_round_unless_their_number_is_given():
    for seconds in (0.02, 0.1):
        row, _, _ = measure(iterations=None, round_seconds=seconds)
        for measurement in row.measurements.values():
            assert measurement.iterations == [round(seconds / 1e-5)] * 2


# --- Right and wrong ------------------------------------------------------------------------------


class Loopback:
    """An engine whose all-reduce adds what the other ranks would have sent, then lies a bit."""

    def __init__(self, rank, world, lie=None):
        self.rank, self.world, self.lie = rank, world, lie
        self.salt = 0

    def call(self, collective):
        def all_reduce():
            self.salt += 1
            tensor = collective.tensor
            inputs = collective._inputs(tensor.numel(), self.salt)
            for rank in range(self.world):
                if rank != self.rank:
                    other = torch.empty_like(tensor)
                    oracle.fill(other, inputs.of(rank))
                    tensor.add_(other)
            if self.lie:
                self.lie(tensor)

        return all_reduce

    def barrier(self):
        pass


def wrong_with(lie, dtype, count):
    """How many elements are called wrong in a result that `lie` has touched."""
    rank = Rank(Loopback(1, 3, lie), 3)
    rank.prepare("all_reduce", count, dtype, "sum")
    return rank.check(salt=1)["wrong"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_sums_pass_and_one_planted_error_is_found(dtype):
    def lie(tensor):
        tensor[-1] += 1

    for count in (1, 1000, oracle.PERIOD + 7):
        assert wrong_with(None, dtype, count) == 0
    assert wrong_with(lie, dtype, oracle.PERIOD + 7) == 1


@pytest.mark.parametrize("op", OPS)
def test_every_operation_has_an_oracle(op):
    dtype = "int32" if op in ("band", "bor", "bxor") else "float32"
    inputs = oracle.Inputs(dtype, op, world=4, count=50, salt=1)
    stacked = torch.stack([inputs.of(rank) for rank in range(4)])
    expected = oracle.expect_reduced(inputs)
    by_torch = {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.mean(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
        "product": lambda: stacked.prod(0),
        "band": lambda: stacked[0] & stacked[1] & stacked[2] & stacked[3],
        "bor": lambda: stacked[0] | stacked[1] | stacked[2] | stacked[3],
        "bxor": lambda: stacked[0] ^ stacked[1] ^ stacked[2] ^ stacked[3],
    }[op]()
    assert oracle.count_wrong(by_torch, expected) == 0
    assert oracle.count_wrong(by_torch + 1, expected) == 50
    collective = AllReduce(Case(10, dtype, op, 0, 2))  # the values timed stay what they are
    collective.settle()
    before = collective.tensor.clone()
    both = oracle._combine(op, before, before)
    assert torch.equal(both / 2 if op == "avg" else both, before)


SIZED = tuple(cls for cls in COLLECTIVES.values() if cls.has_size)


@pytest.mark.parametrize("cls", SIZED, ids=lambda cls: cls.name)
def test_a_call_that_does_nothing_is_wrong(cls):
    for world in (2, 3):
        count = cls.fit(1000, world)
        assert 900 < count <= 1000 and cls.fit(count, world) == count and cls.fit(0, world) == 0
        wrong = []
        for rank in range(world):
            collective = cls(Case(count, "float32", "sum", rank, world))
            wrong.append(collective.check(lambda: None, salt=1)["wrong"])
        # Who has the result: rank 0 gets or gives it, ranks 0 and 1 play ping-pong.
        having = {"reduce": {0}, "gather": {0}, "sendrecv": {0, 1}}
        having["broadcast"] = set(range(1, world))
        assert {r for r in range(world) if wrong[r]} == having.get(cls.name, set(range(world)))
        assert min(filter(None, wrong)) > 0.9 * count / world


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_codecs_have_room_for_their_losses_and_no_more(codec, op):
    inputs = oracle.Inputs("float32", op, world=3, count=10_000, salt=1)
    expected = oracle.expect_reduced(inputs)
    allowed = oracle.coded(expected, inputs, codec)
    # One value of a block may be off by half a step for each of its encodings.
    step = CODECS[codec] * float(expected.reference.abs().max())
    signs = 2.0 * torch.randint(0, 2, expected.reference.shape) - 1
    assert oracle.count_wrong(expected.reference + step * signs, allowed) == 0
    assert oracle.count_wrong(expected.reference + step * signs, expected) == 10_000
    # In int4 nearly everything is nearly everywhere; NaN is not.
    swapped = expected.reference.roll(128)
    assert oracle.count_wrong(swapped, allowed) > {"int4": 100, "int8": 8000}.get(codec, 9000)
    assert oracle.count_wrong(swapped * math.nan, allowed) == 10_000


def make_report() -> Report:
    ours, gloo = Measurement([2e-6, 3e-6, 4e-6]), Measurement([200e-6, 300e-6, 400e-6])
    rows = [
        Row(1024, 256, "float32", "sum", 1.5, {OURS: ours, "gloo": gloo}),
        Row(1 << 20, 1 << 18, "float32", "sum", 1.5, {OURS: Measurement([5e-3])}),
    ]
    settings = {"world": 4, "codecs": ["int8"], "compare": ["gloo"], "sizes": [1024, 1 << 20]}
    titles = {OURS: "ringreduce", "gloo": "gloo", "int8": "int8"}
    machine = {"sharing": "ranks sharing one GPU"}
    return Report("all_reduce", "2030-01-01", machine, {}, settings, titles, rows=rows)


def test_wrong_results_are_seen():
    report = make_report()
    coded = Measurement([1e-6, 1.5e-6, 2e-6], error={"max": 0.1, "rms": 0.1})
    report.rows[0].measurements["int8"] = coded
    assert report.ours_is_right and report.faults() == []
    report.rows[0].measurements["gloo"].wrong = 3
    assert report.ours_is_right and len(report.faults()) == 1
    coded.same_bits = False  # a codec is ours
    assert not report.ours_is_right
    coded.same_bits = True
    report.rows[1].measurements[OURS].wrong = 1
    assert not report.ours_is_right
    assert "5.00 ms / - WRONG" in summary(Suite([report], {"gather": "why not"}))[-2]
