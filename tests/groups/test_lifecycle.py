"""Groups end cleanly: nothing leaks, nothing runs on, and leaving early cuts nobody short."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks, run_ranks
from processes import wait_until

CONTRIBUTING = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def held() -> dict[str, int]:
    """What this process holds of what a group might leak."""
    with open("/proc/self/status") as f:
        status = dict(line.split(":", 1) for line in f)
    with open("/proc/self/maps") as f:
        shared = sum("/memfd:ringreduce" in line for line in f)
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "maps": shared,
        "rss": int(status["VmRSS"].split()[0]),
        "virtual": int(status["VmSize"].split()[0]),
    }


def make_many(me: Rank, count: int) -> tuple[dict[str, int], dict[str, int]]:
    first: dict[str, int] = {}
    for k in range(count + 30):
        if k == 30:
            first = held()
        group = dist.new_group()
        t = torch.ones(10)
        if k % 2:
            dist.all_reduce(t, group=group, async_op=True).wait()
        else:
            dist.all_reduce(t, group=group)
        assert float(t[0]) == me.world_size
        dist.destroy_process_group(group)
        del group
    return first, held()


def test_many_groups_leak_nothing(pool: Pool, world: MakeWorld, full: bool) -> None:
    count = 1000 if full else 100
    for first, last in pool.run(make_many, world(2), count, deadline=200.0):
        for what in ("fds", "threads", "maps"):
            assert last[what] <= first[what], f"{what}: {first} -> {last}"
        # torch itself keeps a few names a group; 12 KiB a group is far below one group's memory.
        assert last["rss"] - first["rss"] <= 12 * count + 4096, f"KiB: {first} -> {last}"
        assert last["virtual"] - first["virtual"] <= 12 * count + 70_000, f"{first} -> {last}"


def destroyed_and_held(me: Rank, name: str) -> tuple[Any, Any, list[Any]]:
    def now() -> dict[str, Any]:
        fds = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
        return {"fds": sorted(fds), **{what: held()[what] for what in ("threads", "maps")}}

    me.store("a connection that stays")
    before = now()
    me.init(name, size=2)
    kept = dist.group.WORLD
    assert kept is not None
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    assert now() != before
    dist.destroy_process_group()
    backend = kept._get_backend(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="destroyed"):
        backend.allreduce([torch.ones(1)]).wait()
    wait_until(lambda: now() == before)
    return before, now(), [work.is_completed(), backend._get_sequence_number_for_group()]


@pytest.mark.parametrize("wire", ["", "tcp"])
def test_destroy_releases_all_whoever_holds_the_group(
    pool: Pool, world: MakeWorld, wire: str
) -> None:
    options = {"WIRE": wire} if wire else {}
    call = pool.start(destroyed_and_held, world(0, **options), pool.name(), ranks=2)
    for before, after, known in call.results():
        assert after == before
        assert known == [True, 1]


@on_ranks(2)
def test_a_callback_may_destroy_its_own_group(me: Rank) -> None:
    before = len(os.listdir("/proc/self/task"))
    ended = threading.Event()

    def destroy(_: Any) -> None:
        dist.destroy_process_group()
        ended.set()

    dist.all_reduce(torch.ones(5), async_op=True).get_future().then(destroy)
    assert ended.wait(20), "destroying the group in its own callback hangs"
    assert wait_until(lambda: len(os.listdir("/proc/self/task")) <= before), "a thread stays"


def named_threads(me: Rank, name: str) -> set[str]:
    """The names of our threads while a group is used."""

    def names() -> set[str]:
        found = set()
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # that thread has ended
                found.add(path.read_text().strip())
        return {name for name in found if name.startswith("ringreduce")}

    me.init(name, size=2)
    x, other = torch.ones(1000), 1 - me.rank
    seen = set()
    for _ in range(3):
        received = dist.irecv(torch.empty(1000), other)
        works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(3)]
        works[-1].get_future().then(lambda _: time.sleep(0.05))
        time.sleep(0.02)
        dist.send(x, other)
        for work in (received, *works):
            work.wait()
        seen |= names()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("wire", ["", "tcp"])
def test_threads_have_the_names_in_the_table(pool: Pool, world: MakeWorld, wire: str) -> None:
    table = set(re.findall(r"^\| `(ringreduce[a-z0-9-]*)`", CONTRIBUTING.read_text(), re.MULTILINE))
    options = {"WIRE": wire} if wire else {"ON_LOSS": "continue"}
    call = pool.start(named_threads, world(0, **options), pool.name(), ranks=2)
    for names in call.results():
        assert "ringreduce" in names and names <= table, names


def blocked(me: Rank, seconds: float, call: str) -> tuple[float, float]:
    dist.barrier()
    if me.rank == 0:
        time.sleep(seconds)
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    if call == "barrier":
        dist.barrier()
    elif call == "wait":
        dist.all_reduce(torch.ones(100), async_op=True).wait()
    else:
        dist.all_reduce(torch.ones(100))
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return time.monotonic() - began, cpu


@pytest.mark.parametrize("call", ["barrier", "all_reduce", "wait"])
def test_a_waiting_rank_does_not_burn_a_core(
    pool: Pool, world: MakeWorld, full: bool, call: str
) -> None:
    seconds = 10.0 if full else 2.0
    for waited, cpu in pool.run(blocked, world(3), seconds, call)[1:]:
        assert waited > seconds / 2
        assert cpu < 0.1 * waited, f"{cpu} s of CPU in {waited} s"


# ---------------------------------------------------------------------------------------------
# Whole processes, which leave as processes do

HEAD = """
    import os, sys, threading, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("ringreduce")
    rank, size = dist.get_rank(), dist.get_world_size()
    t = torch.full((1000,), float(rank + 1))
    dist.all_reduce(t)
