"""python -m ringreduce.plan: lines, the model of collectives, the fit, steps, and the whole way.

How exact it is on real lines, benchmarks/plan.py measures.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringreduce.core.backend import extension
from ringreduce.core.processes import end, torchrun_variables
from ringreduce.tools.plan import constants, curve, lines, measure, model, step
from ringreduce.tools.plan.cli import main
from ringreduce.tools.plan.constants import Point
from ringreduce.tools.plan.lines import Line
from ringreduce.tools.plan.model import Job, Model, Sockets

KIB, MIB = 1 << 10, 1 << 20
LAN, WAN = Line(rate=1e9 / 8), Line(rate=50e6 / 8, round_trip=0.02)


def between(hosts: int, line: Line = LAN) -> Job:
    return Job(hosts, hosts, line, bandwidth_known=True)


# ---- lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("10Gbit", Line(rate=1.25e9)),
        ("300Mbit/s, 50us", Line(rate=37.5e6, round_trip=50e-6)),
        ("0.01%,20ms,1gbit,bbr", Line(125e6, 0.02, 1e-4, congestion="bbr")),
        ("1Gbit,mtu=9000,burst=64K", Line(125e6, mtu=9000, burst=65536)),
        ("0.1tbit/s,burst=1m,1s,cubic", Line(1.25e10, 1.0, burst=1 << 20)),
    ],
)
def test_a_line_is_read(text: str, line: Line) -> None:
    found = lines.parse(text)
    assert dataclasses.astuple(found)[:2] == pytest.approx(dataclasses.astuple(line)[:2])
    assert dataclasses.astuple(found)[2:] == dataclasses.astuple(line)[2:]


# A line, and the word that its error names, with what the word is not.
BAD_LINES = [
    ("", "''", "no rate"), ("1ms", "'1ms'", "no rate"), ("bbr", "'bbr'", "no rate"),
    ("fast", "'fast'", "none of a rate"), ("10", "'10'", "none of a rate"),
    ("10Mb", "'10Mb'", "none of a rate"), ("10Mbit/h", "'10Mbit/h'", "none of a rate"),
    ("1.2.3Gbit", "'1.2.3Gbit'", "none of a rate"), ("1Gbit,1ms/s", "'1ms/s'", "none of a rate"),
    ("1Gbit,,1ms", "''", "none of a rate"), ("1Gbit,reno", "'reno'", "none of a rate"),
    ("0Gbit", "'0Gbit'", "no rate of"), ("-1Gbit", "'-1Gbit'", "no rate of"),
    ("nanGbit", "'nanGbit'", "no rate of"), ("infGbit", "'infGbit'", "no rate of"),
    ("99999Tbit", "'99999Tbit'", "no rate of"),
    ("1Gbit,-1ms", "'-1ms'", "no round trip of"), ("1Gbit,nanms", "'nanms'", "no round trip of"),
    ("1Gbit,61s", "'61s'", "no round trip of"),
    ("1Gbit,99.99%,bbr", "'99.99%'", "no loss of"), ("1Gbit,120%", "'120%'", "no loss of"),
    ("1Gbit,-1%", "'-1%'", "no loss of"), ("1Gbit,nan%", "'nan%'", "no loss of"),
    ("1Gbit,mtu=9", "'mtu=9'", "no MTU of"), ("1Gbit,mtu=-9000", "'mtu=-9000'", "no MTU of"),
    ("1Gbit,mtu=1500.5", "'mtu=1500.5'", "whole number"),
    ("1Gbit,mtu=nan", "'mtu=nan'", "no MTU of"), ("1Gbit,mtu=9k", "'mtu=9k'", "none of a rate"),
    ("1Gbit,mtu=", "'mtu='", "none of a rate"), ("1Gbit,burst=", "'burst='", "none of a rate"),
    ("1Gbit,burst=-1", "'burst=-1'", "no burst of"), ("1Gbit,burst=9T", "'burst=9T'", "none of"),
    ("1Gbit,burst=nan", "'burst=nan'", "no burst of"), ("1Gbit,burst=2G", "'burst=2G'", "no burst"),
    ("1Gbit,10Gbit", "'10Gbit'", "a second rate, after '1Gbit'"),
    ("1ms,1Gbit,2ms", "'2ms'", "a second round trip, after '1ms'"),
    ("1Gbit,1%,1%", "'1%'", "a second loss"), ("1Gbit,mtu=900,mtu=9", "'mtu=9'", "a second MTU"),
    ("1Gbit,burst=0,burst=1", "'burst=1'", "a second burst"),
    ("1Gbit,bbr,cubic", "'cubic'", "a second congestion control, after 'bbr'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "word", "why"), BAD_LINES)
def test_a_bad_line_is_refused(text: str, word: str, why: str) -> None:
    with pytest.raises(ValueError) as raised:
        lines.parse(text)
    for part in (f"line '{text}'", word, why):
        assert part in str(raised.value)


@pytest.mark.parametrize("congestion", ["bbr", "cubic"])
@pytest.mark.parametrize("round_trip", [0.0, 0.02])
def test_a_loss_costs_time(congestion: str, round_trip: float) -> None:
    """What is lost is carried again, and a small message waits until it is sent again."""
    kept = Line(50e6 / 8, round_trip, congestion=congestion)
    assert kept.again(1e9) == 0
    for size in (1, 64 * KIB, 16 * MIB):
        for kind in model.KINDS:
            for hosts in (2, 8, 64):
                times = [
                    Model()
                    .collective(kind, size, between(hosts, dataclasses.replace(kept, loss=loss)))
                    .seconds
                    for loss in (0.0, 1e-4, 0.01, 0.1, 0.5)
                ]
                assert times == sorted(times) and len(set(times)) == len(times)
                assert size < 16 * MIB or times[-1] >= times[0] / 0.5
    lossy = [dataclasses.replace(kept, loss=loss) for loss in (0.1, 0.5)]
    # A packet has 1 / (1 - loss) tries, of which the first costs nothing more.
    assert lossy[1].again(1) / lossy[0].again(1) == pytest.approx(1 / (0.1 / 0.9))
    assert lossy[0].again(1) >= 0.1 / 0.9 * 2 * round_trip


def test_a_loss_slows_down_all_but_bbr() -> None:
    lossy = dataclasses.replace(WAN, loss=1e-3)
    assert lossy.loss_rate(4) == pytest.approx(4 * lossy.loss_rate(1))
    assert lossy.loss_rate(1) == pytest.approx(1448 / 0.02 * math.sqrt(1500))
    assert dataclasses.replace(lossy, congestion="bbr").loss_rate(1) == math.inf


# ---- collectives


@pytest.mark.parametrize("known", [False, True])
def test_a_group_is_predicted_by_what_it_takes(known: bool) -> None:
    """The choice is the core's own, of all ranks, by the cost that a group would have."""
    slow = Line(rate=100e6 / 8)
    for per_host in (1, 4):
        job = Job(8 * per_host, 8, slow, bandwidth_known=known)
        cost = {"hop": 20e-6, "byte" if known else "measured": 1 / slow.rate}
        for size in (KIB, 16 * KIB, 256 * KIB, 4 * MIB):
            taken, _, _ = extension().choose(
                "all_reduce", size, size, 0, 8 * per_host, per_host, False, cost
            )
            assert Model().choice("all_reduce", size, "", job) == taken
    ways = {
        (kind, size): Model().choice(kind, size, codec, between(16))
        for kind, codec in (
            ("all_reduce", "int8"), ("all_gather", ""), ("reduce_scatter", ""), ("broadcast", "")
        )
        for size in (KIB, 256 * MIB)
    }  # fmt: skip
    assert ways["all_gather", KIB] == "bruck" and ways["all_gather", 256 * MIB] == "ring"
    assert ways["reduce_scatter", KIB] == "twoshot"
    assert ways["broadcast", KIB] == "tree" and ways["broadcast", 256 * MIB] == "chain"
    assert ways["all_reduce", KIB] == "owner"


