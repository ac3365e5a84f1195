"""The benchmark: its parsing, its oracle, its report, and real runs with gloo in our place."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringreduce.bench import oracle
from ringreduce.bench.alternate import measure_row
from ringreduce.bench.cli import main
from ringreduce.bench.collective import Case
from ringreduce.bench.collectives import COLLECTIVES, Barrier
from ringreduce.bench.rank import Rank
from ringreduce.bench.reducing import AllReduce
from ringreduce.bench.results import Measurement, Report, Row, Suite, percentile
from ringreduce.bench.settings import (
    DTYPES,
    OPS,
    OURS,
    Settings,
    Unsupported,
    contenders_of,
    format_size,
    parse_size,
    parse_sizes,
)
from ringreduce.bench.summary import format_time, summary
from ringreduce.bench.table import format_row, header, preamble

REPOSITORY = Path(__file__).resolve().parent.parent
GLOO = ["-m", "ringreduce.bench", "all_reduce", "--backend", "gloo"]


def start(*arguments: str) -> subprocess.Popen:
    """A Python program of its own, in a session of its own, from this checkout."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )


def finish(process: subprocess.Popen, seconds: float = 120.0) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; kills a process that does not end."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def rank_processes(controller: int) -> list[int]:
    """Process ids of the rank processes that `controller` has started."""
    found = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    return [int(pid) for pid in found]


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("0", 0), ("1000", 1000), ("1K", 1024), ("64k", 65536), ("25M", 25 << 20),
         ("25MiB", 25 << 20), ("1GB", 1 << 30), (" 8 ", 8), ("12B", 12)],
    )  # fmt: skip
    def test_size(self, text, size):
        assert parse_size(text) == size

    @pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "1T", "1 2", "64KK"])
    def test_no_size(self, text):
        with pytest.raises(ValueError, match="no size"):
            parse_size(text)

    def test_list_and_ranges(self):
        assert parse_sizes("1K,3,1M") == (1024, 3, 1 << 20)
        assert parse_sizes("1K:20K:4,5") == (1024, 4096, 16384, 5)
        assert parse_sizes("1K:4K") == (1024, 2048, 4096)

    @pytest.mark.parametrize("text", ["1K:4K:1", "4K:1K", "0:4K", "1:2:3:4"])
    def test_no_range(self, text):
        with pytest.raises(ValueError, match="no range"):
            parse_sizes(text)

    def test_written_for_people(self):
        sizes = (0, 1000, 1 << 10, 25 << 20, 1 << 30, (1 << 20) + 1)
        written = ["0 B", "1000 B", "1 KiB", "25 MiB", "1 GiB", "1.0 MiB"]
        assert [format_size(size) for size in sizes] == written


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["all_reduce", "--sizes", "3"], "too few"),
            (["all_gather", "--nproc", "4", "--sizes", "12"], "too few"),
            (["all_reduce", "--op", "band"], "integer type"),
            (["all_reduce", "--compare", "smoke"], "none of"),
            (["all_reduce", "--nproc", "0"], "no number above 0"),
            (["all_reduce", "--sizes", "1K,x"], "no size"),
            (["all_reduce,all_gathr"], "'all_gathr' is neither all nor one of"),
            (["all", "--nproc", "1"], "sendrecv needs 2 ranks, and not 1"),
            (["all", "--plot", "x.png"], "one collective"),
            (["barrier", "--plot", "x.png"], "no sizes to plot"),
            (["all_reduce", "--plot", "x.jpg"], "none of: .png"),
            (["all_reduce", "--json", "no/such/x.json"], "there is no folder no/such"),
            (["all_reduce", "--plot", "no/such/x.png"], "there is no folder no/such"),
            (["all_reduce", "--json", "/"], "is a folder"),
        ],
    )
    def test_refuses(self, capsys, arguments, complaint):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert complaint in capsys.readouterr().err

    def test_contenders(self):
        settings = Settings("all_reduce", 2, (1024,), algorithm="ring", compare=("gloo", "direct"))
        found = {c.key: c for c in contenders_of(settings)}
        assert list(found) == ["ours", "gloo", "direct", "roofline"]
        assert found["ours"].title == "ringreduce (ring)"
        assert found["ours"].environment == {"RINGREDUCE_ALGORITHM": "ring"}
        assert found["direct"].backend == "ringreduce"
        assert found["gloo"].environment == {}
        assert "roofline" not in [c.key for c in contenders_of(Settings("barrier", 2, (0,)))]


