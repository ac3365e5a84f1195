"""Figures in docs (benchmarks/figures.py): what lint refuses, what is written, which changed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import figures  # noqa: E402
from _figures_pages import faults_of, replace_blocks  # noqa: E402
from _figures_plan import MEASUREMENTS, TABLES, in_run  # noqa: E402
from _figures_tables import ROWS, over, told  # noqa: E402

ONE = 'commit=abc1234 machine="2 cores of a made-up machine"'
OTHER = 'commit=def5678 machine="2 cores of a made-up machine"'
ELSEWHERE = 'commit=abc1234 machine="another one"'
TABLE = "| tool | time |\n|---|---|\n| none | 16.3 us |\n"
COMMAND = "    torchrun --standalone --nproc-per-node 2 benchmarks/watching.py\n"
SEE = "docs/see.md"  # the program has one table there


def block(marker: str, inner: str = f"\n{COMMAND}\n{TABLE}\n") -> str:
    return f"<!-- {marker} -->\n{inner}<!-- end -->\n"


def page(*blocks: str) -> str:
    return "# A page\n\n" + "\nText.\n\n".join(blocks)


WHERE = block(f"figures where {ONE}", "At some commit.\n")
RIGHT = page(WHERE, block(f"figures watching {ONE}"))
GPU = block(f'measured gpu {OTHER} because="it needs a GPU"')


def test_pages_that_are_right():
    assert faults_of(SEE, RIGHT) == []
    assert faults_of(SEE, RIGHT + "\n" + GPU) == []  # it has a commit of its own
    assert faults_of("docs/x.md", f"# A page\n\n{COMMAND}\n{TABLE}") == []
    assert faults_of("docs/x.md", f"# A page\n\n{TABLE}\n`make bench` measures it.\n") == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (page(WHERE, block(f"figures watching {OTHER}")), "run make figures for both"),
        (page(WHERE, block(f"figures watching {ELSEWHERE}")), "run make figures for both"),
        (RIGHT + "\n" + block(f"figures unheard_of {ONE}"), "writes no unheard_of on this page"),
        (RIGHT + "\n" + block(f"figures small_call {ONE}"), "writes no small_call on this page"),
        (RIGHT + "\n" + block(f"figures membership {ONE}"), "writes no membership on this page"),
        (page(WHERE), "watching of benchmarks/figures.py has no markers"),
        (page(block(f"figures watching {ONE}")), "no where block"),
        (RIGHT.replace("watching.py", "gone.py"), "there is no benchmarks/gone.py"),
        (RIGHT.replace(COMMAND, ""), "without the command"),
        (RIGHT + f"\n# More\n\n{TABLE}", "without the command"),
        (RIGHT + "\n" + GPU.replace(COMMAND, ""), "without the command"),
        (RIGHT + "\n" + block(f"measured gpu {ONE}"), "measured takes a name, and each of"),
        (RIGHT + "\n" + GPU.replace("def5678", "yesterday"), "yesterday is no commit"),
        (RIGHT.replace(f" {ONE} -->\n\n", " commit=abc1234 -->\n\n"), "figures takes a name"),
        (RIGHT.removesuffix("<!-- end -->\n"), "it has no <!-- end -->"),
        (RIGHT.replace("<!-- end -->\n", "", 1), "has no <!-- end --> yet"),
        (RIGHT + "<!-- end -->\n", "an end without a beginning"),
        (RIGHT.replace("<!-- figures watching", "  <!-- figures watching"), "one line of its own"),
    ],
)
def test_pages_that_lint_refuses(text, fault):
    assert fault in " ".join(said for _, said in faults_of(SEE, text))


@pytest.mark.parametrize(
    ("before", "table", "measured"),
    [
        ("", "| a | b |\n|---|---|\n| x | 5.3 us |", True),
        ("", "| a | b |\n|---|---|\n| x | **1,024.5 (900-1,100) ms** |", True),
        ("", "| a | b |\n|---|---|\n| x | 17.6 us (14.1-28.8) / 110 x |", True),
        ("", "| a | b |\n|---|---|\n| x | 81 (69-89) tokens/s |", True),
        ("", "| a | b, GB/s |\n|---|---|\n| x | 81 |", True),
        ("", "| a | b |\n|---|---|\n| seconds to the end | 0.12 (0.07-0.16) |", True),
        ("Medians, us a call:\n", "| ranks | LL |\n|---|--:|\n| 2 | **4.1** |", True),
        ("", "| error | number |\n|---|---|\n| cudaErrorAssert | 710 |", False),
        (
            "",
            "| variable | meaning |\n|---|---|\n| `X` | waits longer than 10 s are logged |",
            False,
        ),
        ("", "| all-reduce | 1 KiB |\n|---|---|\n| 8 GPUs | model: 5.0 us, one-shot |", False),
        ("", "| torch | suite |\n|---|---|\n| 2.13.0 | 266 / 0 / 6 |", False),
        ("", "| codec | 2 ranks |\n|---|---|\n| int8 | 0.664 % |", False),
    ],
)
def test_tables_that_need_a_command(before, table, measured):
    assert bool(faults_of("docs/x.md", f"# A page\n\n{before}\n{table}\n")) == measured


def test_a_table_in_code_is_none():
    assert faults_of("docs/x.md", f"# A page\n\n```\n{TABLE}```\n") == []


def test_the_pages_of_this_tree():
    assert figures.main(["check"]) == 0


def test_a_program_and_pages_that_fit():
    assert ROWS.keys() == TABLES.keys()
    assert {name for table in TABLES.values() for name in table.measured} == MEASUREMENTS.keys()
    assert sum(MEASUREMENTS[n].seconds * MEASUREMENTS[n].visits for n in in_run()) <= 40 * 60
    assert all(one.visits >= 3 for one in MEASUREMENTS.values())


def test_no_visits_are_a_usage_error_and_measure_nothing(capsys):
    for visits in ("0", "-1"):
        with pytest.raises(SystemExit):
            figures.main(["--draft", "--visits", visits])
        assert "--visits takes a number above 0" in capsys.readouterr().err


def test_visits_are_spread_over_the_run():
    names = ["small_call", "commit", "cost"]
    assert figures.schedule(names, 3) == names * 3


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_a_spread_holds_all_that_was_measured(values):
    [(middle, _, *spread)] = figures.FIGURE.findall(told(values, "us"))
    middle, low, high = (float(text.replace(",", "")) for text in (middle, *spread))
    assert low <= min(values) * (1 + 1e-6) and max(values) <= high * (1 + 1e-6)
    assert low <= middle <= high


def results(ratio: float, commit: str = "abc1234") -> dict:
    """As benchmarks/loss.py's of two visits, with `continue` that many times as slow as `error`."""
    machine = {
        "cpu": "Made(R) Up Processor", "cores": 2, "memory_bytes": 24 << 30,
        "kernel": "Linux 6.18.44-x x86_64", "torch": "2.13.0", "python": "3.11.7",
    }  # fmt: skip
    rounds = {"error": [1e-5, 2e-5], "continue": [1e-5 * ratio, 2e-5 * ratio * 1.1]}
    visits = [
        {"began": f"2026-11-27T0{hour}:00:00+00:00", "seconds": 9.0, "load": 0.1 * hour,
         "found": {"times": {"1 KiB": rounds, "DDP step": rounds}}}
        for hour in (1, 2)
    ]  # fmt: skip
    names = ("cost", "cost_tcp")
    return {
        name: {"command": MEASUREMENTS[name].command, "commit": commit, "machine": machine,
               "visits": visits}
        for name in names
    }  # fmt: skip