def test_a_group_that_does_not_know_a_slow_line_is_hinted_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    inside = [(KIB, 1e-4), (64.0 * MIB, 0.1)]
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    measured = Model(cores=2, shared={8: dict.fromkeys(kinds, inside)})
    constants.save(path, measured, {"created": "today"}, [])

    def said(*arguments: str) -> tuple[list[str], list[str]]:
        """The lines of hints, and the hints in the document."""
        command = ["-c", str(path), "--link", "100Mbit,20ms", *arguments]
        assert main(command) == 0
        shown = [line[2:] for line in capsys.readouterr().out.splitlines() if "hint: " in line]
        assert main([*command, "--json"]) == 0
        return shown, json.loads(capsys.readouterr().out)["hints"]

    sizes = ("--sizes", "1K,64K,1M,16M")
    hosts = ("--per-host", "8")
    shown, hints = said("--ranks", "8,64", *hosts, *sizes)
    assert shown == hints and len(hints) == 1  # within a host there is no line
    slow = Job(64, 8, lines.parse("100Mbit,20ms"), 2)
    taken, told = (
        measured.collective("all_reduce", MIB, dataclasses.replace(slow, bandwidth_known=known))
        for known in (False, True)
    )
    assert taken.seconds > 5 * told.seconds
    for words in (
        "64 ranks, all_reduce of 1 MiB",
        f"{taken.algorithm}, which is {taken.seconds / told.seconds:.1f} times slower",
        f"than {told.algorithm}", "believes in 8000 Mbit/s",
        "RINGREDUCE_BANDWIDTH_MBIT=100 ", "RINGREDUCE_RING=measure",
    ):  # fmt: skip
        assert words in hints[0]
    assert said("--ranks", "64", *hosts, "--bandwidth-known", *sizes) == ([], [])
    assert said("--ranks", "64", *sizes) == ([], [])  # a rank on each host: calls measure the line
    # A step has what its buckets take.
    for codec in ((), ("--codec", "int8"), ("--codec", "best")):
        said("--ranks", "64", *hosts, "--model", "20K", "--compute", "1ms", *codec)
    shown, hints = said("--ranks", "64", *hosts, "--model", "256K", "--compute", "1ms")
    assert shown == hints and "all_reduce of " in hints[0]