class Loopback:
    """An engine whose all-reduce adds what the other ranks would have sent, then lies a bit."""

    def __init__(self, rank: int, world: int, lie=None) -> None:
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

    def about(self):
        return {}

    def close(self):
        pass


def check_with(lie, dtype: str, count: int, world: int = 3):
    """The answer of a rank process whose results `lie` has touched."""
    rank = Rank(Loopback(1, world, lie), world)
    rank.prepare("all_reduce", count, dtype, "sum")
    return rank.check(salt=1)


class TestOracle:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("count", [1, 1000, oracle.PERIOD + 7])
    def test_honest_sums_pass(self, dtype, count):
        assert check_with(None, dtype, count)["wrong"] == 0

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_finds_one_planted_error(self, dtype):
        def lie(tensor):
            tensor[-1] += 1

        assert check_with(lie, dtype, oracle.PERIOD + 7)["wrong"] == 1

    def test_finds_nan_and_infinity(self):
        def lie(tensor):
            tensor[3], tensor[5] = float("nan"), float("inf")

        assert check_with(lie, "float32", 100)["wrong"] == 2

    def test_finds_swapped_chunks(self):
        def lie(tensor):
            chunk = tensor[:128].clone()
            tensor[:128] = tensor[128:256]
            tensor[128:256] = chunk

        assert check_with(lie, "float32", 1024)["wrong"] > 250

    def test_finds_sums_in_a_smaller_type(self):
        def lie(tensor):
            tensor.copy_(tensor.bfloat16())

        assert check_with(lie, "float32", 1000)["wrong"] > 900

        def lie_64(tensor):
            tensor.copy_(tensor.float())

        assert check_with(lie_64, "float64", 1000)["wrong"] > 900

    def test_finds_what_the_call_before_left(self):
        rank = Rank(Loopback(0, 2), 2)
        rank.prepare("all_reduce", 1000, "int32", "sum")
        assert rank.check(salt=1)["wrong"] == 0
        assert rank.check(salt=9)["wrong"] > 900  # the loopback adds the inputs of salt 2

    @pytest.mark.parametrize("op", OPS)
    def test_every_operation_has_an_oracle(self, op):
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

    def test_the_values_timed_stay_what_they_are(self):
        for op in OPS:
            case = Case(10, "int32" if op.startswith("b") else "float32", op, 0, 2)
            collective = AllReduce(case)
            collective.settle()
            before = collective.tensor.clone()
            both = oracle._combine(op, before, before)
            assert torch.equal(both / 2 if op == "avg" else both, before), op

    def test_digest_sees_one_bit(self):
        zero = torch.zeros(100)
        assert oracle.digest(zero) == oracle.digest(torch.zeros(100))
        assert oracle.digest(zero) != oracle.digest(-zero)
        assert oracle.digest(torch.empty(0)) == ""


class TestCollectives:
    """Those that have buffers; whole runs below show that their right results pass."""

    SIZED = tuple(cls for cls in COLLECTIVES.values() if cls.has_size)

    @pytest.mark.parametrize("cls", SIZED, ids=lambda cls: cls.name)
    @pytest.mark.parametrize("world", [2, 3])
    def test_a_call_that_does_nothing_is_wrong(self, cls, world):
        count = cls.fit(1000, world)
        wrong = []
        for rank in range(world):
            collective = cls(Case(count, "float32", "sum", rank, world))
            wrong.append(collective.check(lambda: None, salt=1)["wrong"])
        # Who has the result: rank 0 gets or gives it, ranks 0 and 1 play ping-pong.
        having = {"reduce": {0}, "gather": {0}, "sendrecv": {0, 1}}
        having["broadcast"] = set(range(1, world))
        assert {r for r in range(world) if wrong[r]} == having.get(cls.name, set(range(world)))
        assert min(filter(None, wrong)) > 0.9 * count / world

    @pytest.mark.parametrize("cls", SIZED, ids=lambda cls: cls.name)
    @pytest.mark.parametrize("world", [2, 3, 4])
    def test_sizes_fit(self, cls, world):
        fitting = cls.fit(1000, world)
        assert 900 < fitting <= 1000 and cls.fit(fitting, world) == fitting
        assert cls.fit(0, world) == 0
        assert 0 < cls.busbw_factor(world) <= 2

    def test_factors_are_those_of_nccl_tests(self):
        factors = {cls.name: cls.busbw_factor(4) for cls in self.SIZED}
        assert factors["all_reduce"] == factors["all_reduce_coalesced"] == 1.5
        assert factors["reduce"] == factors["broadcast"] == 1
        assert factors["sendrecv"] == factors["exchange"] == 1
        for name in ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"):
            assert factors[name] == 0.75
        # One of 1 + 2 + 3 + 4 units stays where it is.
        assert factors["all_to_all_uneven"] == pytest.approx(0.9)

    @pytest.mark.parametrize("world", [2, 3, 5])
    def test_uneven_pieces_agree(self, world):
        cls = COLLECTIVES["all_to_all_uneven"]
        ranks = [cls(Case(cls.fit(500, world), "int8", "sum", r, world)) for r in range(world)]
        for sender in range(world):
            for receiver in range(world):
                sent = ranks[sender].to[receiver].numel()
                assert sent == ranks[receiver].origin[sender].numel() > 0
        assert len({tuple(rank.sizes_to) for rank in ranks}) == world


