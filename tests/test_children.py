"""Ranks with children (DataLoader workers, forked processes), ranks that become another program
(exec), and kernels and sandboxes without pidfds: the end of a rank is noticed all the same.

A forked child keeps its parent's descriptors open, so a killed rank's sockets do not close.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import time

import pytest
import torch
import torch.distributed as dist
from blame import expect_all
from conftest import MakeWorld
from pool import Died, Done, Pool, Rank
from processes import alive, wait_until
from test_failures import add_up, left_over
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset[torch.Tensor]):
    """Numbers, made in a worker process."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(float(i * i))


def train_with_workers(me: Rank, how: str) -> None:
    """All-reduces what a DataLoader's worker made; tells the test the pids of its children."""
    if how == "plain fork":
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        try:
            me.tell([child])
            while True:
                dist.all_reduce(torch.ones(1000))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=how)
    batches = iter(loader)
    for k, batch in enumerate(batches):
        dist.all_reduce(batch)
        if k == 2:
            me.tell([w.pid for w in batches._workers])  # type: ignore[attr-defined]
    raise AssertionError("the data ended")


@pytest.mark.parametrize(("how", "victim"), [("fork", 1), ("spawn", 0), ("plain fork", 1)])
def test_a_killed_rank_whose_child_lives_on(
    pool: Pool, world: MakeWorld, how: str, victim: int
) -> None:
    call = pool.start(train_with_workers, world(3), how)
    children = [call.heard(rank, timeout=60.0) for rank in range(3)]
    time.sleep(0.05)
    killed = call.signal(victim, signal.SIGKILL)
    call.await_end(range(3), 15.0)
    orphan = alive(children[victim][0])
    outcomes = call.outcomes()
    assert isinstance(outcomes[victim], Died)
    for raised in expect_all(outcomes, {victim}, "PeerLost", {victim}):
        assert raised.when - killed <= 10.0, f"took {raised.when - killed:.3f} s"
    if how == "plain fork":
        assert orphan, "the child was to outlive its parent: this test tests nothing"
        os.kill(children[victim][0], signal.SIGKILL)
    assert pool.run(add_up, world(3)) == [6.0] * 3
    for rank in set(range(3)) - {victim}:
        assert wait_until(lambda rank=rank: not alive(children[rank][0]), 10.0), "a child is left"
    for found in pool.start(left_over, world(0), ranks=3).results():
        assert all(state != "Z" for _, state in found["children"]), found


def feed(me: Rank) -> float:
    """Workers that are started after the group neither use it nor disturb it at their end."""
    total = torch.zeros(1)
    for _ in range(2):
        loader = DataLoader(
            Squares(), batch_size=1000, num_workers=2, multiprocessing_context="fork", timeout=30
        )
        for batch in loader:
            part = batch.sum().reshape(1)
            dist.all_reduce(part)
            total += part
    return float(total)


def test_workers_come_and_go(pool: Pool, world: MakeWorld) -> None:
    first, second = pool.run(feed, world(2))
    assert first == second > 0
    assert pool.run(add_up, world(2)) == [3.0] * 2


def without_pidfds() -> None:
    """From now on the kernel refuses them to this thread, as old kernels and sandboxes do."""
    pidfd_open, solsocket_peerpidfd = 434, 77
    getsockopt = {"x86_64": 55, "aarch64": 209}[platform.machine()]
    load, jump_if, give = 0x20, 0x15, 0x06  # BPF: a word of seccomp_data; if equal; the verdict
    refuse, allow = 0x00050000, 0x7FFF0000
    steps = [
        (load, 0, 0, 0),
        (jump_if, 3, 0, pidfd_open),
        (jump_if, 0, 3, getsockopt),
        (load, 0, 0, 16 + 2 * 8),  # the option
        (jump_if, 0, 1, solsocket_peerpidfd),
        (give, 0, 0, refuse | errno.EPERM),
        (give, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())  # seccomp
    with pytest.raises(PermissionError):
        os.pidfd_open(os.getpid())


def reduce_until_lost(me: Rank, prefix: str, ending: str, pidfds: str) -> float:
    """Rank 0 ends amid all-reduces.  Where the others go on, returns when they did."""
    if pidfds == "refused":
        without_pidfds()
    me.init(prefix, size=3)
    for k in range(10**9):
        t = torch.ones(1000)
        dist.all_reduce(t)
        if t[0] < 3:
            return time.monotonic()
        if k == 3:
            me.tell(time.monotonic())
            if me.rank == 0 and ending == "exec":
                os.execv("/bin/sleep", ["sleep", "1.5"])
    raise AssertionError("rank 0 was not missed")


@pytest.mark.parametrize(
    ("ending", "pidfds", "on_loss"),
    [
        ("kill", "refused", "error"),
        ("exec", "there", "error"),
        ("exec", "refused", "continue"),
    ],
)
def test_the_end_of_a_program_is_noticed_without_a_pidfd(
    pool: Pool, world: MakeWorld, ending: str, pidfds: str, on_loss: str
) -> None:
    unled = world(0, ON_LOSS=on_loss)
    call = pool.start(reduce_until_lost, unled, pool.name(), ending, pidfds, ranks=3, fresh=True)
    ended = max(call.heard(rank) for rank in range(3))
    if ending == "kill":
        ended = call.signal(0, signal.SIGKILL)
    outcomes = call.outcomes()
    assert isinstance(outcomes[0], Died), outcomes
    if on_loss == "continue":
        noticed = [o.value for o in outcomes if isinstance(o, Done)]
        assert len(noticed) == 2, outcomes
    else:
        says = r"called exec \(" if ending == "exec" else "its process ended"
        noticed = [r.when for r in expect_all(outcomes, {0}, "PeerLost", {0}, says)]
    assert max(noticed) - ended <= 5.0, f"took {max(noticed) - ended:.3f} s"