def test_large_messages_take_the_time_of_their_bytes() -> None:
    free = Model(Sockets(wire=1e-9, wire_long=1e-9))
    for hosts in (2, 4, 8):
        seconds = free.collective("all_reduce", 64 * MIB, between(hosts)).seconds
        on_line = 2 * (hosts - 1) / hosts * 64 * MIB * LAN.byte
        assert seconds == pytest.approx(on_line, rel=0.02)
    coded = free.collective("all_reduce", 64 * MIB, between(2), "int8").seconds
    assert coded == pytest.approx(64 * MIB * 34 / 128 * LAN.byte, rel=0.05)


def test_small_messages_take_the_time_of_their_hops() -> None:
    for hosts in (2, 4, 8):
        seconds = Model().collective("all_reduce", 4, between(hosts, WAN)).seconds
        assert 0.01 <= seconds < 0.0125  # Bruck with the radix of one hop


def test_the_best_codec_is_never_slower_than_none() -> None:
    for size in (KIB, 64 * KIB, 4 * MIB):
        for hosts in (2, 4, 16):
            exact = Model().collective("all_reduce", size, Job(hosts, hosts, WAN))
            codec, best = Model().best(size, Job(hosts, hosts, WAN))
            assert best.seconds <= exact.seconds
            assert bool(codec) == (best.seconds < exact.seconds)


def test_several_ranks_of_a_host_share_its_line_and_its_cores() -> None:
    alone, together = (
        Model().collective("all_reduce", 4, Job(2 * p, 2, WAN)).seconds for p in (1, 8)
    )
    assert together < 1.3 * alone  # a hop is no longer because more ranks wait for it
    few, many = (
        Model().collective("broadcast", 64 * KIB, Job(16, 2, LAN, cores=cores)).seconds
        for cores in (2, 8)
    )
    assert few > many