def make_report() -> Report:
    ours = Measurement([2e-6, 3e-6, 4e-6], iterations=[100, 100, 90])
    gloo = Measurement([200e-6, 300e-6, 400e-6], iterations=[10] * 3, idle_cpu=0.01)
    roofline = Measurement([1e-6, 1e-6, 1e-6], iterations=[1000] * 3)
    big = {OURS: Measurement([5e-3], [1]), "roofline": Measurement([2e-3], [1])}
    return Report(
        collective="all_reduce",
        created="2030-01-01T00:00:00+00:00",
        machine={"cpu": "a CPU", "cores": 2, "memory_bytes": 8 << 30, "kernel": "Linux",
                 "torch": "2.13.0", "python": "3.11"},
        library={"version": "1.2.3", "isa": "v3", "staging_bytes": 4 << 20},
        settings={"world": 4, "rounds": 3},
        titles={OURS: "ringreduce", "gloo": "gloo", "mpi": "mpi", "roofline": "roofline"},
        skipped={"mpi": "mpi4py is not installed"},
        rows=[
            Row(1024, 256, "float32", "sum", 1.5,
                {OURS: ours, "gloo": gloo, "roofline": roofline}),
            Row(1 << 20, 1 << 18, "float32", "sum", 1.5, big),
        ],
    )  # fmt: skip


class Answers:
    """The ranks of a contender that take 10 us a call, or refuse."""

    def __init__(self, contender, refusal: str = "") -> None:
        self.contender, self.refusal = contender, refusal
        self.asked: list[str] = []

    def ask(self, do: str, **arguments) -> list[dict]:
        self.asked.append(do)
        if self.refusal:
            raise Unsupported(self.refusal)
        if do == "check":
            return [{"wrong": 0, "digest": ""}] * 2
        if do == "round":
            seconds = 1e-5 * arguments["iterations"]
            return [{"seconds": s, "idle": 1.0, "idle_cpu": 0.0} for s in (seconds, 0.0)]
        return [{}] * 2


def measure_with(collective: str, refusals: dict[str, str]):
    """The row, who was left out and the answers of two contenders, of whom some refuse."""
    settings = Settings(collective, 2, (1024,), compare=("gloo",), iterations=100, rounds=2)
    answers = {
        c.key: Answers(c, refusals.get(c.key, "")) for c in contenders_of(settings, roofline=False)
    }
    skipped: dict[str, str] = {}
    row = measure_row(SimpleNamespace(sets=answers), settings, 1024, 4, skipped)
    return row, skipped, answers


class TestMethod:
    def test_time_is_that_of_one_call_of_the_slowest_rank(self):
        row, skipped, _ = measure_with("all_reduce", {})
        assert {key: m.seconds for key, m in row.measurements.items()} == {
            "ours": [pytest.approx(1e-5)] * 2,
            "gloo": [pytest.approx(1e-5)] * 2,
        }
        assert skipped == {}

    def test_ping_pong_is_half_of_the_way_there_and_back(self):
        row, _, _ = measure_with("sendrecv", {})
        assert row.measurements[OURS].seconds == [pytest.approx(5e-6)] * 2

    def test_a_peer_that_refuses_is_left_out(self):
        row, skipped, answers = measure_with("reduce", {"gloo": "no such type"})
        assert list(row.measurements) == ["ours"]
        assert skipped == {"gloo": "no such type"}
        assert answers["gloo"].asked == ["prepare"]

    def test_ours_must_not_refuse(self):
        with pytest.raises(Unsupported, match="ringreduce: not yet"):
            measure_with("reduce", {OURS: "not yet"})


