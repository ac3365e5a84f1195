"""`python -m ringreduce.bench --explain`: what it says of the chooser."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ringreduce.bench.cli import main
from ringreduce.bench.settings import ALGORITHMS, PEERS


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The rows by size, as words."""
    assert main(["--explain", *arguments]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    return {"".join(words[:2]): words[2:] for words in map(str.split, lines[1:])}


def test_small_messages_take_few_hops_and_large_ones_few_bytes(capsys):
    rows = table(capsys, "--nproc", "4", "--sizes", "1K,25M", "--round-trip-ms", "50",
                 "--bandwidth-mbit", "500")  # fmt: skip
    assert rows["1KiB"][0] == "bruck" and "1 hop(s)" in " ".join(rows["1KiB"])
    assert rows["25MiB"][0] in ("ring", "twoshot") and "1.50 of the message" in " ".join(
        rows["25MiB"]
    )


def test_hosts_of_several_ranks_go_by_the_hierarchy(capsys):
    rows = table(capsys, "--nproc", "8", "--hosts", "2", "--sizes", "64,25M")
    assert rows["64B"][0] != "hierarchical" and rows["25MiB"][0] == "hierarchical"
    asked = table(capsys, "--nproc", "8", "--hosts", "2", "--sizes", "64", "--algorithm",
                  "hierarchical")  # fmt: skip
    assert asked["64B"][0] == "hierarchical" and "asked for" in " ".join(asked["64B"])


def test_a_longer_way_makes_more_messages_small(capsys):
    def last_of_bruck(round_trip: str) -> int:
        rows = table(capsys, "--nproc", "4", "--sizes", "1K:1M", "--round-trip-ms", round_trip)
        return [words[0] for words in rows.values()].count("bruck")

    assert last_of_bruck("0.02") < last_of_bruck("2") <= last_of_bruck("50")


def test_inside_a_host_there_are_no_times(capsys):
    rows = table(capsys, "--nproc", "4", "--hosts", "1", "--sizes", "1K,1M")
    assert rows["1KiB"][0] == "direct" and rows["1MiB"][:5] == ["twoshot", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--nproc", "3", "--hosts", "2"], "3 ranks on 2 hosts"), (["--nproc", "1"], "two at least"),
     (["--sizes", "x"], "no size"), (["--bandwidth-mbit", "0"], "above 0")],
)  # fmt: skip
def test_what_cannot_be_is_refused(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        main(["--explain", *arguments])
    assert complaint in capsys.readouterr().err


def test_every_algorithm_can_be_asked_for_and_compared():
    assert {"bruck", "hierarchical"} <= set(ALGORITHMS["cpu"]) & set(PEERS)


@pytest.mark.slow
def test_a_group_at_hand_is_explained(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "ringreduce.bench", "--explain", "--sizes", "1K"],
        capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "# 2 ranks on 1 host(s)" in done.stdout and "direct" in done.stdout