def test_a_table_is_written_between_its_markers():
    before = page(block(f"figures where {OTHER}", "Old.\n"), block(f"figures cost {OTHER}"))
    found = results(1.5)
    commit, machine = figures.origin_of(["cost", "cost_tcp"], found)
    where = figures.where_lines(["cost", "cost_tcp"], found)
    written = {
        "cost": (commit, machine, figures.block_of("cost", found)),
        "where": (commit, machine, where),
    }
    after = replace_blocks(before, written)
    assert faults_of("docs/x.md", after.replace(" cost ", " where ")) == []
    assert after.count("commit=abc1234") == 2 and "def5678" not in after and "16.3 us" not in after
    assert "2 cores of an Made Up, 24 GiB, Linux 6.18.44, torch 2.13.0, Python 3.11.7" in after
    assert f"    {MEASUREMENTS['cost_tcp'].command}\n" in after
    assert re.search(r"\| 1 KiB +\| 1.58 x \(1.50-1.65\)", after)
    assert "2026-11-27, each command 2 times, spread over 60 minutes, load 0.1 to 0.2" in " ".join(
        where
    )
    assert "\nText.\n" in after  # prose stays
    assert replace_blocks(after, written) == after


def test_results_of_two_commits_make_no_table():
    found = results(1.5) | {"cost_tcp": results(1.5, "def5678")["cost_tcp"]}
    with pytest.raises(ValueError, match="not of one commit"):
        figures.origin_of(["cost", "cost_tcp"], found)