class TestReport:
    def test_percentile(self):
        assert percentile([5.0], 0.9) == 5
        assert percentile([3.0, 1.0, 2.0], 0.5) == 2
        assert percentile([0.0, 10.0], 0.1) == pytest.approx(1)

    def test_header_says_what_and_where(self):
        text = "\n".join(preamble(make_report()) + header(make_report()))
        assert all(line.startswith("#") for line in text.splitlines())
        for piece in ("a CPU", "2 cores", "8 GiB", "1.2.3", "ISA v3", "4 MiB a rank",
                      "4 for each of: ringreduce, gloo, roofline", "mpi4py is not installed",
                      "dist.all_reduce(t), in place", "3 rounds", "#wrong", "busbw"):  # fmt: skip
            assert piece in text

    def test_rows(self):
        report = make_report()
        small, big = (format_row(report, row) for row in report.rows)
        assert small.split() == ["1024", "256", "float32", "sum", "3.00", "2.20-3.80", "0.34",
                                 "0.51", "0", "-", "300.0", "100.0x"]  # fmt: skip
        assert big.split() == ["1048576", "262144", "float32", "sum", "5000", "5000-5000", "0.21",
                               "0.31", "0", "0.52", "-", "-"]  # fmt: skip
        names = header(report)[-2]
        assert len(small) == len(big) == len(names)

    def test_wrong_results_are_seen(self):
        report = make_report()
        assert report.ours_is_right and report.faults() == []
        report.rows[0].measurements["gloo"].wrong = 3
        assert report.ours_is_right and len(report.faults()) == 1
        report.rows[1].measurements[OURS].same_bits = False
        assert not report.ours_is_right
        assert "0!" in format_row(report, report.rows[1])

    def test_json_round_trip(self, tmp_path):
        report = make_report()
        report.write(tmp_path / "report.json")
        assert Report.read(tmp_path / "report.json") == report
        document = json.loads((tmp_path / "report.json").read_text())
        ours = document["rows"][0]["measurements"]["ours"]
        assert ours["seconds"] == [2e-6, 3e-6, 4e-6]
        assert ours["median_us"] == pytest.approx(3)
        document["schema"] = 99
        with pytest.raises(ValueError, match="schema 99"):
            Report.from_json(document)

    def test_summary(self, tmp_path):
        reduce, barrier = make_report(), make_report()
        for report in (reduce, barrier):
            report.settings.update(compare=["gloo", "mpi"], sizes=[1000, 1 << 20])
        reduce.rows[1].measurements[OURS].wrong = 1
        barrier.collective = "barrier"
        barrier.settings["sizes"] = [0]
        barrier.rows[1:] = []
        suite = Suite([reduce, barrier], {"gather": "why not"})
        suite.write(tmp_path / "suite.json")
        assert Suite.read(tmp_path / "suite.json") == suite
        lines = summary(suite)
        assert lines[0] == "4 ranks: time of ringreduce / gloo's over it"
        assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]] == [
            ["collective", "1000 B", "1 MiB"],
            ["-" * (n + 2) for n in (17, 15, 17)],
            ["all_reduce", "3.00 us / 100 x", "5.00 ms / - WRONG"],
            ["barrier (no size)", "3.00 us / 100 x", "-"],
            ["gather", "refused", "refused"],
        ]
        assert len({len(line) for line in lines[2:]}) == 1
        assert summary(Suite()) == []

    def test_times_for_people(self):
        seconds = (4.2851e-6, 16.5549e-6, 864.4e-6, 999.6e-6, 0.142255, 2.0, 1234.5)
        written = ["4.29 us", "16.6 us", "864 us", "1.00 ms", "142 ms", "2.00 s", "1,234 s"]
        assert [format_time(value) for value in seconds] == written

    def test_barrier_notices_who_left_early(self):
        barrier = Barrier(Case(0, "float32", "sum", 1, 2))
        answer = barrier.check(lambda: None, salt=1)
        assert answer["came"] <= answer["left"]
        assert not COLLECTIVES["barrier"].has_size


