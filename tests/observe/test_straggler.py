"""Records of operations, and who is named for being late: by simulated jobs, and by real groups."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from hosts import Hosts, why_not
from pool import Pool, Rank, World, on_ranks
from processes import come_to_rest, wait_until
from ranks import pids_of_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import _C
from ringreduce.observe.late import (
    Arrival,
    Cause,
    CpuPressure,
    Judge,
    Late,
    Lines,
    Seen,
    Wait,
    of_root,
)
from ringreduce.observe.record import UNKNOWN, Record

MS = 1_000_000

# ---- simulated jobs: no time passes

STEP_MS, BUCKETS, RANKS = 20, 4, 4
HOSTS = dict(enumerate("aabb"))
Delay = Callable[[int, int, int], float]  # of a step, a bucket and a rank: ms
Wire = Callable[[int, int], float]  # of a step and a bucket: ms


def no_delay(step: int, bucket: int, rank: int) -> float:
    return 0.0


def usual_wire(step: int, bucket: int) -> float:
    return 0.5


def job(
    steps: int, delay: Delay, wire: Wire = usual_wire, noise_ms: float = 0.05, seed: int = 1
) -> Iterator[Seen]:
    """What rank 0 sees, of ranks whose delays have a long tail."""
    draw = random.Random(seed)
    now = 1_000_000 * MS
    index = 0
    for step in range(steps):
        for bucket in range(BUCKETS):
            now += STEP_MS * MS // BUCKETS
            came = sorted(
                (
                    now
                    + int((draw.lognormvariate(0, 0.7) * noise_ms + delay(step, bucket, r)) * MS),
                    r,
                )
                for r in range(RANKS)
            )
            median = came[(RANKS - 1) // 2][0]
            arrived = next(time for time, r in came if r == 0)
            now = came[-1][0] + int((wire(step, bucket) + draw.random() * 0.05) * MS)
            record = Record(
                index=index,
                sequence=index,
                kind="all_reduce",
                dtype="float32",
                op="SUM",
                bytes=1 << 20,
                root=-1,
                step=step,
                bucket=bucket,
                posted_ns=arrived,
                arrived_ns=arrived,
                first_data_ns=arrived,
                done_ns=now,
                first_ns=came[0][0],
                median_ns=median,
                late=(),
                causes=(),
                why=None,
                known=RANKS,
                clock_error_ns=0,
                algorithm="direct",
                in_place=False,
                codec="",
                state="done",
            )
            late = [Arrival(r, float(time - median), None) for time, r in came[:0:-1][:3]]
            waits = [Wait(0, arrived if came[-1][1] != 0 else median, came[-1][0])]
            yield Seen(
                "0",
                "group '0'",
                record,
                arrived,
                now,
                RANKS,
                RANKS,
                median,
                0,
                late,
                waits,
                HOSTS,
                range(RANKS),
            )
            index += 1


def judged(operations: Iterator[Seen]) -> Judge:
    judge = Judge()
    for operation in operations:
        judge.feed(operation)
    return judge


FREQUENT: dict[str, tuple[int, Delay, set[int]]] = {
    "25 of 100": (100, lambda s, b, r: 100.0 * (r == 2 and b == 0 and s % 4 == 3), {2}),
    "24 of 480": (480, lambda s, b, r: 100.0 * (r == 1 and b == 3 and s % 20 == 7), {1}),
    "in turns": (500, lambda s, b, r: 50.0 * (b == 1 and r == (1, 3)[s % 2]), {1, 3}),
    "of two ranks, in turns": (250, lambda s, b, r: 50.0 * (b == 1 and r == (0, 1)[s % 2]), {0, 1}),
    "from 20 to 90 ms": (300, lambda s, b, r: (20.0 + s % 8 * 10) * (r == 2 and b == s % 4), {2}),
}


@pytest.mark.parametrize("noise_ms", [0.05, 0.5])
@pytest.mark.parametrize("which", FREQUENT)
def test_frequent_delays_are_named_and_add_up(which: str, noise_ms: float) -> None:
    steps, delay, late = FREQUENT[which]
    seen = list(job(steps, delay, noise_ms=noise_ms))
    judge = judged(iter(seen))
    assert {x.rank for x in judge.late} == late
    share = sum(judge.waited[rank] for rank in late) / sum(judge.waited.values())
    assert share > 0.7  # the rest are waits for this rank, and noise
    # The sums are what was waited, once.
    waited = sum(wait.end - wait.begin for one in seen for wait in one.waits)
    assert sum(judge.waited.values()) == pytest.approx(waited)
    text = "\n".join(judge.summary())
    assert f"{waited / 1e6:.1f} ms of waiting" in text and "no rank" not in text


def test_waits_at_the_same_time_are_one() -> None:
    judge = Judge()
    for one, group in itertools.product(job(100, no_delay), "ab"):
        judge.feed(dataclasses.replace(one, group=group))
    once = judged(job(100, no_delay))
    assert sum(judge.waited.values()) == pytest.approx(sum(once.waited.values()))


def test_a_wait_that_begins_before_another_and_ends_after_it_counts_once() -> None:
    """A wait of 60 ms for rank 3, that of 1 ms for rank 2 in another group lies in it."""
    judge = Judge()
    pattern = next(job(1, no_delay))
    for step in range(100):
        begin = step * 100.0 * MS
        for group, late, since, until in (("b", 2, 55, 56), ("a", 3, 0, 60)):
            waits = [Wait(0, begin + since * MS, begin + until * MS)]
            arrival = [Arrival(late, float((until - since) * MS), None)]
            judge.feed(dataclasses.replace(pattern, group=group, late=arrival, waits=waits))
    assert judge.waited[2] == pytest.approx(100 * MS)
    assert judge.waited[3] == pytest.approx(5900 * MS)


def passed_on(seen: Seen, cause: Cause) -> Seen:
    last, *others = seen.late
    return dataclasses.replace(seen, late=[last._replace(cause=cause), *others])


def test_a_rank_that_had_waited_elsewhere_is_not_named() -> None:
    judge = Judge()
    for seen in job(300, lambda s, b, r: 60.0 * (r == 2 and b == 0 and s % 10 == 9)):
        late = seen.late[0].delay > 50 * MS
        judge.feed(passed_on(seen, Cause(7, 58 * MS, "all_reduce #12 of row 0")) if late else seen)
    assert {x.rank for x in judge.late} == {7} and len(judge.late) > 15
    assert judge.waited[7] == pytest.approx(30 * 58 * MS) and judge.waited[2] < 100 * MS
    assert "rank 2 came 6" in str(judge.late[0])
    assert "since it had waited 58.0 ms for rank 7 in all_reduce #12 of row 0" in str(judge.late[0])


def test_a_delay_that_began_with_an_unknown_rank_names_nobody() -> None:
    judge = Judge()
    for seen in job(300, lambda s, b, r: 60.0 * (r == 2 and b == 0 and s % 10 == 9)):
        late = seen.late[0].delay > 50 * MS
        judge.feed(passed_on(seen, Cause(UNKNOWN, 58 * MS, "")) if late else seen)
    assert judge.late == [] and judge.persistent() == {} and judge.unknown > 15
    assert "began elsewhere" in "\n".join(judge.summary())


def test_what_all_had_waited_excuses_nobody() -> None:
    """As after an operation in which most ranks of a ring waited for one that they did not see."""
    judge = Judge()
    cause = Cause(UNKNOWN, 50 * MS, "")
    for seen in job(300, lambda s, b, r: 60.0 * (r == 2 and b == 0 and s % 10 == 9)):
        if seen.late[0].delay > 50 * MS:
            waits = [wait._replace(cause=cause) for wait in seen.waits]
            seen = dataclasses.replace(passed_on(seen, cause), waits=waits)
        judge.feed(seen)
    assert {late.rank for late in judge.late} == {2} and judge.unknown == 0


@pytest.mark.parametrize("kind", ["broadcast", "scatter", "reduce", "gather"])
def test_of_a_rooted_operation_those_that_can_delay_others_are_late(kind: str) -> None:
    record = dataclasses.replace(next(job(1, no_delay)).record, kind=kind, root=4)
    # The root is late, and four others come after it.
    late = [Arrival(rank, float(24 - rank), None) for rank in range(5)]
    since, found = of_root(record, 4, 120.0, 100.0, late)
    if kind in ("broadcast", "scatter"):
        assert (since, found) == (100.0, [Arrival(4, 20.0, None)])
    else:
        assert since == 120.0
        assert found == [Arrival(0, 4.0, None), Arrival(1, 3.0, None), Arrival(2, 2.0, None)]
    assert of_root(dataclasses.replace(record, kind="barrier"), -1, 0.0, 1.0, late)[1] == late[:3]


def test_nobody_is_named_and_the_summary_says_why() -> None:
    text = "\n".join(judged(job(300, no_delay)).summary())
    assert re.search(r"no rank was late.*the longest delay was 0\.\d ms", text), text
    assert "do not tell what is usual" in "\n".join(judged(job(3, no_delay)).summary())


@pytest.mark.parametrize("late_ms", [50.0, 5.0])
def test_a_rank_that_is_late_once_is_named_with_step_and_bucket(late_ms: float) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        at = (draw.randrange(100, 1000), draw.randrange(BUCKETS), draw.randrange(RANKS))
        judge = judged(job(1000, lambda *where, at=at: late_ms * (where == at), seed=seed))
        assert [(x.record.step, x.record.bucket, x.rank) for x in judge.late] == [at]
        assert judge.late[0].late_ms == pytest.approx(late_ms, abs=1)
        assert judge.late[0].explains >= 0.8
        assert judge.wires == [] and judge.persistent() == {}


def test_two_ranks_that_are_late_at_once_are_both_named() -> None:
    judge = judged(job(300, lambda s, b, r: 30.0 * (s == 200 and b == 1 and r in (1, 3))))
    assert sorted(late.rank for late in judge.late) == [1, 3]


@pytest.mark.parametrize("noise_ms", [0.005, 0.05, 0.5, 3.0])
def test_nobody_is_named_in_a_clean_run(noise_ms: float) -> None:
    for seed in range(2):
        judge = judged(job(1000, no_delay, noise_ms=noise_ms, seed=seed))
        assert (judge.late, judge.wires, judge.persistent()) == ([], [], {})


def test_a_rank_that_is_a_little_late_in_each_step_is_named_for_the_run() -> None:
    judge = judged(job(1000, lambda s, b, r: 0.35 * (r == 2 and b == 3)))
    assert judge.late == []
    ((rank, found),) = judge.persistent().items()
    assert rank == 2 and found.last_in > 0.8 and 0.01 < found.cost < 0.02


@pytest.mark.parametrize("noise_ms", [0.05, 0.5])
def test_a_rank_that_is_late_now_and_again_is_named_for_the_run(noise_ms: float) -> None:
    late = job(600, lambda s, b, r: 40.0 * (r == 1 and b == 0 and s % 10 == 3), noise_ms=noise_ms)
    ((rank, found),) = judged(late).persistent().items()
    assert rank == 1 and found.steps >= 59
    assert found.of_waits > 0.8 and 0.1 < found.cost < 0.2


@pytest.mark.parametrize("in_turn, named", [((1, 2, 1, 2, 3), set()), ((1, 2, 1, 2, 1), {1, 2})])
def test_ranks_that_are_named_for_the_run_stand_out(
    in_turn: tuple[int, ...], named: set[int]
) -> None:
    """It takes more than to be among those that have most of the waits together."""
    late = job(400, lambda s, b, r: 5.0 * (b == 0 and r == in_turn[s % len(in_turn)]))
    assert judged(late).persistent().keys() == named


def test_a_rank_of_all_groups_that_are_seen_is_not_named_for_that() -> None:
    """Rank 0, which sees all this, is in both groups of two: by chance half of all waits are for
    it.  Of the long ones 40 % are, and 55 % are for rank 2."""

    def last(step: int) -> int:
        return 0 if step % 20 < 8 else 2 if step % 20 < 19 else 1

    judge = Judge()
    for seen in job(600, lambda s, b, r: 5.0 * (b == 0 and r == last(s))):
        step = seen.record.step
        other = last(step) or 1 + step % 2
        judge.feed(dataclasses.replace(seen, group=other, ranks=(0, other)))
    assert judge.persistent() == {}


def pipeline(steps: int, late_ms: Callable[[int], float]) -> Iterator[Seen]:
    """Of each step three messages and an all-reduce, to which rank 1 comes 8 ms after rank 0 since
    it has waited for rank 2, which may be late."""
    for seen in job(steps, lambda s, b, r: (8.0 + late_ms(s)) * (r == 1)):
        record, late = seen.record, late_ms(seen.record.step)
        where = f"message #{record.index} of group '0'"
        seen = passed_on(seen, Cause(2, round((6 + late) * MS), where))
        if record.bucket < BUCKETS - 1:
            record = dataclasses.replace(record, kind="recv", root=1)
            seen = dataclasses.replace(seen, group="1", record=record, size=2, known=2)
        yield seen


def test_waits_that_are_planned_name_nobody() -> None:
    judge = judged(pipeline(200, lambda s: 0.0))
    assert judge.late == [] and judge.persistent() == {}
    judge = judged(pipeline(200, lambda s: 40.0 * (s % 5 == 3)))
    assert {x.rank for x in judge.late} == {2} and judge.persistent().keys() == {2}


def test_few_messages_do_not_tell_what_is_usual() -> None:
    assert judged(pipeline(20, lambda s: 2.5 * (s == 12))).late == []
    assert judged(pipeline(60, lambda s: 2.5 * (s == 52))).late != []


def test_messages_of_one_step_take_no_more_memory() -> None:
    judge = Judge()
    for seen in pipeline(1000, lambda s: 0.0):
        judge.feed(dataclasses.replace(seen, record=dataclasses.replace(seen.record, step=0)))
    places = judge._groups["1"].at_place
    assert 100 < len(places) <= 1024


@on_ranks(1)
def test_it_can_be_entered_again(rank: Rank) -> None:
    detection = ringreduce.straggler_detection()
    for entries in (1, 2):
        with detection as sd:
            for _ in range(100):
                dist.all_reduce(torch.ones(1))
        assert sd.summary().startswith(f"{entries * 100} operations")


def test_a_rank_that_comes_late_since_a_line_is_slow_is_not_named_for_the_run() -> None:
    """From step 100 on, transfers take 60 ms, and rank 0 comes 20 ms late from each."""
    late = job(
        400,
        lambda s, b, r: 20.0 * (r == 0 and s >= 100),
        lambda s, b: 60.0 if s >= 100 else 0.5,
    )
    assert judged(late).persistent() == {}


def test_a_few_long_delays_are_chance() -> None:
    for late_steps in ([300], range(0, 600, 40)):  # once for long, and 15 times
        long = 5000.0 if len(late_steps) == 1 else 100.0
        judge = judged(
            job(600, lambda s, b, r, at=late_steps, ms=long: ms * (r == 1 and b == 0 and s in at))
        )
        assert judge.persistent() == {}


def test_a_slow_wire_is_no_late_rank() -> None:
    judge = judged(job(500, no_delay, lambda s, b: 40.0 if s >= 300 and b == 2 else 0.5))
    assert judge.late == []
    assert len(judge.wires) >= 1
    first = judge.wires[0]
    assert (first.record.step, first.record.bucket) == (300, 2)
    assert first.took_ms == pytest.approx(40, abs=1) and first.usual_ms < 1


def test_the_slow_line_of_a_sender_is_named() -> None:
    lines = Lines({1: "rank 1 on host b", 2: "rank 2 on host c"})
    sums = {1: [0, 0.0, 0], 2: [0, 0.0, 0]}

    def goes_by(seconds: float, rates: dict[int, tuple[float, float]], resent: int = 0) -> None:
        """For each rank: MB/s while busy, and the share of that time."""
        nonlocal at
        for rank, (rate, busy) in rates.items():
            sums[rank][0] += int(rate * 1e6 * busy * seconds)
            sums[rank][1] += busy * seconds
            sums[rank][2] += resent if rank == 1 else 0
        at += int(seconds * 1e9)
        lines.add(at, [(rank, size, busy, again) for rank, (size, busy, again) in sums.items()])

    at = 0
    goes_by(0.1, {1: (100, 0.3), 2: (100, 0.3)})
    begin = at
    goes_by(0.1, {1: (10, 1.0), 2: (100, 0.1)})
    assert lines.slow(begin, at) == ""  # nothing is usual yet
    for _ in range(30):
        goes_by(0.1, {1: (100, 0.3), 2: (100, 0.3)})
    begin = at
    goes_by(0.1, {1: (20, 0.9), 2: (95, 0.1)}, resent=7)
    assert lines.slow(begin, at) == (
        "the line to rank 1 on host b moved 20.0 MB/s, 100.0 usually, and sent 7 packets again"
    )
    assert lines.slow(begin - 100 * MS, begin) == ""
    begin = at
    goes_by(0.1, {1: (20, 0.2), 2: (95, 0.1)})  # slow, but nobody waited long for it
    assert lines.slow(begin, at) == ""
    begin = at
    goes_by(0.1, {1: (90, 1.0), 2: (95, 1.0)})  # it had more to move
    assert lines.slow(begin, at) == ""


def test_ranks_whose_host_has_no_core_for_them_are_not_named() -> None:
    class Starved(CpuPressure):
        def waited(self, begin: float, end: float) -> float:
            return end - begin

    judge = Judge(Starved())
    for seen in job(300, lambda s, b, r: 50.0 * ((s, b, r) == (200, 0, 1))):
        judge.feed(seen)
    assert judge.late == [] and [late.rank for late in judge.starved] == [1]


# ---- real groups


def trained(me: Rank, late: int, at: tuple[int, int], hook: bool) -> tuple[str, set[str], set[str]]:
    """Trains, late once; returns the summary and who was late, with the step.

    The third are those that are blamed for more than 0.5 s; a busy machine causes less.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
    if hook:
        ringreduce.register_comm_hook(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    x = torch.randn(8, 256)
    now = -1

    def wait(gradient: torch.Tensor) -> torch.Tensor:
        if now == at[0] and me.rank == late:
            time.sleep(2.5)
        return gradient

    list(model.children())[at[1]].weight.register_hook(wait)
    with ringreduce.straggler_detection() as sd:
        for now in range(60):  # noqa: B007
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        begun = ringreduce.records()[0].step

    def shown(found: list[Late]) -> set[str]:
        return {f"{x.rank} {x.record.step - begun}" for x in found}

    blamed = [x for x in sd.late if x.late_ms > 500]
    return sd.summary(), shown(sd.late + sd._judge.starved), shown(blamed)


@pytest.mark.parametrize("stock", ["ringreduce", "gloo"])
def test_a_rank_that_is_late_in_training_is_named(pool: Pool, stock: str) -> None:
    call = pool.start(trained, World(3, stock), 1, (50, 2), stock == "gloo")
    for summary, late, blamed in call.results():
        assert "1 50" in late, summary
        assert blamed <= {"1 50"}, summary
    assert re.search(r"rank 1 came .* late to all_reduce", call.log(0)) or "core" in summary


def late_in_each_step(me: Rank) -> tuple[list[int], str]:
    with ringreduce.straggler_detection() as sd:
        for _ in range(60):
            if me.rank == 1:
                time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            _C.count_training_step()
    return list(sd.persistent), sd.summary()


def test_a_rank_sees_that_it_is_late_itself(pool: Pool, world: MakeWorld) -> None:
    """All that it waits itself, it waits for others."""
    for named, summary in pool.run(late_in_each_step, world(2)):
        assert named == [1], summary


def late_in_a_subgroup(me: Rank) -> None:
    group = dist.new_group([1, 2])
    if me.rank == 0:
        return
    x = torch.ones(100)
    pids = pids_of_ranks(group)
    with ringreduce.straggler_detection(group) as sd:  # type: ignore[arg-type]
        for i in range(100):
            if i == 90 and me.rank == 2:
                assert come_to_rest(pids[0])
                time.sleep(1.0)
            dist.all_reduce(x, group=group)
    named = {late.rank for late in sd.late + sd._judge.starved if late.late_ms > 900}
    assert named == {2}, sd.summary()


def test_a_rank_is_named_by_its_global_rank(pool: Pool, world: MakeWorld) -> None:
    pool.run(late_in_a_subgroup, world(3))


def recorded(me: Rank) -> list[Record]:
    x = torch.ones(1000)
    for _ in range(3):
        dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(x, 1)
    dist.barrier()
    assert wait_until(lambda: ringreduce.records()[-1].state == "done", 20.0)
    records = ringreduce.records()
    assert ringreduce.records(since=records[3].index)[0] == records[3]
    return records


def test_records_say_what_ran_and_when(pool: Pool, world: MakeWorld) -> None:
    for rank, records in enumerate(pool.start(recorded, world(2), remade=True).results()):
        kinds = [r.kind for r in records]
        assert kinds == ["all_reduce"] * 4 + ["broadcast", "barrier"]
        for i, r in enumerate(records):
            assert r.index == i and r.state == "done"
            assert r.posted_ns <= r.arrived_ns <= r.done_ns
            assert r.known >= 1 and {x for x, _ in r.late} <= {0, 1}
        assert (records[0].dtype, records[0].op, records[0].bytes) == ("float32", "SUM", 4000)
        assert records[0].root == -1 and records[4].root == 1
        assert records[0].algorithm in ("direct", "twoshot", "ring", "bruck")
        assert records[5].dtype == "" and records[5].algorithm == ""
        assert [r.bucket for r in records[:4]] == [0, 1, 2, 3], rank


# ---- clocks of hosts

CLOCKS = """
import json, sys, time
import torch, torch.distributed as dist
import ringreduce
from ringreduce.core.backend import backend_of, extension
dist.init_process_group("ringreduce")
rank = dist.get_rank()
x = torch.ones(10)
backend = backend_of(dist.group.WORLD)
found = []
for call in range(80):
    dist.all_reduce(x)
    time.sleep(0.05)
    found.append(extension().clock_offset(backend))
if rank == 1:
    time.sleep(0.4)
dist.all_reduce(x)
last = ringreduce.records()[-1]
print(json.dumps([found, last.late, last.clock_error_ns]))
dist.destroy_process_group()
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_clocks_of_hosts_are_known_within_the_bound_that_is_told(tmp_path: Path) -> None:
    """Rank 1's clock is 1,000.01 s ahead, and packets take 25 ms each way."""
    ahead = 1_000_010_000_000
    probe = ["unshare", "--time", "--fork", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs time namespaces")
    script, shifted = tmp_path / "rank.py", tmp_path / "shifted.py"
    script.write_text(CLOCKS)
    shifted.write_text(SHIFTED % {"ahead": ahead})
    with Hosts(2, delay_ms=25) as hosts:
        start = (
            f'if [ {{rank}} = 1 ]; then exec "$0" {shifted} {script}; else exec "$0" {script}; fi'
        )
        job = hosts.start(["bash", "-c", start, sys.executable])
        outcomes = job.wait(90)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    said = [json.loads(o.output[o.output.index("[[[") :].splitlines()[0]) for o in outcomes]
    for rank, (found, late, error) in enumerate(said):
        true = ahead if rank == 1 else 0
        known = [(offset, bound) for offset, bound in found if bound >= 0]
        assert len(known) >= 40
        assert all(abs(offset - true) <= bound for offset, bound in known)
        assert known[-1][1] < 27 * MS  # half of the round trip, and drift
        if late:
            assert late[0][0] == 1 and late[0][1] == pytest.approx(400 * MS, abs=error + 50 * MS)
    assert any(late for _, late, _ in said)


# In a time namespace of its own.
SHIFTED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWTIME = 0x80
assert libc.unshare(CLONE_NEWTIME) == 0, ctypes.get_errno()
seconds, nanos = divmod(%(ahead)d, 10**9)
with open("/proc/self/timens_offsets", "w") as offsets:
    offsets.write(f"monotonic {seconds} {nanos}\\n")
child = os.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
