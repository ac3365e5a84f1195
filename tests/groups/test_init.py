"""The ways in which a group comes to be (env://, file://, tcp://, torchrun, mp.spawn), and again.

The scripts are whole processes that never import ringreduce: `import torch` finds the backend.
"""

from __future__ import annotations

import random
import signal
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, run_ranks
from processes import free_port

BODY = r"""
    import os, sys
    import torch
    import torch.distributed as dist


    def work(**how):
        dist.init_process_group("ringreduce", **how)
        t = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(t)
        dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True).wait()
        dist.barrier()
        assert dist.get_backend() == "ringreduce"
        dist.destroy_process_group()
        sys.stdout.write(f"sum {float(t[0])}\n")  # one write: ranks may share a pipe
        sys.stdout.flush()
"""


def write(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(BODY) + textwrap.dedent(source))
    return path


def test_scripts(tmp_path: Path) -> None:
    """By env://, the default; test_tutorials.py has the other methods."""
    script = write(tmp_path, "work()")
    for done in run_ranks(script, 2):
        assert (done.returncode, done.stdout) == (0, "sum 3.0\n"), done.stderr


def remake(me: Rank, path: str, kind: str, times: int) -> list[float]:
    """Makes the group again and again on one store, each rank at its own pace."""
    draw, sums = random.Random(me.rank), []
    for k in range(times):
        if kind == "file":
            store: dist.Store = dist.FileStore(path, 3)
        else:
            store = me.store(path)
        time.sleep(draw.random() * 0.05)
        limit = timedelta(seconds=20)
        dist.init_process_group(me.backend, store=store, rank=me.rank, world_size=3, timeout=limit)
        t = torch.full((100,), float(k))
        dist.all_reduce(t)
        time.sleep(draw.random() * 0.05)
        dist.destroy_process_group()
        sums.append(float(t[0]))
    return sums


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_made_again_on_the_same_store(
    pool: Pool, world: MakeWorld, tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / "store") if kind == "file" else pool.name("again")
    call = pool.start(remake, world(0), path, kind, 10, ranks=3)
    assert call.results() == [[3.0 * k for k in range(10)]] * 3


def test_made_again_without_a_launchers_store(tmp_path: Path) -> None:
    """Ranks that make their next group before rank 0 has destroyed the last one find it there."""
    script = write(
        tmp_path,
        """
        import datetime, socket, time

        rank = int(os.environ["RANK"])
        for k in range(8):
            dist.init_process_group("ringreduce", timeout=datetime.timedelta(seconds=30))
            # Finds no address of the last one, although the store is the same.
            beside = dist.new_group(backend="gloo")
            for group in (None, beside):
                t = torch.full((100,), float(rank + k))
                dist.all_reduce(t, group=group)
                assert t[0].item() == 3 + 3 * k, (k, t[0])
            if k % 2 == 0 and rank == 0:
                time.sleep(0.1)
            dist.destroy_process_group()
            if k % 3 == 1 and rank == 0:
                time.sleep(1)  # the others wait there for longer than an unused store is kept
        del group, beside  # refer to the store
        while rank == 0:  # it is not kept for ever
            time.sleep(0.02)
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    s.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
                    break
                except OSError:
                    pass
        """,
    )
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    for done in run_ranks(script, 3, env):
        assert done.returncode == 0, done.stderr


def serve_store(me: Rank) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    me.tell(server.port)
    me.hear(60)


def outlive_the_store(me: Rank, port: int) -> float:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(me.backend, store=store, rank=me.rank, world_size=3)
    me.tell("joined")
    me.hear(30)  # the store's process is gone now
    t = torch.ones(70_000)
    for _ in range(3):
        dist.all_reduce(t)
    dist.all_reduce(t, async_op=True).wait()
    dist.broadcast(t, 2)
    dist.all_gather([torch.empty(4) for _ in range(3)], torch.ones(4))
    dist.barrier()
    dist.destroy_process_group()
    return float(t[0])


def test_the_store_may_go_away(pool: Pool, world: MakeWorld) -> None:
    server = pool.start(serve_store, world(0), ranks=1, fresh=True)
    call = pool.start(outlive_the_store, world(0), server.heard(0), ranks=3)
    call.hear_all()
    server.signal(0, signal.SIGKILL)
    server.outcomes()
    call.tell_all()
    assert call.results() == [81.0] * 3
