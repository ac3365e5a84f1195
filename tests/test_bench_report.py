"""What the benchmark writes: the table, the JSON file, the summary of all collectives."""

import json

import pytest

from ringreduce.bench.results import Measurement, Report, Row, Suite, percentile
from ringreduce.bench.settings import OURS
from ringreduce.bench.summary import format_time, summary
from ringreduce.bench.table import format_row, header, preamble


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
