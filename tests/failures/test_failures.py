"""Ranks that are killed, stopped, late or interrupted: the others say so, name them, and go on."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect, expect_all
from conftest import MakeWorld
from pool import Call, Died, Done, Outcome, Pool, Raised, Rank
from processes import asleep, wait_until

ALGORITHMS = ("auto", "ring", "direct", "twoshot")


def loop_forever(me: Rank, n: int, style: str) -> None:
    """All-reduces until something happens; tells the test once they flow."""
    t = torch.ones(n)
    for k in range(10**9):
        if style == "async":
            dist.all_reduce(t, async_op=True).wait()
        elif style == "mixed" and k % 3 == 1:
            dist.broadcast(t, k % me.world_size)
        elif style == "mixed" and k % 3 == 2:
            dist.barrier()
        else:
            dist.all_reduce(t, op=dist.ReduceOp.MAX)
        if k == 3:
            me.tell("flowing")


def add_up(me: Rank) -> float:
    """What a whole group gives, and a proof that the process can go on."""
    t = torch.full((1000,), float(me.rank + 1))
    dist.all_reduce(t)
    return float(t[0])


def left_over(me: Rank) -> dict[str, Any]:
    """What the process still holds after its group is gone."""
    if dist.is_initialized():
        dist.destroy_process_group()
    children = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
            state, parent = f.read().rsplit(")", 1)[1].split()[:2]
            if int(parent) == os.getpid():
                children.append((int(pid), state))
    with open("/proc/self/maps") as f:
        maps = sum("/memfd:ringreduce" in line for line in f)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "fds": len(os.listdir("/proc/self/fd")),
        "children": children,
        "maps": maps,
    }


def in_shared_memory() -> set[str]:
    """What lies in /dev/shm, but for what DataLoaders of tests beside this one have there."""
    return {n for n in os.listdir("/dev/shm") if not n.startswith(("sem.", "torch_"))}


def test_sigkill_amid_all_reduces(pool: Pool, world: MakeWorld, full: bool) -> None:
    """Every other rank raises within a second and names the dead one; 100 times of 100."""
    draw = random.Random()
    shm = in_shared_memory()
    # torch's profiler keeps the group that its first run saw: what was there before is not ours.
    before = pool.start(left_over, world(0), ranks=4).results()
    mapped = {worker.pid: before[rank]["maps"] for rank, worker in pool.workers.items() if rank < 4}
    base: dict[int, dict[str, Any]] = {}
    soon = 1.0 if full else 10.0  # other programs may hold up the short form
    for trial in range(100 if full else 8):
        size, n = draw.choice([2, 3, 4]), draw.choice([1, 1000, 70_000, 1_000_000])
        victim, style = draw.randrange(size), draw.choice(["blocking", "async", "mixed"])
        group = world(size, ALGORITHM=draw.choice(ALGORITHMS))
        case = f"trial {trial}: rank {victim} of {size}, {n} elements, {style}, {group.env}"
        call = pool.start(loop_forever, group, n, style)
        call.hear_all("flowing")
        time.sleep(draw.random() * 0.05)
        killed = call.signal(victim, signal.SIGKILL)
        outcomes = call.outcomes()
        assert outcomes[victim] == Died(victim, -signal.SIGKILL), case
        for raised in expect_all(outcomes, {victim}, "PeerLost", {victim}):
            assert raised.when - killed <= soon, f"{case}: took {raised.when - killed:.3f} s"
            assert re.search(r"(all_reduce|broadcast|barrier) #\d+", raised.message), case
        wanted = float(sum(range(1, size + 1)))
        assert pool.run(add_up, world(size)) == [wanted] * size, case
        for rank, found in enumerate(pool.start(left_over, world(0), ranks=size).results()):
            pid = pool.workers[rank].pid
            assert found["children"] == [], f"{case}: {found}"
            assert found["maps"] == mapped.get(pid, 0), f"{case}: {found}"
            if rank != victim:
                first = base.setdefault(pid, found)
                assert found == first, f"{case}: rank {rank} holds more than it did"
    assert in_shared_memory() <= shm


def arrive_late(me: Rank, late: int, call: str) -> None:
    dist.all_reduce(torch.ones(3))
    if me.rank == late:
        me.hear()
    me.tell(time.monotonic())
    if call == "async":
        dist.all_reduce(torch.ones(1024), async_op=True).wait()
    elif call == "commit":
        import ringreduce

        dist.all_reduce(torch.ones(1024), async_op=True)
        ringreduce.commit()
    elif call == "barrier":
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1024))


@pytest.mark.parametrize(
    ("size", "late", "call"),
    [
        (4, 2, "all_reduce"),
        (3, 1, "async"),
        (3, 0, "barrier"),
        (2, 1, "commit"),
    ],
)
def test_a_rank_that_never_arrives(
    pool: Pool, world: MakeWorld, size: int, late: int, call: str
) -> None:
    deadline = 2.0  # making the group must not take longer, on a busy machine either
    job = pool.start(arrive_late, world(size, timeout=deadline), late, call, remade=True)
    job.await_end(set(range(size)) - {late}, 60.0)
    job.tell(late)
    outcomes = job.outcomes()
    name = "barrier" if call == "barrier" else "all_reduce"
    for raised in expect_all(outcomes, {late}, "Timeout", {late}, says=rf"{name} #1\b"):
        waited = raised.when - job.heard(raised.rank)
        assert deadline - 0.1 <= waited <= deadline + 8.0, f"{waited} s on rank {raised.rank}"
    expect(outcomes[late], "Error", {late})  # the late one learns it too, at once
    assert outcomes[late].when - job.heard(late) < 8.0  # type: ignore[union-attr]
    assert pool.run(add_up, world(size)) == [float(sum(range(1, size + 1)))] * size


@pytest.mark.parametrize(("size", "algorithm"), [(2, "direct"), (4, "ring"), (4, "twoshot")])
def test_sigstop_amid_an_all_reduce(
    pool: Pool, world: MakeWorld, size: int, algorithm: str
) -> None:
    """A Timeout names the end of the chain: who stopped, not who waits for him."""
    victim = 1
    group = world(size, timeout=3.0, ALGORITHM=algorithm)
    job = pool.start(loop_forever, group, 500_000, "blocking")
    job.hear_all()
    stopped = job.signal(victim, signal.SIGSTOP)
    job.await_end(set(range(size)) - {victim}, 60.0)
    job.signal(victim, signal.SIGCONT)
    outcomes = job.outcomes()
    for raised in expect_all(outcomes, {victim}, "Timeout", {victim}):
        assert 2.0 <= raised.when - stopped <= 15.0
    expect(outcomes[victim], "Error", {victim})
    assert pool.run(add_up, world(size)) == [float(sum(range(1, size + 1)))] * size


def go_on(me: Rank, call: str) -> Any:
    """Checked calls until the test says that it is enough."""
    size, patience = me.world_size, timedelta(seconds=2)
    for k in range(10**9):
        t = torch.full((20_000,), float(me.rank))
        t[0] = float(me.rank == 0 and me.conn.poll(0))  # the test's word
        if call == "messages":
            works = [dist.isend(t[1:], (me.rank + 1) % size)]
            got = torch.empty(t.numel() - 1)
            works.append(dist.irecv(got, (me.rank - 1) % size))
            for work in works:
                work.wait(patience)
            assert bool((got == (me.rank - 1) % size).all())
        dist.all_reduce(t, async_op=True).wait(patience)
        assert bool((t[1:] == sum(range(size))).all())
        if t[0]:
            return None if me.rank else me.hear()
        if k == 3:
            me.tell("flowing")
    return None


@pytest.mark.parametrize("wire", ["memory", "tcp"])
@pytest.mark.parametrize("call", ["all_reduce", "messages"])
def test_a_job_that_is_stopped_as_a_whole_goes_on(
    pool: Pool, world: MakeWorld, wire: str, call: str
) -> None:
    """For longer than all timeouts, as by Ctrl-Z and fg; its ranks go on one after the other."""
    size = 3
    group = world(size, timeout=2.0, **({"WIRE": "tcp"} if wire == "tcp" else {}))
    job = pool.start(go_on, group, call)
    job.hear_all()
    for rank in range(size):
        job.signal(rank, signal.SIGSTOP)
    time.sleep(3.0)
    for rank in range(size):
        job.signal(rank, signal.SIGCONT)
        time.sleep(0.2)
    job.tell(0)
    job.results()


def test_the_log_names_who_is_missing(pool: Pool, world: MakeWorld) -> None:
    """Long before any deadline, on standard error."""
    group = world(3, STALL_SECONDS="0.5")
    job = pool.start(arrive_late, group, 1, "all_reduce", remade=True)

    def named(rank: int) -> list[set[int]]:
        said = job.log(rank).splitlines()
        lines = [line for line in said if "waited" in line and "all_reduce #1" in line]
        return [blamed(line.split(": ", 1)[1]) for line in lines]

    # On a busy machine the first line may name a rank that is a little late as well.
    assert wait_until(lambda: all({1} in named(rank) for rank in (0, 2)))
    time.sleep(1.1)  # in which a flood would come
    job.tell(1)
    job.results()
    for rank in (0, 2):
        assert all(1 in ranks for ranks in named(rank)), job.log(rank)
        assert len(named(rank)) <= 4, "the log is flooded"


def wait_for_ever(me: Rank, call: str) -> None:
    if me.rank == 1:
        me.hear()
        return
    me.tell("waiting")
    if call == "barrier":
        dist.barrier()
    elif call == "wait":
        dist.all_reduce(torch.ones(8), async_op=True).wait()
    elif call == "many":
        works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(10)]
        works[-1].wait()
    elif call == "commit":
        import ringreduce

        dist.all_reduce(torch.ones(8), async_op=True)
        ringreduce.commit()
    else:
        dist.all_reduce(torch.ones(8))


def wait_inside_torch(me: Rank, call: str) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)
    loss = ddp(torch.ones(1, 4)).sum()
    if me.rank == 1:
        me.hear()
        return
    me.tell("waiting")
    try:
        if call == "future":
            dist.all_reduce(torch.ones(8), async_op=True).get_future().wait()
        else:
            loss.backward()
    except dist.DistBackendError:  # the wait's end; Python comes to Ctrl-C next
        for _ in range(100):
            time.sleep(0.05)


def signal_a_wait(job: Call, number: int) -> tuple[float, list[Outcome]]:
    """A signal for rank 0 once it waits; rank 1 is told to end after it.  When, and what came."""
    job.heard(0)
    time.sleep(0.3)
    assert wait_until(lambda: asleep(job.workers[0].pid)), "rank 0 does not wait"
    sent = job.signal(0, number)
    job.await_end([0], 60.0)
    job.tell(1)
    return sent, job.outcomes()


def press_ctrl_c(pool: Pool, world: MakeWorld, job: Call) -> None:
    """Rank 0, which waits, hears Ctrl-C soon; rank 1 ends when told; both stay of use."""
    pressed, (interrupted, other) = signal_a_wait(job, signal.SIGINT)
    assert isinstance(interrupted, Raised) and interrupted.isa("KeyboardInterrupt"), interrupted
    assert interrupted.when - pressed < 10.0
    assert isinstance(other, Done)
    assert pool.run(add_up, world(2)) == [3.0] * 2


@pytest.mark.parametrize("call", ["future", "backward"])
def test_ctrl_c_ends_a_wait_inside_torch(pool: Pool, world: MakeWorld, call: str) -> None:
    """There no Python runs, so it is the group's worker that gives up, after a second."""
    job = pool.start(wait_inside_torch, world(2), call)
    press_ctrl_c(pool, world, job)


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "wait", "many", "commit"])
def test_ctrl_c_ends_a_wait(pool: Pool, world: MakeWorld, call: str) -> None:
    job = pool.start(wait_for_ever, world(2), call)
    press_ctrl_c(pool, world, job)


