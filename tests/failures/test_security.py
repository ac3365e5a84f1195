"""Nobody else on the machine can join a group, or read, write or truncate its memory.

As root, the stranger is a process of another user; in any case there is one of the same user that
does not know the group's secret.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank
from processes import wait_until

pytestmark = pytest.mark.skipif(
    os.environ.get("RINGREDUCE_WIRE") == "tcp",
    reason="of shared memory; of the way in over TCP it is tests/cpp/net_acceptor_test.cc",
)

NOBODY = 65534
PR_SET_DUMPABLE = 4
F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1034, 0x2, 0x4


def listening(pid: int) -> list[str]:
    """The abstract Unix sockets on which a process listens, without their leading NUL."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        inodes |= set(re.findall(r"socket:\[(\d+)\]", link))
    names = []
    with open("/proc/net/unix") as f:
        for line in list(f)[1:]:
            word = line.split()
            # Flags 00010000: it accepts connections.
            if len(word) > 7 and word[6] in inodes and word[3] == "00010000" and word[7][0] == "@":
                names.append(word[7][1:])
    return names


def knock(me: Rank, names: list[str], uid: int, says: bytes) -> list[str]:
    """Connects to the sockets as user `uid`, says something, and tells what came back."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Else the stranger's own directory in /proc belongs to root, a change of scene only.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
    answers = []
    for name in names:
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            s = socket.socket(socket.AF_UNIX, kind)
            s.settimeout(1.0)
            try:
                s.connect("\0" + name)
                if says:
                    s.sendall(says)
                data, fds, _, _ = socket.recv_fds(s, 4096, 16)
                answers.append(f"{len(data)} bytes, {len(fds)} fds")
            except TimeoutError:
                answers.append("silence")
            except OSError as error:
                if error.errno not in (errno.EPROTOTYPE, errno.EPROTONOSUPPORT):
                    answers.append(f"refused: {error}")
            me.tell(answers[-1] if answers else "")
    return answers


def join(me: Rank, key: str) -> float:
    me.world_size = 2
    if me.rank == 1:
        me.hear()
    me.init(key)
    t = torch.full((100_000,), float(me.rank + 1))
    dist.all_reduce(t)
    assert bool((t == 3).all())
    me.tell("joined")
    me.hear()
    dist.all_reduce(t)
    return float(t[0])


STRANGERS = [
    pytest.param(NOBODY, b"hello", id="another user", marks=pytest.mark.root),
    pytest.param(NOBODY, b"", id="another user, silent", marks=pytest.mark.root),
    pytest.param(0, b"hello", id="same user, wrong secret"),
    pytest.param(0, b"say=hello\nsecret=\nrank=1\nsize=2\nversion=1\n", id="same user, no secret"),
    pytest.param(0, b"\xff" * 4000, id="same user, noise"),
    pytest.param(0, b"", id="same user, silent"),
]


@pytest.mark.parametrize(("uid", "says"), STRANGERS)
def test_a_stranger_cannot_join(pool: Pool, world: MakeWorld, uid: int, says: bytes) -> None:
    """While rank 0 waits for rank 1, and again when the group is whole."""
    call = pool.start(join, world(0), pool.name("door"), ranks=2)
    pids = [worker.pid for worker in call.workers]
    assert wait_until(lambda: bool(listening(pids[0]))), "rank 0 listens nowhere"
    doors = listening(pids[0])
    stranger = pool.start(knock, world(0), doors, uid, says, ranks=1, fresh=True)
    answers = stranger.results()[0]
    assert answers, "the stranger found no door: this test tests nothing"
    assert all("bytes" not in a or a == "0 bytes, 0 fds" for a in answers), answers
    call.tell(1)
    for rank in range(2):
        assert call.heard(rank) == "joined"  # with its own peer, and with right sums
    doors = [name for pid in pids for name in listening(pid)]
    if doors:
        again = pool.start(knock, world(0), doors, uid, says, ranks=1, fresh=True)
        answers = again.results()[0]
        assert all("bytes" not in a or a == "0 bytes, 0 fds" for a in answers), answers
    call.tell_all()
    assert call.results() == [6.0] * 2


def test_a_silent_stranger_does_not_hold_up_the_group(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(join, world(0), pool.name("door"), ranks=2)
    pid = call.workers[0].pid
    assert wait_until(lambda: bool(listening(pid)))
    held = []
    for name in listening(pid):
        for _ in range(5):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            s.connect("\0" + name)
            held.append(s)
    began = time.monotonic()
    call.tell(1)
    assert call.heard(0) == call.heard(1) == "joined"
    assert time.monotonic() - began < 8.0
    call.tell(0), call.tell(1)
    assert call.results() == [6.0] * 2
    for s in held:
        s.close()


def own_segments() -> Iterator[str]:
    """Paths of this process's shared memory: by descriptor where one is open, else by mapping."""
    for folder in ("/proc/self/fd", "/proc/self/map_files"):
        for entry in os.listdir(folder):
            path = f"{folder}/{entry}"
            try:
                if "/memfd:ringreduce" in os.readlink(path):
                    yield path
            except OSError:
                continue