def test_a_broadcast_takes_the_time_of_the_whole_message() -> None:
    for hosts in (2, 4):
        seconds = Model().collective("broadcast", 64 * MIB, between(hosts)).seconds
        assert 64 * MIB * LAN.byte < seconds < 1.2 * 64 * MIB * LAN.byte


def test_halves_are_coded_as_float32_and_added_as_float32() -> None:
    for codec in ("int8", "int4"):
        single = Model().collective("all_reduce", 8 * MIB, between(4), codec).seconds
        half = Model().collective("all_reduce", 4 * MIB, between(4), codec, width=2).seconds
        assert half == pytest.approx(single)
    times = [Model().collective("all_reduce", 25 * MIB, between(16), width=w) for w in (4, 2)]
    assert times[1].seconds >= times[0].seconds


def test_more_hosts_are_never_predicted_to_be_faster() -> None:
    times = [Model().collective("all_reduce", 25 * MIB, between(2**k)).seconds for k in range(1, 9)]
    assert times == sorted(times)


def test_a_time_inside_a_host_is_interpolated() -> None:
    def cost(size: float) -> float:
        return 5e-6 + size / 10e9

    points = [(size, cost(size)) for size in (KIB, 16 * KIB, 256 * KIB, 4 * MIB)]
    for size in (2 * KIB, 40 * KIB, MIB):
        assert model.interpolated(points, size) == pytest.approx(cost(size), rel=0.02)
    assert model.interpolated(points, 1) == points[0][1]
    assert model.interpolated(points, 8 * MIB) == pytest.approx(2 * points[-1][1])
    table: model.Table = {2: {"all_reduce": points}, 4: {"all_reduce": [(KIB, 1e-5)]}}
    assert model.shared_time(table, "all_reduce", KIB, 8) == pytest.approx(2e-5)
    with pytest.raises(ValueError, match="was not measured"):
        model.shared_time(table, "broadcast", KIB, 2)


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="as many"):
        Job(3, 2, LAN)
    with pytest.raises(ValueError, match="--link"):
        Job(4, 2)
    with pytest.raises(ValueError, match="no codec 'zip'"):
        Model().collective("all_reduce", KIB, between(2), "zip")
    with pytest.raises(ValueError, match="gather is not modelled"):
        Model().collective("gather", KIB, between(2))
    with pytest.raises(ValueError, match="for all_reduce only"):
        Model().collective("broadcast", KIB, between(2), "int8")


# ---- the fit


def made_up(truth: Model, noise: float, seed: int = 1) -> list[Point]:
    draw = random.Random(seed)
    found = []
    for hosts in (2, 3, 4):
        job = dataclasses.replace(between(hosts), cores=2, emulated=True)
        for codec in ("", "int8"):
            for size in (KIB, 16 * KIB, 256 * KIB, 4 * MIB):
                exact = truth.collective("all_reduce", size, job, codec).seconds
                seconds = exact * math.exp(draw.gauss(0, noise))
                found.append(
                    Point("all_reduce", size, codec, job, seconds, seconds * 0.95, seconds * 1.05)
                )
    return found


def test_the_fit_finds_what_the_times_were_made_of() -> None:
    truth = Model(Sockets(hop=40e-6, switch=60e-6, message=15e-6, wire=0.05, byte=0.4e-9))
    fitted = constants.fit(made_up(truth, 0.01), Model())
    errors = []
    for hosts in (2, 8):
        job = dataclasses.replace(between(hosts, Line(rate=50e6)), cores=2, emulated=True)
        for size in (2 * KIB, 64 * KIB, MIB, 16 * MIB):
            there = fitted.collective("all_reduce", size, job)
            exact = truth.collective("all_reduce", size, job).seconds
            errors.append(abs(there.seconds / exact - 1))
            assert there.low < exact < there.high
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.12


def test_noisy_times_widen_the_interval() -> None:
    truth = Model(Sockets(hop=40e-6))
    job = between(3)
    calm, wild = (constants.fit(made_up(truth, noise), Model()) for noise in (0.01, 0.3))
    widths = [
        math.log(found.high / found.low)
        for found in (m.collective("all_reduce", 64 * KIB, job) for m in (calm, wild))
    ]
    assert widths[1] > 2 * widths[0]