class TestRuns:
    """Whole runs. They share two cores with each other's leftovers, so no time is asserted."""

    def test_all_reduce(self, tmp_path):
        pytest.importorskip("matplotlib")
        json_path, plot_path = tmp_path / "run.json", tmp_path / "run.png"
        status, out, err = finish(
            start(*GLOO, "--compare", "gloo", "--nproc", "2", "--sizes", "1K,64K", "--rounds", "2",
                  "--json", str(json_path), "--plot", str(plot_path))
        )  # fmt: skip
        assert status == 0, err
        rows = rows_of(out)
        assert [row[:4] for row in rows] == [
            ["1024", "256", "float32", "sum"],
            ["65536", "16384", "float32", "sum"],
        ]
        assert all(row[8] == "0" for row in rows)
        report = Report.read(json_path)
        for row in report.rows:
            assert list(row.measurements) == ["ours", "gloo", "roofline"]
            assert all(len(m.seconds) == 2 for m in row.measurements.values())
        assert plot_path.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_all_collectives(self, tmp_path, backend, monkeypatch, dtype):
        # What is timed must not be torch's warning about a name that it no longer likes.
        monkeypatch.setenv("PYTHONWARNINGS", "error:`torch.distributed.:FutureWarning")
        json_path = tmp_path / "all.json"
        status, out, err = finish(
            start("-m", "ringreduce.bench", "all", "--backend", backend, "--compare", "gloo",
                  "--nproc", "3", "--dtype", dtype, "--sizes", "100,64K", "--rounds", "1",
                  "--iters", "2", "--json", str(json_path))
        )  # fmt: skip
        assert status == 0, out + err
        suite = Suite.read(json_path)
        assert [report.collective for report in suite.reports] == list(COLLECTIVES)
        for report in suite.reports:
            assert list(report.titles) == ["ours", "gloo"]
            assert report.skipped == {} and report.faults() == []
            sizes = [0] if report.collective == "barrier" else [100, 64 << 10]
            for size, row in zip(sizes, report.rows, strict=True):
                assert list(row.measurements) == ["ours", "gloo"]
                assert size - 24 < row.bytes <= size
        assert "\n".join(summary(suite)) in out

    def test_what_ours_refuses_is_passed_over(self, tmp_path):
        json_path = tmp_path / "two.json"
        status, out, err = finish(  # Gloo has no such integers, and a barrier has none
            start("-m", "ringreduce.bench", "reduce,barrier", "--backend", "gloo", "--rounds", "1",
                  "--dtype", "int16", "--sizes", "1K", "--iters", "2", "--json", str(json_path))
        )  # fmt: skip
        assert status == 1
        assert "# reduce\n# refused by gloo (as ours): " in out, err
        suite = Suite.read(json_path)
        assert list(suite.refused) == ["reduce"]
        assert [report.collective for report in suite.reports] == ["barrier"]

    def test_under_torchrun(self):
        status, out, err = finish(
            start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                  *GLOO, "--sizes", "1K", "--rounds", "1", "--iters", "3")
        )  # fmt: skip
        assert status == 0, err
        (row,) = rows_of(out)
        assert (row[0], row[8]) == ("1024", "0")
        assert "2 for each of" in out

    def test_a_killed_rank_ends_the_run(self):
        process = start(*GLOO, "--sizes", "1K", "--rounds", "1000")
        wait_until(lambda: len(rank_processes(process.pid)) == 4, 60, "four rank processes")
        ranks = rank_processes(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        status, _, err = finish(process)
        assert status == 1
        assert "rank 1 failed" in err and "SIGKILL" in err
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

    def test_an_error_names_its_rank(self):
        status, _, err = finish(
            start("-m", "ringreduce.bench", "all_reduce", "--backend", "no_such", "--sizes", "1K")
        )
        assert status == 1
        assert "failed" in err and "no_such" in err and "Traceback" in err

    def test_interrupt_leaves_nothing(self):
        process = start(*GLOO, "--sizes", "1K", "--rounds", "1000")
        wait_until(lambda: len(rank_processes(process.pid)) == 4, 60, "four rank processes")
        ranks = rank_processes(process.pid)
        os.kill(process.pid, signal.SIGINT)
        status, _, err = finish(process)
        assert status == 130
        assert "interrupted" in err
        # One that had only just been started notices by itself once it has imported torch.
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 30, "no rank process"
        )