def try_to_resize(me: Rank) -> list[tuple[int, str]]:
    found = []
    for path in own_segments():
        fd = os.open(path, os.O_RDWR)
        seals = fcntl.fcntl(fd, F_GET_SEALS)
        said = ""
        for size in (0, os.fstat(fd).st_size + 4096):
            try:
                os.ftruncate(fd, size)
                said = "resized"
            except PermissionError:
                pass
        os.close(fd)
        found.append((seals, said))
    dist.barrier()
    return found


@pytest.mark.root
def test_the_memory_is_sealed(pool: Pool, world: MakeWorld) -> None:
    """A stranger's ftruncate would be a SIGBUS in every rank."""
    for found in pool.run(try_to_resize, world(3)):
        assert len(found) >= 3, "one's own and two peers'"
        for seals, said in found:
            assert seals & F_SEAL_SHRINK and seals & F_SEAL_GROW, hex(seals)
            assert not said


def hold(me: Rank, uid: int, key: str) -> list[str]:
    """A rank that runs as user `uid`."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # as for any process that was started by that user
    me.world_size = 2
    me.init(key)
    t = torch.ones(100)
    dist.all_reduce(t)
    with open("/proc/self/maps") as f:
        ranges = [line.split()[0] for line in f if "/memfd:ringreduce" in line]
    me.tell(ranges)
    me.hear()
    dist.all_reduce(t)
    return [str(float(t[0]))]


def pry(me: Rank, pid: int, ranges: list[str], uid: int) -> list[str]:
    """Tries every way that /proc offers into another process's memory; returns what opened."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    opened, paths = [], [f"/proc/{pid}/mem"]
    paths += [f"/proc/{pid}/map_files/{r}" for r in ranges]
    paths += [f"/proc/{pid}/fd/{n}" for n in range(64)]
    for path in paths:
        for flags in (os.O_RDONLY, os.O_RDWR):
            try:
                os.close(os.open(path, flags))
                opened.append(path)
            except OSError:
                continue
    return opened


@pytest.mark.root
def test_another_user_cannot_open_the_memory(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(hold, world(0), 12345, pool.name("hold"), ranks=2, fresh=True)
    ranges = [call.heard(rank) for rank in range(2)]
    assert ranges[0] and ranges[1]
    for rank in range(2):
        pid = call.workers[rank].pid
        stranger = pool.start(pry, world(0), pid, ranges[rank], NOBODY, ranks=1, fresh=True)
        assert stranger.results() == [[]]
    # The same hands do open it for its owner: the paths are right.
    owner = pool.start(pry, world(0), call.workers[0].pid, ranges[0], 12345, ranks=1, fresh=True)
    assert owner.results()[0]
    call.tell(0), call.tell(1)
    assert call.results() == [["4.0"], ["4.0"]]


def mixed_users(me: Rank, key: str) -> None:
    if me.rank == 1:
        os.setresuid(NOBODY, NOBODY, NOBODY)
    me.world_size = 2
    me.init(key, timeout=5.0)


@pytest.mark.root
def test_ranks_of_two_users_are_refused(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(mixed_users, world(0), pool.name("users"), ranks=2, fresh=True)
    for outcome in call.outcomes():
        message = getattr(outcome, "message", "")
        assert re.search(r"(?i)\buser", message) and re.search(r"\brank 1\b", message), outcome
