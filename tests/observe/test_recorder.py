"""Dumps of records: what torch's `torchfrtrace` and `python -m ringreduce.recorder` say of them."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import expect_all
from calls import CALLS, MESSAGES, Site
from conftest import MakeWorld
from pool import Pool, Rank, run_ranks

import ringreduce
from ringreduce.core.words import ranks_text
from ringreduce.observe import dump as observer
from ringreduce.observe import recorder
from ringreduce.observe.record import Record

ANALYSER = "torch.distributed.flight_recorder"


def said(*command: str, status: int = 0) -> str:
    """What a module prints."""
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def traced(folder: Path, *options: str) -> str:
    """What torchfrtrace says of the dumps."""
    if importlib.util.find_spec(ANALYSER) is None:
        pytest.skip("this torch has no torchfrtrace")
    return said(f"{ANALYSER}.fr_trace", str(folder), *options)


def explained(folder: Path) -> tuple[str, str, str]:
    """Our three sentences: the cause, what was done last, where to look."""
    dumps = recorder.load(folder)
    cause, last, where = recorder.explain(dumps, recorder.find(dumps))
    return cause, last, where


def await_dumps(folder: Path, ranks: set[int], since: int = 0) -> dict[int, dict[str, Any]]:
    """Of these ranks, made after that time of day in nanoseconds."""
    names = {f"ringreduce_rank_{rank}" for rank in ranks}
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        if names <= {path.name for path in folder.iterdir()}:
            dumps = recorder.load(folder)
            if dumps.keys() == ranks and all(time_of(dump) > since for dump in dumps.values()):
                return dumps
        time.sleep(0.05)
    raise AssertionError(f"no dumps of all of {ranks}: {list(folder.iterdir())}")


def time_of(dump: dict[str, Any]) -> int:
    return int(dump["ringreduce"]["time_ns"])


def states(dump: dict[str, Any]) -> list[tuple[str, str]]:
    return [(entry["profiling_name"], entry["state"]) for entry in dump["entries"]]


def call_another(me: Rank) -> None:
    pair = dist.new_group([1, 2])
    dist.all_reduce(torch.ones(3))
    if me.rank == 0:
        ringreduce.dump_records(reason="as asked")
    elif me.rank == 1:
        dist.all_reduce(torch.ones(100), group=pair)
    else:
        dist.reduce(torch.ones(100), 1, group=pair)
        dist.barrier(pair)


def test_a_mismatch(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    """In a group of some of the ranks, whose numbers are those of all."""
    call = pool.start(call_another, world(3, timeout=8.0, DUMP=str(tmp_path)), remade=True)
    expect_all(call.outcomes(), {0}, "Mismatch", {2})
    dumps = await_dumps(tmp_path, {0, 1, 2})
    assert dumps[0]["ringreduce"]["reason"] == "as asked"
    error = dumps[1]["ringreduce"]["error"]
    assert (error["type"], error["rank"]) == ("Mismatch", 2)

    cause, last, where = explained(tmp_path)
    assert re.match(r"In operation #0 of group '\S+' of ranks 1 and 2, ", cause), cause
    assert "rank 1 called all_reduce (float32, 100 elements, SUM) and " in cause
    assert "rank 2 called reduce (float32, 100 elements, SUM, to rank 1)." in cause
    assert "ank 1 failed in all_reduce #0" in last
    assert f"rank 2, pid {dumps[2]['ringreduce']['pid']} on " in where
    assert f"in call_another ({__file__}:" in where

    text = traced(tmp_path)
    assert "Collective sequence number: 0 has errors" in text
    assert "COLLECTIVE_TYPE_MISMATCH" in text and "'reduce'" in text and "'all_reduce'" in text


def stay_away(me: Rank) -> None:
    dist.all_reduce(torch.ones(3))
    if me.rank == 2:
        me.hear()  # in place of the all-reduce
    else:
        dist.all_reduce(torch.ones(100))


def test_a_missing_rank(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    """It dumps too, although it is in no call that could raise."""
    call = pool.start(stay_away, world(3, timeout=2.0, DUMP=str(tmp_path)), remade=True)
    call.await_end({0, 1}, 30.0)
    dumps = await_dumps(tmp_path, {0, 1, 2})
    call.tell(2)
    expect_all(call.outcomes(), {2}, "Timeout", {2})
    assert states(dumps[0]) == [("nccl:all_reduce", "completed"), ("nccl:all_reduce", "started")]
    assert states(dumps[2]) == [("nccl:all_reduce", "completed")]

    cause, last, where = explained(tmp_path)
    assert cause.startswith("Rank 2 did not come to operation #1 of group '0' (default_pg) of ")
    waited = re.search(
        r"ranks 0 and 1 called all_reduce \(float32, 100 elements, SUM\) and waited for (\d\S*) s",
        cause,
    )
    assert waited and float(waited[1]) >= 2
    assert last.startswith("Ranks 0 and 1 failed in all_reduce #1; rank 2 had ended all_reduce #0")
    assert re.search(r"Look at rank 2, pid \d+ on \S+, in hear \(\S+ranks\.py:\d+\)\.", where), (
        where
    )

    text = traced(tmp_path)
    assert "Not all ranks joining collective, sequence number: 1" in text
    assert "missing ranks: {2}" in text


def die(me: Rank) -> None:
    dist.all_reduce(torch.ones(3))
    if me.rank == 1:
        time.sleep(1)  # the others wait for it by then
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(100))


def test_a_killed_rank(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    call = pool.start(die, world(3, timeout=8.0, DUMP=str(tmp_path)), remade=True)
    expect_all(call.outcomes(), {1}, "PeerLost", {1})
    await_dumps(tmp_path, {0, 2})
    lines = said("ringreduce.recorder", str(tmp_path)).splitlines()
    assert lines == [*explained(tmp_path)]
    cause, last, where = lines
    assert cause.startswith(
        "Rank 1 was lost in operation #1, all_reduce (float32, 100 elements, SUM), of group '0' "
        "(default_pg) of ranks 0-2 and left no dump: rank 1 (pid "
    )
    assert last == "Ranks 0 and 2 failed in all_reduce #1; rank 1 left no dump."
    assert where.startswith("Look at rank 1, which left no dump: at its own output, ")

    text = traced(tmp_path, "--allow-incomplete-ranks")
    assert "missed FR dumps from ranks ({1})" in text


@pytest.mark.parametrize("leaves", [False, True])
def test_an_error_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], leaves: bool
) -> None:
    """The rank that fails on its own leaves a dump too, though no group raises there.

    That it has left its groups before does not make it one of another job.
    """
    script, folder = tmp_path / "train.py", tmp_path / "dumps"
    script.write_text(
        textwrap.dedent("""
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("ringreduce")

        def train():
            dist.all_reduce(torch.ones(3))
            if dist.get_rank() == 1:
                if os.environ["LEAVES"] == "True":
                    time.sleep(0.5)
                    dist.destroy_process_group()
                raise ValueError("no more data")
            dist.all_reduce(torch.ones(100))

        train()
        """)
    )
    done = run_ranks(script, 2, {"RINGREDUCE_DUMP": str(folder), "LEAVES": str(leaves)})
    assert [process.returncode for process in done] == [1, 1]
    assert "ValueError: no more data" in done[1].stderr
    assert f"its records are in {folder}/ringreduce_rank_0" in done[0].stderr
    cause, _, where = explained(folder)
    assert cause == "Rank 1 ended with ValueError: no more data."
    assert f"in train ({script}:" in where
    assert capsys.readouterr().err == ""


def call_all(me: Rank, folder: str) -> None:
    world = dist.group.WORLD
    assert world is not None
    for name in CALLS:
        if name not in MESSAGES:
            CALLS[name](Site(world, timedelta(seconds=60), root=1))
    dist.all_gather([torch.empty(n) for n in (2, 3, 5)], torch.ones((2, 3, 5)[me.rank]))
    if me.rank == 0:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        while ringreduce.records()[-1].state != "running":
            time.sleep(0.01)
        ringreduce.dump_records(f"{folder}/running")
        dist.send(torch.ones(1), 1)
        work.wait()  # type: ignore[union-attr]
    else:
        if me.rank == 1:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(100_000))
    path = ringreduce.dump_records(f"{folder}/ended", reason="it ended")
    assert path == f"{folder}/ended/ringreduce_rank_{me.rank}"


def test_a_clean_job(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    """Every collective is one that torchfrtrace knows, with sizes that it finds right."""
    pool.start(call_all, world(3), str(tmp_path), remade=True).results()
    dumps = recorder.load(tmp_path / "ended")
    kinds = [entry["ringreduce"]["kind"] for entry in dumps[0]["entries"]]
    assert len(set(kinds)) == 13, kinds  # with the message
    assert {state for dump in dumps.values() for _, state in states(dump)} == {"completed"}
    text = traced(tmp_path / "ended")
    assert not re.search("error|mismatch|missing|Not all ranks", text, re.IGNORECASE), text
    text = said("ringreduce.recorder", str(tmp_path / "ended"), status=1)
    assert text.startswith(
        "No cause was found: all operations in the dumps of ranks 0-2 have ended."
    )

    assert states(recorder.load(tmp_path / "running")[0])[-1] == ("nccl:all_reduce", "started")
    cause, *_ = explained(tmp_path / "running")
    assert re.match(
        r"Operation #\d+, all_reduce \(float32, 100000 elements, SUM\), of group '0'", cause
    )
    assert cause.endswith(" of ranks 0-2 holds rank 0, and ranks 1 and 2 left no dump.")


def call_often(me: Rank) -> None:
    for _ in range(4100):
        dist.all_reduce(torch.ones(1))
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    with pytest.raises(ringreduce.Aborted):
        dist.all_reduce(torch.ones(1))


def test_what_was_overwritten_is_counted(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    call = pool.start(call_often, world(1, DUMP=str(tmp_path)), remade=True)
    call.results()
    dump = await_dumps(tmp_path, {0})[0]
    left_out = dump["ringreduce"]["groups"]["0"]["left_out"]
    assert left_out == 5 and len(dump["entries"]) == 4096
    assert dump["entries"][0]["record_id"] == dump["entries"][0]["collective_seq_id"] == left_out
    assert states(dump)[-2:] == [("nccl:all_reduce", "completed"), ("nccl:all_reduce", "scheduled")]
    assert dump["ringreduce"]["error"]["type"] == "Aborted"


def await_signals(me: Rank) -> bool:
    dist.all_reduce(torch.ones(3))
    me.tell("begun")
    me.hear()
    # faulthandler has it (ranks.py), which Python's own table does not show.
    return signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_signal(pool: Pool, world: MakeWorld, tmp_path: Path, name: str) -> None:
    group = world(2, DUMP=str(tmp_path), DUMP_SIGNAL=name)
    call = pool.start(await_signals, group, fresh=True)
    for rank in (0, 1):
        call.heard(rank)
        call.signal(rank, getattr(signal, f"SIG{name}"))
    if name == "USR1":
        dumps = await_dumps(tmp_path, {0, 1})
        assert dumps[1]["ringreduce"]["reason"] == "it received SIGUSR1"
    for rank in (0, 1):
        call.tell(rank)
    assert call.results() == [True, True]
    if name == "USR2":
        assert list(tmp_path.iterdir()) == []
        assert "RINGREDUCE_DUMP_SIGNAL=USR2: the signal has a handler" in call.log(0)


def a_dump(rank: int, now: int, *calls: tuple[str, str, int], **facts: Any) -> dict[str, Any]:
    """Of a group of two ranks at a time of day; calls are kinds, states and when they began."""
    common = {"dtype": "float32", "elements": 3, "op": "", "codec": "", "root": -1, "posted_ns": 1}
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "ringreduce": common
            | {
                "group": "0",
                "sequence": n,
                "kind": kind,
                "state": state,
                "arrived_ns": begun,
                "done_ns": begun,
            },
        }
        for n, (kind, state, begun) in enumerate(calls)
    ]
    about = {
        "rank": rank,
        "pid": 7,
        "host": "h",
        "time_ns": now,
        "monotonic_ns": now,
        "error": None,
        "job": "",
        "world_size": 2,
        "attempt": 0,
    }
    clock = {"clock_ahead_ns": 0, "clock_error_ns": 0}
    about |= {"stacks": {}, "libraries": [], "groups": {"0": clock}, "program": "train.py"} | facts
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"pg_config": config, "entries": entries, "ringreduce": about}


def save(folder: Path, *dumps: dict[str, Any]) -> None:
    for dump in dumps:
        path = folder / f"ringreduce_rank_{dump['ringreduce']['rank']}"
        path.write_bytes(pickle.dumps(dump))


@pytest.mark.parametrize(
    ("second", "blamed"),
    [
        (a_dump(1, 900, ("barrier", "done", 5)), (1,)),
        (a_dump(1, 90, ("barrier", "done", 5)), ()),  # it may have come since
        (a_dump(1, 900, ("barrier", "done", 5), ("all_gather", "running", 80)), ()),
        (a_dump(1, 900, ("barrier", "done", 5), ("broadcast", "running", 80)), (1,)),
    ],
    ids=["behind", "dumped before", "in the same call", "in another call"],
)
def test_ranks_that_are_behind_are_blamed(second: dict[str, Any], blamed: tuple[int, ...]) -> None:
    first = a_dump(0, 900, ("barrier", "done", 5), ("all_gather", "running", 100))
    found = recorder.find({0: first, 1: second})
    assert found is not None and found.ranks == blamed, found


@pytest.mark.parametrize("is_known", [True, False])
def test_dumps_of_two_hosts_are_compared_by_the_groups_clock(is_known: bool) -> None:
    """Rank 1's monotonic clock is 1,000 behind, and its time of day 700."""
    first = a_dump(0, 900, ("barrier", "done", 5), ("all_gather", "running", 100))
    second = a_dump(1, -100, ("barrier", "done", -995))
    about = second["ringreduce"]
    about["time_ns"] = 200
    ahead, error = (-1000, 20) if is_known else (0, -1)
    about["groups"]["0"] |= {"clock_ahead_ns": ahead, "clock_error_ns": error}
    found = recorder.find({0: first, 1: second})
    assert found is not None and found.ranks == (1,)
    about["groups"]["0"]["clock_ahead_ns"] = about["time_ns"] = 0  # it dumped before rank 0 came
    found = recorder.find({0: first, 1: second})
    assert found is not None and found.ranks == ()