def test_constants_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    constants.require_writable(path)
    points = made_up(Model(), 0.01)
    inside = [Point("all_reduce", s, "", Job(2), s * 1e-9, 1e-9, 1e-9) for s in (KIB, MIB)]
    fitted = constants.fit([*points, *inside], Model(cores=2))
    constants.save(path, fitted, {"created": "today"}, [*points, *inside])
    assert constants.load(path)[0] == fitted
    assert constants.load(path)[1]["created"] == "today"
    assert constants.load_points(path) == [*points, *inside]


def test_what_other_programs_took_is_no_rank_of_ours() -> None:
    def part(cores: float, own: float, everyones: float | None = None) -> float:
        before = measure.Used(10.0, 100.0, 5.0)
        return measure.others_part(
            before, measure.Used(14.0, 100.0 + cores, 5.0 + own), 2, everyones
        )

    assert part(8.0, 8.0) == 0  # our ranks had both cores for all of 4 s
    assert part(8.0, 2.0) == pytest.approx(0.75)
    assert part(8.0, 2.0, everyones=6.0) == pytest.approx(0.25)
    assert part(0.0, 3.9) == 0 and part(9.0, 0.0) == 1  # rounded by ticks

    # Processes count as others until they have ended, like ranks whose time was measured.
    before = measure.used()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(1.0)
        during = measure.used()
    finally:
        end(busy)
    ran = measure.used().own - before.own
    assert ran > 0 and during.own - before.own < 0.5 * ran
    assert during.cores - before.cores > 0.5 * ran


def test_constants_of_a_busy_machine_say_so_wherever_they_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(others: float) -> list[Point]:
        times = [Point("all_reduce", s, "", Job(2), s * 1e-9, 1e-9, 1e-9) for s in (KIB, MIB)]
        return [dataclasses.replace(times[0], others=others), times[1]]

    path = tmp_path / "plan.json"
    monkeypatch.setattr(measure, "flops_of_a_rank", lambda: 1e9)
    for others, says in ((0.02, ""), (0.83, "other programs took 83% of the cores")):
        monkeypatch.setattr(measure, "measure_here", lambda *_, part=others: measured(part))
        assert main(["measure", "-o", str(path)]) == 0
        assert (says in capsys.readouterr().out) if says else ("warning" not in path.read_text())
        assert json.loads(path.read_text())["about"]["others"] == others
        # Times that are kept beside new ones keep it.
        assert max(point.others for point in constants.load_points(path)) == others
        assert main(["-c", str(path), "--sizes", "1K"]) == 0
        out = capsys.readouterr().out
        assert says in out and ("warning" in out) == bool(says)
        assert main(["-c", str(path), "--sizes", "1K", "--json"]) == 0
        assert says in json.loads(capsys.readouterr().out).get("warning", "")


def test_a_line_that_was_measured_replaces_the_loopback() -> None:
    def times(job: Job) -> list[Point]:
        return [Point("all_reduce", KIB, "", job, 1e-4, 1e-4, 1e-4)]

    host, loop = times(Job(2)), times(between(2, constants.LOOPBACK))
    two, three = times(between(2)), times(between(3))
    first = constants.joined([], host + loop, add=False)
    assert first == host + loop
    assert constants.joined(first, two, add=False) == host + two
    assert constants.joined(host + two, three, add=False) == host + three
    assert constants.joined(host + two, three, add=True) == host + two + three
    assert constants.joined(host + two, host + loop, add=False) == two + host


