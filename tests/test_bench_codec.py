"""Codecs as contenders of the benchmark: what is asked for, the errors that are told, a whole run.

Also benchmarks/codec_error.py, which shows how those errors grow with the ranks.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_bench_method import Answers
from test_bench_report import make_report
from test_bench_runs import finish, rows_of, start

from ringreduce.bench import oracle
from ringreduce.bench.alternate import measure_row
from ringreduce.bench.cli import main
from ringreduce.bench.contenders import contenders_of
from ringreduce.bench.results import Measurement, Report
from ringreduce.bench.settings import CODECS, OURS, Settings, parse_codec
from ringreduce.bench.table import codec_table, header

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import codec_error


class TestAsking:
    def test_names(self):
        assert [parse_codec(codec) for codec in CODECS] == [(codec, "auto") for codec in CODECS]
        assert parse_codec("int4@ring") == ("int4", "ring")
        for text in ("", "int3", "int8@", "int8@nobody", "@ring", "int8@ring@ring"):
            with pytest.raises(ValueError, match="no codec"):
                parse_codec(text)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["all_reduce", "--codec", "int8,int3"], "'int3' is no codec"),
            (["all_reduce", "--codec", "int8", "--dtype", "float64"], "all_reduce of float32"),
            (["all_reduce", "--codec", "int8", "--op", "max"], "and not for max"),
            (["all_gather", "--codec", "int8"], "all_reduce of float32"),
        ],
    )
    def test_refuses(self, capsys, arguments, complaint):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert complaint in capsys.readouterr().err

    def test_each_codec_has_ranks_of_its_own(self):
        settings = Settings(
            "all_reduce", 2, (1024,), compare=("gloo",), codecs=("int8", "int4@ring")
        )
        found = {contender.key: contender for contender in contenders_of(settings)}
        assert list(found) == ["ours", "int8", "int4@ring", "gloo", "roofline"]
        assert {found[key].kind for key in settings.codecs} == {"codec"}
        assert {found[key].backend for key in settings.codecs} == {"ringreduce"}

    @pytest.mark.parametrize("codecs", [(), ("int8",)])
    def test_errors_are_asked_for_where_there_are_codecs(self, codecs):
        class Telling(Answers):
            def ask(self, do, **arguments):
                told = super().ask(do, **arguments)
                if do == "check":
                    self.asked[-1] += " with error" * arguments.get("error", False)
                return told

        settings = Settings("all_reduce", 2, (1024,), codecs=codecs, iterations=100, rounds=1)
        sets = {c.key: Telling(c) for c in contenders_of(settings, roofline=False)}
        measure_row(SimpleNamespace(sets=sets), settings, 1024, 4, {})  # type: ignore[arg-type]
        asked = [what for answers in sets.values() for what in answers.asked if "check" in what]
        assert set(asked) == {"check with error" if codecs else "check"}


class TestErrors:
    def test_what_is_exact_has_none(self):
        values = torch.randn(1000, dtype=torch.float64)
        found = oracle.error_of(values, values)
        assert (found["max"], found["rms"]) == (0, 0) and found["cosine"] == pytest.approx(1)

    def test_a_known_error_is_measured(self):
        exact = torch.tensor([3.0, -4.0, 0.0, 0.0], dtype=torch.float64)  # rms 2.5
        found = oracle.error_of(torch.tensor([3.0, -4.0, 0.0, 2.5]), exact)
        assert found["max"] == pytest.approx(1) and found["rms"] == pytest.approx(0.5)
        assert found["cosine"] == pytest.approx(25 / math.sqrt(25 * 31.25))
        assert oracle.error_of(-exact, exact)["cosine"] == pytest.approx(-1)

    def test_references_repeat(self):
        period = torch.randn(oracle.PERIOD, dtype=torch.float64)
        whole = torch.cat([period, period[:7]])
        assert oracle.error_of(whole, period)["rms"] == 0
        whole[-1] += 1e3
        assert oracle.error_of(whole, period)["max"] == pytest.approx(1e3, rel=0.01)

    def test_nothing_to_compare_with_is_no_division_by_zero(self):
        zeros = torch.zeros(5)
        assert oracle.error_of(zeros, zeros) == {"max": 0, "rms": 0, "cosine": 1}
        assert oracle.error_of(zeros + 1, zeros)["cosine"] == 0
        assert oracle.error_of(zeros, zeros + 1)["cosine"] == 0
        assert oracle.error_of(torch.empty(0), zeros)["rms"] == 0

    def test_nan_is_the_worst(self):
        exact = torch.ones(10)
        lost = exact.clone()
        lost[3] = math.nan
        found = oracle.error_of(lost, exact)
        assert all(math.isnan(found[name]) for name in ("max", "rms", "cosine"))
        measurement = Measurement()
        for answer in ({"max": 1.0, "cosine": 0.5}, found, {"max": 2.0, "cosine": 0.1}):
            measurement.add_error(answer)
        assert math.isnan(measurement.error["max"]) and math.isnan(measurement.error["cosine"])

    def test_the_worse_one_counts(self):
        measurement = Measurement()
        for most, cosine in ((0.2, 0.9), (0.3, 0.99), (0.1, 0.8)):
            measurement.add_error({"max": most, "cosine": cosine})
        assert measurement.error == {"max": 0.3, "cosine": 0.8}

    @pytest.mark.parametrize("codec", CODECS)
    @pytest.mark.parametrize("op", ["sum", "avg"])
    def test_codecs_have_room_for_their_losses_and_no_more(self, codec, op):
        inputs = oracle.Inputs("float32", op, world=3, count=10_000, salt=1)
        expected = oracle.expect_reduced(inputs)
        allowed = oracle.coded(expected, inputs, codec)
        # One value of a block may be off by half a step for each of its encodings.
        step = oracle.STEPS[codec] * float(expected.reference.abs().max())
        signs = 2.0 * torch.randint(0, 2, expected.reference.shape) - 1
        assert oracle.count_wrong(expected.reference + step * signs, allowed) == 0
        assert oracle.count_wrong(expected.reference + step * signs, expected) == 10_000
        # In int4 nearly everything is nearly everywhere; NaN is not.
        swapped = expected.reference.roll(128)
        assert oracle.count_wrong(swapped, allowed) > {"int4": 100, "int8": 8000}.get(codec, 9000)
        assert oracle.count_wrong(swapped * math.nan, allowed) == 10_000


class TestReport:
    def test_a_table_of_codecs(self):
        report = make_report()
        report.settings["codecs"] = ["int8"]
        report.titles["int8"] = "int8"
        error = {"max": 0.05, "rms": 0.0083, "cosine": 0.9999}
        coded = Measurement([1e-6, 1.5e-6, 2e-6], [100] * 3, error=error)
        report.rows[0].measurements["int8"] = coded
        assert report.peers == ["gloo"]  # codecs are no peers, whose columns follow ours
        assert "int8" not in "".join(header(report)[-2:])
        lines = codec_table(report)
        names, *rows = [line for line in lines if "size (B)" in line or line[0] != "#"]
        assert names.split()[-8:-1] == ["max", "error", "rms", "error", "1", "-", "cosine"]
        by_name = {row.split()[1]: row.split() for row in rows if row.split()[0] == "1024"}
        assert list(by_name) == ["exact", "int8", "gloo"]
        assert by_name["int8"][4:] == ["1.02", "2.00x", "200.0x", "0.05", "0.0083", "0.0001", "0"]
        assert by_name["exact"][4:7] == ["0.51", "-", "100.0x"]
        assert len({len(row.rstrip("!")) for row in rows}) == 1

    def test_wrong_codecs_are_ours(self, tmp_path):
        report = make_report()
        report.settings["codecs"] = ["int8"]
        report.titles["int8"] = "int8"
        report.rows[0].measurements["int8"] = Measurement([1.0], [1], error={"rms": 0.1})
        assert report.ours_is_right
        report.write(tmp_path / "report.json")
        assert Report.read(tmp_path / "report.json") == report
        report.rows[0].measurements["int8"].same_bits = False
        assert not report.ours_is_right
        assert any(line.endswith("0!") for line in codec_table(report))


class TestGrowth:
    @staticmethod
    def rows(owner: tuple[float, ...], ring: tuple[float, ...], same_bits: bool = True):
        return [
            {"codec": "int8", "schedule": schedule, "world": world, "rms": rms,
             "same_bits": same_bits}
            for schedule, errors in (("owner", owner), ("ring", ring))
            for world, rms in zip((2, 4, 8), errors, strict=True)
        ]  # fmt: skip

    def test_two_ranks_encode_as_often_either_way(self):
        assert codec_error.growth("owner", 2) == codec_error.growth("ring", 2) == math.sqrt(1.5)
        assert codec_error.growth("owner", 10**6) == pytest.approx(math.sqrt(2))
        assert codec_error.growth("ring", 8) == pytest.approx(math.sqrt(4.5))

    def test_a_growing_error_of_owners_is_a_fault(self):
        one = 0.01 / codec_error.growth("owner", 2)
        right = tuple(one * codec_error.growth("owner", world) for world in (2, 4, 8))
        grown = tuple(one * codec_error.growth("ring", world) for world in (2, 4, 8))
        assert codec_error.judge(self.rows(right, grown)) == []
        faults = codec_error.judge(self.rows(grown, grown))
        assert [fault.partition(": ")[0] for fault in faults] == [
            "int8, owner, 4 ranks", "int8, owner, 8 ranks"
        ]  # fmt: skip
        assert len(codec_error.judge(self.rows((0.01, math.nan, 0.01), grown))) == 1
        assert len(codec_error.judge(self.rows(right, grown, same_bits=False))) == 6
        rows = self.rows(right, grown)
        codec_error.judge(rows)
        table = codec_error.table(rows)
        assert table[2].startswith("| int8 | owner | 1 % (1) |") and "2.12" not in table[2]
        assert "| int8 | ring |" in table[3] and len(table) == 4

    def test_values_differ_by_rank_and_have_spans_of_one_size(self):
        first, second = (codec_error.values(rank, 10_500, 3) for rank in (0, 1))
        assert not torch.equal(first, second)
        sizes = [
            torch.stack([span.std() for span in v[:10_000].split(codec_error.SPAN)])
            for v in (first, second)
        ]
        assert torch.allclose(sizes[0], sizes[1], rtol=0.15)
        assert sizes[0].max() > 2 * sizes[0].min()

    @pytest.mark.slow
    def test_a_small_run(self, tmp_path, capsys):
        path = tmp_path / "error.json"
        arguments = ["--worlds", "2,3", "--codecs", "bfloat16,int4", "--count", "20000"]
        assert codec_error.main([*arguments, "--out", str(path)]) == 0, capsys.readouterr()
        rows = json.loads(path.read_text())["rows"]
        assert [(row["codec"], row["schedule"], row["world"]) for row in rows][:3] == [
            ("bfloat16", "owner", 2), ("bfloat16", "ring", 2), ("int4", "owner", 2)
        ]  # fmt: skip
        assert all(row["same_bits"] for row in rows)
        errors = {
            codec: {r["rms"] for r in rows if r["codec"] == codec} for codec in ("bfloat16", "int4")
        }
        assert 1e-4 < max(errors["bfloat16"]) < 0.01 < min(errors["int4"]) < 0.3


@pytest.mark.slow
def test_a_run_with_codecs(tmp_path):
    path = tmp_path / "run.json"
    status, out, err = finish(
        start("-m", "ringreduce.bench", "all_reduce", "--codec", "bfloat16,int8,int4@ring",
              "--compare", "gloo", "--sizes", "100,64K", "--rounds", "1", "--iters", "2",
              "--json", str(path))
    )  # fmt: skip
    assert status == 0, out + err
    assert len(rows_of(out)) == 2 + 2 * 5  # a row of the table a size, one of the codecs' each
    report = Report.read(path)
    for row in report.rows:
        assert list(row.measurements) == [OURS, "bfloat16", "int8", "int4@ring", "gloo", "roofline"]
        errors = {key: m.error["rms"] for key, m in row.measurements.items() if m.error}
        assert errors[OURS] < 1e-6 and errors["gloo"] < 1e-6
        assert 1e-5 < errors["bfloat16"] < 0.01 and errors["int8"] < 0.02
        assert errors["int8"] < errors["int4@ring"] < 0.3