"""

WORK_LEFT_BEHIND = """
    kept = dist.all_reduce(t, async_op=True).wait()
    other = dist.new_group()
    dist.all_reduce(t, group=other, async_op=True).wait()
    dist.all_reduce(t, async_op=True).get_future().then(lambda f: None)
"""


def write(folder: Path, *parts: str) -> Path:
    path = folder / "script.py"
    path.write_text("".join(textwrap.dedent(part) for part in (HEAD, *parts)))
    return path


def test_exit_without_destroy(tmp_path: Path) -> None:
    script = write(tmp_path, WORK_LEFT_BEHIND)
    for done in run_ranks(script, 2):
        assert done.returncode == 0, done.stderr
        for bad in ("terminate", "abort", "Fatal", "Traceback", "destroy_process_group() failed"):
            assert bad not in done.stderr, done.stderr


DAEMON_IN_RECV = """
    def receive():
        try:
            while True:
                work = dist.isend(torch.ones(1000), 1 - rank)
                dist.recv(torch.zeros(1000), 1 - rank)
                work.wait()
        except dist.DistBackendError:
            return

    for _ in range(4):
        threading.Thread(target=receive, daemon=True).start()
    time.sleep(0.3)
"""


@pytest.mark.slow
def test_exit_with_daemon_threads_in_messages(tmp_path: Path) -> None:
    script = write(tmp_path, DAEMON_IN_RECV)
    for _ in range(2):  # without time to come back from C++ one in three or so ended with SIGABRT
        for done in run_ranks(script, 2):
            assert done.returncode == 0, done.stderr
            assert "terminate" not in done.stderr, done.stderr


SLOW_PEER = """
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if rank == 1:
        time.sleep(1.0)
    s = torch.full((n,), float(rank))
    {call}
    if rank == 1:
        print("got", float(s[0]), float(s[-1]))
"""


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("dist.broadcast(s, 0); dist.destroy_process_group() if rank == 0 else None", 0.0),
        (
            "work = dist.all_reduce(s, async_op=True); rank == 0 and dist.destroy_process_group()",
            1.0,
        ),
    ],
)
def test_a_slower_peer_finishes_what_was_posted(tmp_path: Path, call: str, wanted: float) -> None:
    script = write(
        tmp_path,
        SLOW_PEER.format(call=call),
        """
        if rank == 1 and "work" in globals():
            work.wait()
            print("then", float(s[0]))
        """,
    )
    first, second = run_ranks(script, 2)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert float(second.stdout.split()[-1]) == wanted, second.stdout


def test_fork_after_init_is_refused_in_the_child(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        kept = dist.all_reduce(t, async_op=True)
        kept.wait()
        pid = os.fork()
        if pid == 0:
            calls = {
                "blocking": lambda: dist.all_reduce(t),
                "async": lambda: dist.all_reduce(t, async_op=True).wait(),
                "barrier": lambda: dist.barrier(),
            }
            for name, call in calls.items():
                try:
                    call()
                    print(name, "was accepted", flush=True)
                except Exception as error:
                    print(name, "|", type(error).__name__, "|", error, flush=True)
            sys.exit(0)  # the interpreter's own exit: it must neither hang nor crash
        _, status = os.waitpid(pid, 0)
        print("child", status, flush=True)
        dist.all_reduce(t)
        print("parent", float(t[0]), flush=True)
        dist.destroy_process_group()
        """,
    )
    for done in run_ranks(script, 2):
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        for name in ("blocking", "async", "barrier"):
            said = next(line for line in lines if line.startswith(name))
            assert "fork" in said and "accepted" not in said, said
        assert "child 0" in lines, lines
        assert any(line.startswith("parent 1") or line == "parent 12.0" for line in lines), lines


@on_ranks(2)
def test_many_groups_at_once(me: Rank) -> None:
    before, count = held(), 40
    groups = [dist.new_group() for _ in range(count)]
    for group in groups:
        t = torch.ones(4)
        dist.all_reduce(t, group=group)
        dist.all_reduce(t, group=group, async_op=True).wait()
        assert float(t[0]) == me.world_size**2
    during = held()
    for group in groups:
        dist.destroy_process_group(group)
    after = held()
    assert after["fds"] <= before["fds"], (before, after)
    grown = {what: during[what] - before[what] for what in during}
    assert grown["fds"] <= count * 6 and grown["threads"] <= count * 2, grown


@on_ranks(2)
def test_pending_work_is_not_lost_at_exit_of_a_thread(me: Rank) -> None:
    t, works = torch.ones(10), []
    thread = threading.Thread(target=lambda: works.append(dist.all_reduce(t, async_op=True)))
    thread.start()
    thread.join()
    works[0].wait()
    assert t.eq(2).all(), t