def test_without_constants_the_error_says_how_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["-c", str(path)]) == 2
    path.write_text("{")
    assert main(["-c", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all("ringreduce.plan measure" in line for line in said)


ODD = [None, True, -1, 0, 1e308, 10**400, math.nan, math.inf, -math.inf, "", "x", "\x1b[2J", [], {},
       [[1, 1], [1, 1]], [[2, 1], [1, 1]], {"": 1}, 1.5]  # fmt: skip


def damaged_json(value: object, draw: random.Random) -> object:
    """The document with one value replaced, lost or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {other: value[other] for other in value if other != key}
        return {**value, key: damaged_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.95:
        at = draw.randrange(len(value))
        if draw.random() < 0.2:
            return value[:at] + draw.choice([[], [value[at]] * 2]) + value[at + 1 :]
        return [*value[:at], damaged_json(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


def test_no_damaged_file_breaks_the_planner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, draw = tmp_path / "plan.json", random.Random(5)
    sizes = (KIB, MIB)
    inside = [
        Point(kind, s, "", Job(2), s * 1e-9, 1e-9, 1e-9) for kind in model.KINDS for s in sizes
    ]
    points = [*inside, *(Point("all_reduce", s, "", between(2), s * 1e-8, 1e-9, 1) for s in sizes)]
    about = {"created": "today", "machine": {"cpu": "a CPU", "cores": 2}}
    constants.save(path, constants.fit(points, Model(cores=2)), about, points)
    whole = path.read_text()
    monkeypatch.setattr(measure, "flops_of_a_rank", lambda: 1e9)
    monkeypatch.setattr(measure, "measure_here", lambda *_: inside[:2])
    used = 0
    for case in range(600):
        if draw.random() < 0.7:
            text = json.dumps(damaged_json(json.loads(whole), draw)).encode()
        else:
            changed = bytearray(whole.encode())
            for _ in range(draw.choice([1, 10, 100])):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            text = bytes(changed[: draw.choice([len(changed), draw.randrange(len(changed))])])
        path.write_bytes(text)
        command = draw.choice(
            [["--ranks", "2,64", "--sizes", "1,1M"], ["--model", "1M", "--ranks", "4"],
             ["--link", "1Gbit,5ms", "--per-host", "2", "--codec", "best", "--ranks", "64"],
             ["--json", "--model", "1M", "--link", "1Gbit", "--ranks", "8"]]
        )  # fmt: skip
        code = main(["-c", str(path), *command])
        out, err = capsys.readouterr()
        assert (code, bool(out), len(err.splitlines())) in ((0, True, 0), (2, False, 1)), case
        assert code == 0 or str(path) in err or "was not measured" in err, (case, err)
        assert (out + err).replace("\n", "").isprintable(), case
        used += code == 0
        if case % 8 == 0:
            assert main(["measure", "-o", str(path)]) == 0, case
            assert constants.load(path)[0].cores >= 1
            capsys.readouterr()
    assert 60 < used < 540  # damaged points do no harm here


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a link to itself", "a link to nothing"])
def test_what_is_no_file_is_neither_read_nor_replaced(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "a link to itself" else tmp_path / "nowhere")
    assert main(["-c", str(path), "--sizes", "1K"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and str(path) in said and "plan measure" in said
    if not path.is_symlink():
        assert main(["measure", "-o", str(path)]) == 2
        assert "no file" in capsys.readouterr().err
        with pytest.raises(FileExistsError):
            curve.draw(path, step.described(1e6, 4, 1.0, 0), Model(), between, [2], [""], [])
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_full_disk_leaves_the_constants_that_were_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    constants.save(path, Model(), {"created": "today"}, [])
    kept, before = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(OSError):
            constants.save(path, Model(), {"created": "later"}, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == kept and os.listdir(tmp_path) == ["plan.json"]


# ---- steps


def test_the_slowest_of_many_ranks() -> None:
    draw = random.Random(2)
    kinds = {"normal": lambda: draw.gauss(1, 0.05), "long tail": lambda: 1 + draw.expovariate(10)}
    for one in kinds.values():
        samples = [one() for _ in range(2000)]
        for ranks in (1, 2, 8, 64, 512):
            drawn = statistics.fmean(max(one() for _ in range(ranks)) for _ in range(500))
            assert step.expected_maximum(samples, ranks) == pytest.approx(drawn, rel=0.04)
    assert step.expected_maximum([2.0], 1000) == pytest.approx(2.0)
    times = [step.expected_maximum([1.0, 1.1, 1.3], 2**k) for k in range(17)]
    assert times == sorted(times)  # beyond the number of samples too


def test_jitter_costs_efficiency() -> None:
    found = [
        step.predict(step.described(1e8, 4, 1.0, jitter), between(64), Model()).efficiency
        for jitter in (0.0, 0.05, 0.5)
    ]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.9 * found[0]


BAD = [
    ["--ranks", "x"], ["--ranks", "0"], ["--ranks", "8", "--hosts", "3"], ["--per-host", "0"],
    ["--link", ""], ["--model", "large"], ["--model", "0K"], ["--model", "1M", "--compute", "5"],
    ["--model", "1M", "--jitter", "nan%"], ["--curve", "x.png"], ["--cores", "-2"],
    ["--collective", "broadcast", "--codec", "int8", "--link", "1Gbit"],
    ["--sync-every", "30"], ["--model", "1M", "--overlap", "2"],
    ["--model", "1M", "--sync-every", "3", "--overlap", "3"],
    ["--model", "1M", "--sync-every", "0"], ["--codec", "int5", "--link", "1Gbit"],
    ["--codec", "topk:0.02+int2", "--link", "1Gbit"],
    ["--model", "1M", "--sync-every", "30", "--codec", "topk:2+int2"],
    ["--model", "from:nowhere"], ["check", "nowhere"], ["measure", "--rounds", "0"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_gets_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "plan.json"
    inside = [Point("all_reduce", s, "", Job(2), s * 1e-9, 1e-9, 1e-9) for s in (KIB, MIB)]
    constants.save(kept, constants.fit(inside, Model()), {"created": "today"}, inside)
    assert main([*arguments, "-c" if arguments[0] != "measure" else "-o", str(kept)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [["--codec", "int5"], ["--codec", "topk:0.02+int2"], ["--curve", "a.svg"], ["--overlap", "1"]],
    ids=" ".join,
)
def test_bad_input_is_told_before_constants_are_asked_for(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "-c", str(tmp_path / "none.json")]) == 2
    assert "there are no constants" not in capsys.readouterr().err


def test_outer_steps_cost_a_round_in_many() -> None:
    alone = step.described(1e8, 4, 1.0, 0.0)
    few = Model(shared={2: {kind: [(KIB, 1e-5), (MIB, 1e-3)] for kind in model.KINDS}})
    for ranks, hosts in ((4, 4), (8, 4)):
        job = Job(ranks, hosts, WAN, bandwidth_known=True)
        inner = step.predict(alone, Job(ranks // hosts), few).seconds
        whole, coded = (few.collective("all_reduce", 4e8, job, c).seconds for c in ("", "int4"))
        for every, overlap, codec, round_ in (
            (1, 0, "", whole), (30, 0, "", whole), (30, 0, "int4", coded),
            (30, 5, "int4", max(0.0, coded - 5 * inner)), (100, 99, "int4", 0.0),
        ):  # fmt: skip
            found = step.predict_outer(alone, job, few, every, overlap, codec)
            assert found.seconds == pytest.approx(inner + round_ / every)
            assert found.low <= found.seconds <= found.high
        # Of 4096 elements 82 are sent, in 102 bytes, with a checksum of the whole.
        codes = few.collective("all_gather", ranks * (4 + math.ceil(1e8 / 4096 * 102)), job).seconds
        found = step.predict_outer(alone, job, few, 30, 0, "topk:0.02+int2")
        assert found.seconds == pytest.approx(inner + codes / 30, rel=1e-6)
    uneven = step.described(1e8, 4, 1.0, 0.3)
    waits = [step.predict_outer(uneven, between(4), few, n, n - 1, "int4") for n in (50, 200, 1000)]
    behind = [found.compute - step.predict(uneven, Job(1), few).compute for found in waits]
    assert behind[0] == pytest.approx(2 * behind[1]) and behind[1] > behind[2] > 0


def test_a_plan_of_outer_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "plan.json"
    inside = [Point("all_reduce", s, "", Job(2), s * 1e-9, 1e-9, 1e-9) for s in (KIB, MIB)]
    constants.save(kept, constants.fit(inside, Model()), {"created": "today"}, inside)
    plan = ["-c", str(kept), "--ranks", "4", "--link", "100Mbit,100ms,bbr", "--model", "100M",
            "--compute", "1s", "--jitter", "0%", "--json"]  # fmt: skip
    times = []
    for more in ("", "--codec best", "--codec=", "--overlap 2", "--codec topk:0.02+int2"):
        rounds = ["--sync-every", "30", *more.split()]
        assert main([*plan, *rounds]) == 0
        (row,) = json.loads(capsys.readouterr().out)["steps"]
        times.append((row["codec"], row["seconds"]))
    assert [codec for codec, _ in times] == ["int4", "int4", "", "int4", "topk:0.02+int2"]
    int4, best, exact, overlapped, sparse = (seconds for _, seconds in times)
    assert exact > int4 == best > overlapped > 1 and int4 > sparse > 1
    assert main(plan) == 0
    (ddp,) = json.loads(capsys.readouterr().out)["steps"]
    assert ddp["codec"] == "" and ddp["seconds"] > exact


def test_collectives_hide_behind_the_backward() -> None:
    buckets = tuple(step.Bucket(MIB, ready) for ready in (0.0, 1.0, 2.0))
    hidden = step.Step(buckets, (5.0,))
    assert step.simulated(hidden, [0.5, 0.5, 0.5]) == pytest.approx(0.5)  # only the last one shows
    assert step.simulated(hidden, [3.0, 0.5, 0.5]) == pytest.approx(2.0)  # they queue
    waits = dataclasses.replace(hidden, overlaps=False)
    assert step.simulated(waits, [3.0, 0.5, 0.5]) == pytest.approx(4.0)


def test_a_described_model_has_all_its_bytes() -> None:
    for text, count in (("350M", 350e6), ("gpt:7B", 7e9), ("mlp", 17e6)):
        assert step.parameters_of(text) == count
        found = step.described(count, 2, 1.0, 0.02)
        assert sum(b.size for b in found.buckets) == pytest.approx(2 * count)
        ready = [b.ready for b in found.buckets]
        assert ready == sorted(ready)
        assert ready[0] == 0
        assert ready[-1] < 2 / 3
    with pytest.raises(ValueError, match="a model is"):
        step.parameters_of("large")


TRAIN = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("ringreduce")
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for _ in range(12):
    time.sleep(0.02)
    work = []
    for size in (1000, 50000):
        work.append(dist.all_reduce(torch.ones(size), async_op=True))
        time.sleep(0.01)
    for one in work:
        one.wait()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_from_constants_to_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, traces = tmp_path / "plan.json", tmp_path / "traces"
    kept.write_text('{"version": 0}')  # of another version: measuring is what helps
    assert main(["measure", "-o", str(kept), "--rounds", "2", "--span", "0.002"]) == 0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN],
            env=os.environ | torchrun_variables(rank, 2, store.port)
            | {"RINGREDUCE_TIMELINE": str(traces)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    recorded = step.replayed(traces)
    assert recorded.ranks == 2
    found = recorded.step
    assert [b.size for b in found.buckets] == [4000, 200000]
    assert 0.009 < found.buckets[1].ready < 0.05
    assert min(found.compute) > 0.029
    capsys.readouterr()

    assert main(["check", str(traces), "-c", str(kept), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["all_reduce 4000 B", "all_reduce 200000 B", "step"]
    assert abs(rows[-1]["error"]) < 0.5  # of a step that sleeps; no rank sleeps for less

    assert main(["-c", str(kept), "--ranks", "2,4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["ranks"] for row in document["collectives"]} == {2, 4}
    picture = tmp_path / "curve.png"
    command = ["-c", str(kept), "--ranks", "8,64", "--per-host", "8", "--link", "10Gbit,0.1ms"]
    command += ["--model", "gpt:1B", "--compute", "900ms", "--codec", "best"]
    assert main([*command, "--curve", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(["-c", str(kept), "--model", f"from:{traces}", "--ranks", "4"]) == 0