def test_several_ranks_were_in_an_operation(tmp_path: Path) -> None:
    save(tmp_path, *(a_dump(rank, 900, ("barrier", "running", 5)) for rank in (0, 1)))
    _, last, _ = explained(tmp_path)
    assert last == "Ranks 0 and 1 were in barrier #0 for 8.95e-07 s."
    save(tmp_path, a_dump(0, 900), a_dump(1, 900, ("barrier", "running", 5)))
    _, last, _ = explained(tmp_path)
    assert last == "Rank 0 had called nothing; rank 1 was in barrier #0 for 8.95e-07 s."


def met(dump: dict[str, Any], *meetings: str) -> dict[str, Any]:
    """The dump with groups that met so; the first one is group "0"."""
    for number, meeting in enumerate(meetings):
        dump["ringreduce"]["groups"][str(number)] = {
            "clock_ahead_ns": 0, "clock_error_ns": 0, "meeting": meeting
        }  # fmt: skip
        dump["pg_config"][str(number)] = {"name": "", "desc": "", "ranks": "[0, 1]"}
    return dump


# Each dump with its folder, the meetings of its groups, and its time.
JOBS = {
    "of one rank each": ([("", 0, "a", 900), ("", 1, "b", 400)], {0}),
    "linked by other ranks": (
        [("", 0, "a", 300), ("", 1, "ab", 200), ("", 2, "bc", 100), ("", 3, "c", 900),
         ("", 4, "d", 800)], {0, 1, 2, 3},
    ),
    "the newest in another folder": ([("", 0, "a", 100), ("earlier/b", 0, "b", 900)], {0}),
    "in several folders": (
        [("", 0, "b", 900), ("earlier/b", 1, "b", 500), ("earlier/a", 0, "a", 700),
         ("earlier/a", 1, "a", 600)], {0, 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_the_newest_job_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    dumps, ranks = JOBS[name]
    for folder, rank, meetings, now in dumps:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        dump = met(a_dump(rank, now * 10**9, job="sweep"), *meetings)
        prefix = "rank_" if folder else "ringreduce_rank_"
        (tmp_path / folder / f"{prefix}{rank}").write_bytes(pickle.dumps(dump))
    found = recorder.load(tmp_path)
    assert found.keys() == ranks
    assert max(map(time_of, found.values())) == 900 * 10**9
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"left out what ranks? \d.* of job sweep dumped until 1970-01-01 .* in /", line
    )


def test_dumps_without_groups_are_told_apart_by_what_else_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attempt of torchrun; and the last groups of a process that has left them."""
    dumps = [a_dump(0, 900, ("barrier", "running", 5)), a_dump(1, 400, ("barrier", "failed", 6))]
    dumps[0]["ringreduce"]["attempt"] = 1
    save(tmp_path, *dumps)
    assert list(recorder.load(tmp_path)) == [0]
    assert "left out what rank 1 of job train.py dumped until" in capsys.readouterr().err
    assert "rank 1 left no dump" in explained(tmp_path)[0]
    dumps[1]["ringreduce"] |= {"groups": {}, "met": ["a"]}
    dumps[1]["entries"] = []
    save(tmp_path, met(dumps[0], "a"), dumps[1])
    assert list(recorder.load(tmp_path)) == [0, 1]


def test_of_two_dumps_of_a_rank_the_newer_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, met(a_dump(0, 900), "a"))
    (tmp_path / "earlier").mkdir()
    save(tmp_path / "earlier", met(a_dump(0, 800), "a"))
    assert time_of(recorder.load(tmp_path)[0]) == 900
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line
        == f"left out: {tmp_path}/earlier/ringreduce_rank_0 is older than another dump of rank 0"
    )


def fail_in_a_sweep(me: Rank, last: int) -> None:
    dist.all_reduce(torch.ones(3))
    if me.rank == last:
        dist.reduce(torch.ones(100), 0)
    dist.all_reduce(torch.ones(100))


def test_jobs_of_a_sweep_share_a_folder(
    pool: Pool, world: MakeWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the first one left is moved as a whole, and torch reads both."""

    def run(size: int) -> dict[int, dict[str, Any]]:
        group, begun = world(size, timeout=8.0, DUMP=str(tmp_path)), time.time_ns()
        call = pool.start(fail_in_a_sweep, group, size - 1, remade=True)
        expect_all(call.outcomes(), set(), "Mismatch", {size - 1})
        return await_dumps(tmp_path, set(range(size)), begun)

    first = run(3)
    (meeting,) = {dump["ringreduce"]["groups"]["0"]["meeting"] for dump in first.values()}
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    second = run(2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "earlier", "ringreduce_rank_0", "ringreduce_rank_1"
    }  # fmt: skip
    aside = tmp_path / "earlier" / meeting
    assert {path.name for path in aside.iterdir()} == {f"rank_{rank}" for rank in range(3)}
    capsys.readouterr()
    for folder, dumps in ((tmp_path, second), (aside, first)):
        cause, _, _ = explained(folder)
        ranks = ranks_text(range(len(dumps) - 1))
        assert f"{ranks} called all_reduce" in cause, cause
        again = recorder.load(folder)
        assert {r: time_of(d) for r, d in again.items()} == {
            r: time_of(d) for r, d in dumps.items()
        }
        assert "has errors" in traced(folder)
    assert "left out what ranks 0-2 of job " in capsys.readouterr().err


def dump_beside(me: Rank, folder: str) -> str:
    with pytest.raises(FileExistsError) as raised:
        ringreduce.dump_records(folder)
    return str(raised.value)


def test_a_dump_waits_for_no_fifo(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ringreduce_rank_0")
    os.mkfifo(tmp_path / "ringreduce_rank_1")
    os.utime(tmp_path / "ringreduce_rank_1", (1, 1))
    (text,) = pool.start(dump_beside, world(1), str(tmp_path), remade=True).results()
    assert text.startswith(f"{tmp_path}/ringreduce_rank_0 is no file")


def test_only_older_dumps_of_other_jobs_make_way(tmp_path: Path) -> None:
    """Those of ranks that fail with this one need not be read."""
    old = [met(a_dump(rank, 900), 32 * text) for rank, text in enumerate("aaba")]
    save(tmp_path, *old)
    (tmp_path / "ringreduce_rank_9").write_bytes(b"damaged")
    for rank in (1, 2, 9):
        os.utime(tmp_path / f"ringreduce_rank_{rank}", (1, 1))
    observer._save(str(tmp_path / "ringreduce_rank_0"), met(a_dump(0, 950), 32 * "b"))
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {f"ringreduce_rank_{rank}" for rank in (0, 2, 3, 9)}
    assert {path.name for path in (tmp_path / "earlier" / (32 * "a")).iterdir()} == {
        "rank_0",
        "rank_1",
    }


def test_two_jobs_that_fail_at_once_lose_nothing(tmp_path: Path) -> None:
    meet = threading.Barrier(2)

    def run(text: str) -> None:
        for number in range(40):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            meet.wait(30.0)
            path = tmp_path / str(number) / "ringreduce_rank_0"
            observer._save(str(path), met(a_dump(0, 900), 32 * text))

    jobs = [threading.Thread(target=run, args=(text,)) for text in "ab"]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    for number in range(40):
        paths = (tmp_path / str(number)).rglob("*rank_0")
        found = {observer.meetings_of(observer.read(path))[0][0] for path in paths}
        assert found == {"a", "b"}, number


# ---- messages and queued operations


def a_record(kind: str, number: int, begun: int, root: int = -1, state: str = "done") -> Record:
    done = begun + 50 if state == "done" else 0
    return Record(
        index=number, sequence=number, kind=kind, dtype="float32", op="", bytes=12, root=root,
        step=0, bucket=0, posted_ns=max(begun, 1), arrived_ns=begun, first_data_ns=begun,
        done_ns=done, first_ns=begun, median_ns=begun, late=(), known=1, clock_error_ns=0,
        algorithm="", in_place=False, codec="", state=state,
    )  # fmt: skip


def write_dumps(
    patch: pytest.MonkeyPatch,
    folder: Path,
    records: list[list[Record]],
    messages: list[list[Record]],
) -> None:
    """As ranks of one group write them, at 10 s of the clock."""
    table = {b"%d" % n: found for n, found in enumerate(records + messages)}
    patch.setattr(observer, "parse", table.__getitem__)
    size = len(records)
    for rank in range(size):
        group = observer._Group(
            "0", "default_pg", "a" * 32, list(range(size)), rank,
            b"%d" % rank, b"%d" % (rank + size), (0, 0), False, 60_000,
        )  # fmt: skip
        about = a_dump(rank, 10**10)["ringreduce"] | {"version": "1", "world_size": size}
        save(folder, observer._document([group], about))


def test_messages_are_compared_with_their_other_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's analyser too, in a group of which most ranks take no part."""
    records = [[a_record("barrier", n, 100 * n + 1) for n in (0, 1)] for _ in range(3)]
    send, receive = a_record("send", 0, 20, 2), a_record("recv", 0, 30, 0)
    back = a_record("send", 0, 120, 0), a_record("recv", 0, 120, 2)
    write_dumps(monkeypatch, tmp_path, records, [[send, back[1]], [], [receive, back[0]]])
    first = recorder.load(tmp_path)[0]["entries"][1]
    assert (first["profiling_name"], first["is_p2p"]) == ("nccl:send 0->1", True)
    assert first["p2p_seq_id"] == first["ringreduce"]["sequence"] == 0
    assert first["ringreduce"]["root"] == 2
    text = traced(tmp_path)
    assert not re.search("error|mismatch|missing|Not all ranks", text, re.IGNORECASE), text
    assert recorder.find(recorder.load(tmp_path)) is None

    waits = a_record("recv", 1, 300, 0, "running")
    write_dumps(monkeypatch, tmp_path, records, [[send], [], [receive, waits]])
    cause, last, where = explained(tmp_path)
    assert cause == (
        "Message #1, recv (float32, 3 elements, from rank 0), of group '0' (default_pg) of ranks "
        "0-2 holds rank 2."
    )
    assert "ank 2 was in recv #1 from rank 0 for 10 s" in last
    assert where.startswith("Look at rank 0, pid 7 on h")
    text = traced(tmp_path)
    assert "Not all ranks joining collective, sequence number: 1" in text
    assert "missing ranks: {0}" in text


def test_an_operation_that_waits_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that is in a message is blamed, and what it waits for is told."""
    records = [[a_record("barrier", 0, 200, state="running")] for _ in range(3)]
    records[1] = [a_record("barrier", 0, 0, state="queued")]
    write_dumps(monkeypatch, tmp_path, records, [[], [], []])
    entry = recorder.load(tmp_path)[1]["entries"][0]
    assert (entry["state"], entry["retired"]) == ("scheduled", False)
    assert entry["time_discovered_started_ns"] is None
    cause, last, _ = explained(tmp_path)
    assert cause.startswith("Rank 1 did not come in time to operation #0 of group '0'")
    assert "rank 1 had called barrier #0, which waits for an earlier one." in last

    waits = a_record("recv", 0, 100, 0, "running")
    write_dumps(monkeypatch, tmp_path, records, [[], [waits], []])
    cause, last, _ = explained(tmp_path)
    assert cause.startswith("Rank 1 did not come in time to operation #0 of group '0'")
    assert "rank 1 was in recv #0 from rank 0 for 10 s." in last


# ---- damaged files

VALUES: list[Any] = [
    None, True, -1, 7, 1 << 62, 1 << 64, 1 << 2000, 1.5, float("nan"), "", "x" * 5000, "\udcff",
    "[0, 1", b"\x00", [], [[[]]], {}, {"rank": "0"}, (), ("0", "default_pg"), {"0": 7},
]  # fmt: skip


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """The containers in a value, each with its keys."""
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    here = [(value, key) for key in keys]
    return here + [place for key in keys for place in places_of(value[key])]


def damaged_values(draw: random.Random, data: bytes) -> bytes:
    """Types swapped, keys missing, of another name or of another type."""
    document = pickle.loads(data)
    for _ in range(draw.choice((1, 1, 1, 5))):
        container, key = draw.choice(places_of(document))
        kind = draw.randrange(4) if isinstance(container, dict) else 0
        if kind < 2:
            container[key] = copy.deepcopy(draw.choice(VALUES))
        elif key in container:
            value = container.pop(key)
            if kind == 2:
                container[draw.choice([1, None, ("a", 1), "other"])] = value
    return pickle.dumps(document)


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bits flipped, parts missing, twice or overwritten."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 4, 40))):
        at = draw.randrange(len(changed))
        part = slice(at, at + draw.randrange(1, 9))
        kind = draw.randrange(8)
        if kind < 4:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 4:
            changed[part] = b""
        elif kind == 5:
            changed[part] = draw.randbytes(8)
        elif kind == 6:
            changed[at:at] = changed[part]
        else:
            changed[part] = draw.choice([b"r\xff\xff\xff\x7f", b"\x96" + b"\0" * 3 + b"\x02"])
    return bytes(changed[: draw.randrange(len(changed))] if draw.randrange(8) == 0 else changed)


def test_no_damage_breaks_the_reader(
    pool: Pool, world: MakeWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.start(call_another, world(3, timeout=8.0, DUMP=str(tmp_path)), remade=True).outcomes()
    await_dumps(tmp_path, {0, 1, 2})
    sound = {path: path.read_bytes() for path in tmp_path.iterdir()}
    draw = random.Random(7)
    statuses = []
    for number in range(600):
        for path, data in sound.items():
            if draw.randrange(3):
                data = draw.choice((damaged_bytes, damaged_values))(draw, data)
            path.write_bytes(data)
        begun = time.monotonic()
        statuses.append(recorder.main([str(tmp_path)]))
        assert time.monotonic() - begun < 5.0, number
        out, err = capsys.readouterr()
        assert (len(out.splitlines()) in (2, 3)) == (statuses[-1] < 2), (number, out)
        assert all(line.isprintable() for line in (out + err).splitlines()), (number, out, err)
    assert set(statuses) >= {0, 2}


class Loud:
    def __reduce__(self) -> Any:
        return print, ("an object was made",)


def nested(depth: int) -> bytes:
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


def laughing(levels: int) -> Any:
    """Small in memory; as text, or as a key, of 10 ** levels parts."""
    value: Any = ("ha",)
    for _ in range(levels):
        value = (value,) * 10
    return value


def with_key(levels: int) -> bytes:
    """A dict whose key is like `laughing`."""
    tuples = b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(levels))
    return b"\x80\x04)\x94" + tuples + b"}h%cNs." % levels


STRANGERS: dict[str, tuple[Any, str]] = {
    "a FIFO": (os.mkfifo, "is a FIFO, not a file"),
    "a folder": (os.mkdir, "is a folder, not a file"),
    "a socket": (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "cannot be read"),
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read: Too many"),
    "an empty file": (b"", "is no dump of ringreduce"),
    "text": (b"rank 1 was here\n", "is no dump of ringreduce"),
    "another program's": (pickle.dumps({"rank": 1}), "lacks 'pg_config'"),
    "another kind": (pickle.dumps([1, 2]), "is no dump of ringreduce"),
    "an object": (pickle.dumps({"entries": [Loud()]}), "has an object of builtins.print"),
    "nested lists": (nested(200_000), "is no dump of ringreduce"),
    "a huge memo": (b"\x80\x04]r\xff\xff\xff\xef.", "is no dump of ringreduce"),
    "huge bytes": (b"\x80\x04\x96\0\0\0\0\x10\0\0\0.", "is no dump of ringreduce"),
    "a huge text": (pickle.dumps(a_dump(1, 900, host=laughing(40))), "host is (("),
    "a huge key": (with_key(40), "is no dump of ringreduce"),
    "another rank's": (pickle.dumps(a_dump(0, 950)), "is of rank 0, not of rank 1"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_file_that_is_no_dump_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    what, why = STRANGERS[name]
    path = tmp_path / "ringreduce_rank_1"
    path.write_bytes(what) if isinstance(what, bytes) else what(path)
    assert recorder.main([str(tmp_path)]) == 2
    assert "no rank has left a dump that can be read" in capsys.readouterr().err
    save(tmp_path, a_dump(0, 900, ("barrier", "running", 5)))
    assert recorder.main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert f"{path} {why}" in err or (why in err and str(path) in err), err
    assert len(err.splitlines()) == 1
    assert "holds rank 0, and rank 1 left no dump." in out


def test_a_file_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, a_dump(0, 900, ("barrier", "running", 5)), a_dump(1, 900))
    (tmp_path / "ringreduce_rank_1").chmod(0)
    assert recorder.main([str(tmp_path)]) == 0
    if os.geteuid():
        assert "ringreduce_rank_1 cannot be read: Permission denied" in capsys.readouterr().err


def test_damaged_entries_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is blamed for not having come where the record may be one of those."""
    calls = ("barrier", "done", 5), ("all_gather", "running", 100)
    dumps = [a_dump(rank, 900, *calls) for rank in (0, 1)]
    dumps[1]["entries"][1]["ringreduce"]["state"] = 7
    save(tmp_path, *dumps)
    found = recorder.find(recorder.load(tmp_path))
    assert found is not None and found.ranks == ()
    err = capsys.readouterr().err
    assert re.search(r"1 of 2 records are left out of \S+_1: entries\[1\]\S+state is 7", err), err