def test_two_runs_are_compared(tmp_path, capsys):
    for folder, ratio in (("old", 1.5), ("same", 1.52), ("slower", 2.0)):
        (tmp_path / folder).mkdir()
        for name, document in results(ratio).items():
            figures.write_results(tmp_path / folder / f"{name}.jsonl", document)
    assert figures.main(["compare", str(tmp_path / "old"), str(tmp_path / "same")]) == 0
    assert capsys.readouterr().out == (
        "0 of 4 ratios left the spread\n0 of 0 times, rates and counts left the spread\n"
    )
    assert figures.main(["compare", str(tmp_path / "old"), str(tmp_path / "slower")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "cost: 1 KiB, shared memory: 2.10 x, and before 1.50-1.65 x"
    assert len(said) == 6 and said[4].startswith("4 of 4 ratios")


def test_results_of_a_suite_are_read_as_they_were_written(tmp_path):
    report = {"collective": "barrier", "machine": {"cores": 2}, "library": {}, "rows": []}
    found = [{"refused": {}, "reports": [report, report | {"rows": [1]}]}, {"refused": {}}, [7]]
    visits = [{"load": 0.5, "found": one} for one in found]
    document = {"commit": "abc1234", "visits": visits}
    figures.write_results(tmp_path / "cost.jsonl", document)
    assert figures.read_results(tmp_path) == {"cost": document}
    text = (tmp_path / "cost.jsonl").read_text()
    assert text.count("cores") == 1
    for lines in range(1, 6):  # of 6
        (tmp_path / "cost.jsonl").write_text("".join(text.splitlines(keepends=True)[:lines]))
        with pytest.raises(ValueError, match=r"cost\.jsonl"):
            figures.read_results(tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "cost.jsonl: "),
        ("[]", "cost.jsonl: "),
        ('{"visits": 1}\n[]', "cost.jsonl: "),
        ('{"visits": 1}\n{"load": 1}', "cost.jsonl: "),
        ('{"visits": 0}', "cost.jsonl holds no"),
    ],
)
def test_damaged_results_are_named(tmp_path, capsys, text, fault):
    (tmp_path / "cost.jsonl").write_text(text)
    assert figures.main(["compare", str(tmp_path), str(tmp_path)]) == 1
    assert fault in capsys.readouterr().err
    assert figures.main(["compare", str(tmp_path / "none"), str(tmp_path / "none")]) == 1
    assert "none holds no results" in capsys.readouterr().err


def test_times_are_compared_across_units_and_counted_apart():
    old = [["", "time", "rate"], ["a call", "990 us (900-1,100)", "1.50 x (1.40-1.60)"]]
    same = [old[0], ["a call", "1.01 ms (0.95-1.20)", "1.41 x (1.40-1.60)"]]
    slower = [old[0], ["a call", "1.20 ms (1.10-1.30)", "1.50 x (1.40-1.60)"]]
    counts = {figures.RATIOS: figures.Compared(), figures.OTHERS: figures.Compared()}
    assert figures.outside(old, same, counts) == []
    fresh = [old[0], ["another call", "990 us (900-1,100)", "1.50 x (1.40-1.60)"]]
    assert figures.outside(old, fresh, counts) == ["another call: not compared, the row is new"]
    left = figures.outside(old, slower, counts)
    assert left == ["a call, time: 1.20 ms, and before 900-1,100 us"]
    assert counts == {
        figures.RATIOS: figures.Compared(2, 0), figures.OTHERS: figures.Compared(2, 1),
    }  # fmt: skip


def test_a_ratio_is_that_of_a_round():
    assert over([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError):
        over([1.0], [1.0, 2.0])
