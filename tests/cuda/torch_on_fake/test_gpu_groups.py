"""Groups on the fake's GPUs over their lives: what they take and give back, with several of them,
several GPUs of one rank, functional collectives, and processes that leave without a word."""

from __future__ import annotations

import contextlib
import gc
import os
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conftest import MACHINES, Machine
from gpu_jobs import use_gpu
from pool import Rank, run_ranks


def held() -> tuple[int, int, list[str]]:
    gc.collect()
    torch.cuda.empty_cache()
    threads = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            threads.append(path.read_text().strip())
    return (
        torch.cuda.mem_get_info()[0],
        len(os.listdir("/proc/self/fd")),
        [name for name in threads if name != "fake stream"],  # torch has many streams, in turns
    )


def live_and_die(me: Rank, names: list[str]) -> list[tuple[int, int, list[str]]]:
    """What the process holds after each group's end."""
    device = use_gpu(me)
    seen = []
    for name in names:
        me.init(name, size=2)
        x = torch.ones(100_000, device=device)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_to_all_single(torch.empty_like(x), x)
        torch.cuda.synchronize()
        del x
        dist.destroy_process_group()
        deadline = time.monotonic() + 20  # threads unmap memory, and give it back
        ends = {"ringreduce-map", "ringreduce-free"}
        while not ends.isdisjoint(held()[2]) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(held())
    return seen


def test_groups_give_back_what_they_took(machine: Machine) -> None:
    names = [machine.pool.name() for _ in range(5)]
    call = machine.pool.start(live_and_die, machine.world(0), names, ranks=2, fresh=True)
    for seen in call.results(60):
        assert seen[1][0] == seen[4][0], f"memory: {seen}"
        assert seen[4][1] <= seen[1][1], f"descriptors: {seen}"
        assert len(seen[4][2]) <= len(seen[1][2]), f"threads: {seen}"


def by_functions(me: Rank) -> None:
    device = use_gpu(me)
    group = dist.group.WORLD
    assert group is not None
    x = torch.full((8,), me.rank + 1.0, device=device)
    size = me.world_size
    total = float(sum(range(1, size + 1)))
    assert (functional.all_reduce(x, "sum", group) + 1).cpu().tolist() == [total + 1] * 8
    gathered = functional.all_gather_tensor(x, 0, group) + 0
    assert gathered.cpu().tolist() == [r + 1.0 for r in range(size) for _ in range(8)]
    part = functional.reduce_scatter_tensor(gathered, "sum", 0, group) + 0
    assert part.cpu().tolist() == [size * (me.rank + 1.0)] * 8


def test_functional_collectives(machine: Machine) -> None:
    machine.run(by_functions, 2)


def two_gpus(me: Rank) -> None:
    """The first rank's second GPU is the second rank's first."""
    torch.cuda.set_device(0)
    count = torch.cuda.device_count()
    for turn in range(4):
        device = torch.device("cuda", (me.rank + turn) % count)
        x = torch.full((3000,), me.rank + 1.0, device=device)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x.cpu().tolist() == [3] * 3000
        assert torch.cuda.current_device() == 0


def test_a_rank_may_use_several_gpus(machine: Machine) -> None:
    machine.run(two_gpus, 2)


def in_pairs(me: Rank) -> float | str:
    """Two groups of two ranks, each with the same GPUs; what a kernel that waits did or said."""
    torch.cuda.set_device(me.rank % 2)
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][me.rank // 2]
    x = torch.ones(1000, device="cuda")
    try:
        dist.all_reduce(x, group=group)
    except ValueError as error:
        return str(error)
    return float(x.sum())


def test_ranks_of_other_groups_share_gpus_too(machine: Machine) -> None:
    env = {"RINGREDUCE_CUDA_ALGORITHM": "oneshot"}
    if machine.name != "four GPUs":
        env["FAKE_GPUS"] = "2"
    for said in machine.start(in_pairs, 4, fresh=True, **env).results():
        if machine.name == "one GPU":
            assert "share a GPU in turns" in str(said)
        else:
            assert said == 2000


SCRIPT = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("ringreduce")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    x = torch.ones(100_000, device="cuda")
    dist.all_reduce(x)
    for _ in range(20):
        work = dist.all_reduce(x, async_op=True)
    if {waits}:
        torch.cuda.synchronize()
        print(int(x[0]), flush=True)
    if {destroys}:
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("destroys", [True, False])
@pytest.mark.parametrize("name", ["one GPU", "four GPUs"])
def test_scripts_end(tmp_path: Path, name: str, waits: bool, destroys: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(waits=waits, destroys=destroys))
    for done in run_ranks(script, 2, MACHINES[name]):
        assert done.returncode == 0, done.stderr
        assert done.stdout == (f"{2**21}\n" if waits else "")