def leave_in_turn(me: Rank, n: int) -> str:
    """All-reduces until a rank dies; then leaves the group and ends, each rank at its own time."""
    me.tell(os.getpid())
    message = ""
    try:
        loop_forever(me, n, "mixed")
    except dist.DistBackendError as error:
        message = f"{type(error).__name__}: {error}"
    time.sleep(random.random() * 0.05)
    if me.rank % 2:
        dist.destroy_process_group()
    me.tell(message)
    os._exit(0)


def test_no_rank_ever_names_a_survivor(pool: Pool, world: MakeWorld, full: bool) -> None:
    """Survivors that leave one after the other look dead too; the blame must stay right."""
    for trial in range(30 if full else 4):
        size, victim = 4, trial % 4
        group = world(size, ALGORITHM=ALGORITHMS[trial % 4])
        job = pool.start(leave_in_turn, group, 10_000, fresh=True)
        job.hear_all()
        job.hear_all("flowing")
        job.signal(victim, signal.SIGKILL)
        for rank in set(range(size)) - {victim}:
            message = job.heard(rank)
            assert message.startswith("PeerLost"), f"trial {trial}, rank {rank}: {message}"
            assert blamed(message) == {victim}, f"trial {trial}, rank {rank}: {message}"
        job.outcomes()


def late_learners(me: Rank, victim: int) -> list[str]:
    """Rank 0 comes to its next operation only after the others have failed and left."""
    dist.all_reduce(torch.ones(4))
    if me.rank == victim:
        me.hear()  # once the first call has ended on all ranks
        os.kill(os.getpid(), signal.SIGKILL)
    me.tell("begun")
    if me.rank == 0:
        time.sleep(1.0)
    said = []
    for _ in range(2):  # and every later operation says the same
        try:
            dist.all_reduce(torch.ones(4))
        except dist.DistBackendError as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("victim", [1, 2])
def test_a_late_survivor_blames_the_dead(pool: Pool, world: MakeWorld, victim: int) -> None:
    call = pool.start(late_learners, world(3), victim)
    for rank in {0, 1, 2} - {victim}:
        call.heard(rank)
    call.tell(victim)
    for outcome in call.outcomes():
        if outcome.rank != victim:
            assert isinstance(outcome, Done), outcome
            assert [blamed(message) for message in outcome.value] == [{victim}] * 2, outcome
