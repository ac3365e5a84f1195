"""Dumps of records: what torch's `torchfrtrace` and `python -m ringreduce.recorder` say of them."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
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
from ringreduce.observe import recorder

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


def await_dumps(folder: Path, ranks: set[int]) -> dict[int, dict[str, Any]]:
    names = {f"ringreduce_rank_{rank}" for rank in ranks}
    until = time.monotonic() + 30.0
    while time.monotonic() < until and not names <= {p.name for p in folder.iterdir()}:
        time.sleep(0.05)
    dumps = recorder.load(folder)
    assert dumps.keys() == ranks
    return dumps


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
    assert re.search(
        r"ranks 0 and 1 called all_reduce \(float32, 100 elements, SUM\) and waited for 2\S* s",
        cause,
    )
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


def test_an_error_of_the_program(tmp_path: Path) -> None:
    """The rank that fails on its own leaves a dump too, though no group raises there."""
    script, folder = tmp_path / "train.py", tmp_path / "dumps"
    script.write_text(
        textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        dist.init_process_group("ringreduce")

        def train():
            dist.all_reduce(torch.ones(3))
            if dist.get_rank() == 1:
                raise ValueError("no more data")
            dist.all_reduce(torch.ones(100))

        train()
        """)
    )
    done = run_ranks(script, 2, {"RINGREDUCE_DUMP": str(folder)})
    assert [process.returncode for process in done] == [1, 1]
    assert "ValueError: no more data" in done[1].stderr
    assert f"its records are in {folder}/ringreduce_rank_0" in done[0].stderr
    cause, _, where = explained(folder)
    assert cause == "Rank 1 ended with ValueError: no more data."
    assert f"in train ({script}:" in where


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
    assert len(set(kinds)) == 12, kinds
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


def a_dump(rank: int, now: int, *calls: tuple[str, str, int]) -> dict[str, Any]:
    """Of a group of two ranks at a time of day; calls are kinds, states and when they began."""
    common = {"dtype": "float32", "elements": 3, "op": "", "codec": "", "root": -1, "posted_ns": 1}
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "ringreduce": common
            | {"sequence": n, "kind": kind, "state": state, "arrived_ns": begun, "done_ns": begun},
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
    about |= {"stacks": {}, "libraries": [], "groups": {"0": clock}}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"pg_config": config, "entries": entries, "ringreduce": about}


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


def test_dumps_of_an_earlier_attempt_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dumps = [a_dump(0, 900, ("barrier", "running", 5)), a_dump(1, 400, ("barrier", "failed", 6))]
    dumps[0]["ringreduce"]["attempt"] = 1
    for rank, dump in enumerate(dumps):
        (tmp_path / f"ringreduce_rank_{rank}").write_bytes(pickle.dumps(dump))
    assert list(recorder.load(tmp_path)) == [0]
    assert "left out the dumps of rank 1" in capsys.readouterr().err
    assert "rank 1 left no dump" in explained(tmp_path)[0]


def test_a_dump_with_objects_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ringreduce_rank_0").write_bytes(pickle.dumps({"entries": [Path("/")]}))
    with pytest.raises(ValueError, match="ringreduce_rank_0 is no dump of ringreduce"):
        recorder.load(tmp_path)
    assert recorder.main([str(tmp_path)]) == 2
