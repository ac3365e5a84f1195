"""What c10d::Backend offers besides single collectives: every call, abort, shutdown, memory.

torch binds them to ProcessGroup and Backend; a few it binds for its own backends only: the table at
the end.  What a Work tells is in test_work.py.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from ranks import same_on_all
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ringreduce
from ringreduce.core.backend import extension

CPU = torch.device("cpu")


def everything(me: Rank, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """A call of each kind through the group's own methods; returns what came of them."""
    p, r = group.size(), group.rank()
    t = torch.arange(6.0) + r
    summed, sent, rooted = t.clone(), t.clone(), t.clone()
    group.allreduce([summed]).wait()
    group.broadcast([sent]).wait()
    group.reduce(rooted, 0).wait()
    lists = [[torch.empty(6) for _ in range(p)]]
    group.allgather(lists, [t]).wait()
    whole, part = torch.empty(6 * p), torch.empty(6)
    group._allgather_base(whole, t).wait()
    group._reduce_scatter_base(part, torch.arange(6.0 * p) + r).wait()
    listed = torch.empty(6)
    group.reduce_scatter([listed], [[t + k for k in range(p)]]).wait()
    swapped = torch.empty(6 * p)
    group.alltoall_base(swapped, torch.arange(6.0 * p) + 100 * r, [], []).wait()
    turned = [torch.empty(3) for _ in range(p)]
    group.alltoall(turned, [torch.full((3,), 10.0 * r + k) for k in range(p)]).wait()
    gathered = [torch.empty(6) for _ in range(p)] if r == 0 else []
    group.gather(gathered, t, 0).wait()
    taken = torch.empty(6)
    group.scatter(taken, [t + k for k in range(p)] if r == 0 else [], 0).wait()
    both = [t.clone(), t[:3] * 2]
    group.allreduce_coalesced(both).wait()
    pair = [torch.empty(6 * p), torch.empty(2 * p)]
    group.allgather_into_tensor_coalesced(pair, [t, t[:2].contiguous()]).wait()
    halves = [torch.empty(6), torch.empty(3)]
    group.reduce_scatter_tensor_coalesced(
        halves, [torch.arange(6.0 * p), torch.arange(3.0 * p)]
    ).wait()
    came = torch.empty(6)
    if p > 1:
        work = group.send([t], (r + 1) % p, 9)
        group.recv([came], (r - 1) % p, 9).wait()
        work.wait()
    group.barrier().wait()
    kept = [summed, sent, *lists[0], whole, part, listed, swapped, *turned, taken, *both]
    kept += [*pair, *halves, *gathered]
    return [*kept, *([rooted] if r == 0 else []), *([came] if p > 1 else [])]


def like_gloo(me: Rank) -> int:
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert world is not None
    ours, theirs = everything(me, world), everything(me, gloo)
    assert len(ours) == len(theirs)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype, k
        assert torch.equal(a, b), (k, a, b)
    return len(ours)


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_gives_what_gloo_gives(pool: Pool, world: MakeWorld, size: int) -> None:
    counts = pool.run(like_gloo, world(size, 20.0))
    assert min(counts) > 15


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch has it from 2.14")
@on_ranks(3, 20.0)
def test_gather_into_one_tensor(me: Rank) -> None:
    """Gathers into one tensor, and what is said of outputs that cannot be."""
    gather: Any = dist.gather_single  # type: ignore[attr-defined]
    p, rank = me.world_size, me.rank
    for root, shape in enumerate([(p * 6,), (p, 3, 2), (p, 0)]):
        n = 0 if 0 in shape else 6
        wide = torch.arange(2.0 * n).view(-1, 2) + 100 * rank
        out = torch.full(shape, -1.0) if rank == root else None
        work = gather(wide[:, 1], out, dst=root, async_op=True)
        work.wait()
        if out is not None:
            wanted = [torch.arange(2.0 * n)[1::2] + 100 * r for r in range(p)]
            assert torch.equal(out, torch.stack(wanted).view(shape)), shape
            assert [r.data_ptr() for r in work.result()] == [out.data_ptr()]
    for row in range(p):  # the input is a part of the output: its own, or another
        out = torch.full((p, 4), float(rank))
        gather(out[row], out if rank == 0 else None, dst=0)
        assert out[:, 0].tolist() == ([*map(float, range(p))] if rank == 0 else [rank] * p)

    options, t = dist.GatherOptions(), torch.ones(4)
    options.rootRank = rank
    wrong = {
        "small": torch.empty(p * 4 - 1),
        "large": torch.empty(p * 4 + 1),
        "dtype": torch.empty(p * 4, dtype=torch.float64),
        "strided": torch.empty(4, p).t(),
        "expanded": torch.empty(1).expand(p * 4),
    }
    group: Any = dist.group.WORLD
    for name, out in wrong.items():
        with pytest.raises(ValueError) as error:
            group.gather_single(out, t, options)
        assert "gather_single" in str(error.value), (name, error.value)
        assert name != "strided" or "contiguous" in str(error.value)
    options.rootRank = p
    with pytest.raises(ValueError, match=f"rank {p}"):
        group.gather_single(torch.empty(0), t, options)
    dist.all_reduce(t)  # nothing was sent
    assert t.tolist() == [p] * 4


def ended(me: Rank, how: str) -> list[Any]:
    """Rank 0 ends the group with operations under way; everybody's waits end, and name rank 0."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    waiting = dist.all_reduce(torch.ones(2), group=group, async_op=True) if me.rank else None
    errors: list[Any] = []
    dist.barrier()  # the first call has ended and the next one has begun
    if me.rank == 0:
        getattr(group, how)()
    if waiting is not None:
        try:
            waiting.wait()
        except dist.DistBackendError as error:
            errors.append((type(error).__name__, str(error)))
    try:
        dist.all_reduce(torch.ones(2), group=group)
    except dist.DistBackendError as error:
        errors.append((type(error).__name__, str(error)))
    if how == "abort":
        group.abort()  # again does nothing
    dist.destroy_process_group(group)
    t = torch.ones(1)
    dist.all_reduce(t)
    return [float(t), *errors]


@pytest.mark.parametrize(("how", "kinds"), [("abort", {"Aborted"}), ("shutdown", {"PeerLost"})])
def test_abort_and_shutdown(pool: Pool, world: MakeWorld, how: str, kinds: set[str]) -> None:
    first, *others = pool.run(ended, world(3, 20.0), how)
    assert first[0] == 3.0
    assert first[1][0] == "Aborted"
    for found in others:
        assert found[0] == 3.0
        assert len(found) == 3
        for kind, said in found[1:]:
            assert kind in kinds, (kind, said)
            assert "rank 0" in said, said


@on_ranks(2, 20.0)
def test_memory(me: Rank) -> None:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    assert backend.mem_allocator is not None
    dtype = torch.float32
    kept = [backend.allocate_tensor(n, dtype=dtype, device=CPU) for n in (0, 1, 1000, 3_000_000)]
    for t in kept:
        assert t.dtype == dtype and t.dim() == 1
        assert t.data_ptr() % 4096 == 0
        t.fill_(float(me.rank))
        dist.all_reduce(t)
        assert bool((t == me.world_size * (me.world_size - 1) / 2).all())
    halves = backend.allocate_tensor(64, dtype=torch.bfloat16, device=CPU)
    halves.copy_(torch.arange(64.0))
    dist.broadcast(halves, 0)
    assert torch.equal(halves, torch.arange(64.0).bfloat16())
    # It is ordinary memory: it may be viewed, saved for backward, and outlive its group.
    part = dist.new_group()
    w = part._get_backend(CPU).allocate_tensor(10, dtype=dtype, device=CPU).fill_(2.0)
    dist.destroy_process_group(part)
    del part
    w.requires_grad_()
    (w * w).sum().backward()
    assert w.grad is not None and bool((w.grad == 4.0).all())
    with pytest.raises(ValueError):
        backend.allocate_tensor(-1, dtype=dtype, device=CPU)
    stats: dict[str, int] = backend.memory_stats()
    assert stats["staging_bytes"] == ringreduce.staging_bytes()
    assert stats["staging_bytes"] > 0
    same_on_all(stats)


@on_ranks(3, 20.0)
def test_options_of_meshes_and_parts(me: Rank) -> None:
    """The mesh of all ranks, then a part of it: what has come of their options."""
    wanted = ringreduce.Options(on_loss="continue", slots=8)
    wanted._timeout = timedelta(seconds=77)
    mesh = dist.init_device_mesh(
        "cpu", (3,), mesh_dim_names=("dp",), backend_override={"dp": ("ringreduce", wanted)}
    )
    group = mesh.get_group("dp")

    def found(group: dist.ProcessGroup) -> tuple[bool, float, int]:
        backend = group._get_backend(CPU)
        slots = backend.options.slots if hasattr(backend, "options") else 0  # not in all torches
        return extension().goes_on(backend), extension().timeout_seconds(backend), slots

    told = hasattr(group._get_backend(CPU), "options")
    assert found(group) == (True, 77.0, 8 * told)
    assert wanted.group_name == "" and wanted.global_ranks_in_group == []
    cases: list[tuple[Any, bool, int]] = [
        (None, True, 8),
        (ringreduce.Options(slots=5), True, 5),
        (ringreduce.Options(on_loss="error"), False, 8),
    ]
    if told:  # as split_group does
        cases.append((copy.deepcopy(group._get_backend(CPU).options), True, 8))
    for number, (options, goes_on, slots) in enumerate(cases):
        limit = timedelta(seconds=9)
        part = group.split_group([0, 1], limit, opts=options, group_name=f"part {number}")
        if part is not None:
            assert found(part) == (goes_on, 9.0, slots * told), number
            t = torch.ones(4)
            part.allreduce([t]).wait()
            assert t.tolist() == [2.0] * 4
        dist.barrier()
    with pytest.warns(UserWarning, match="0:01:17, which is ignored"):
        made = dist.new_group(pg_options=wanted)
    assert found(made) == (True, 1800.0, 8 * told)


def test_options_are_torchs_and_do_not_change() -> None:
    options = ringreduce.Options(slots=8, stall_seconds=60.0)
    assert isinstance(options, Backend.Options) and options.backend == "ringreduce"
    options._timeout = timedelta(seconds=5)
    options.global_ranks_in_group = [1, 2]
    for other in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert type(other) is ringreduce.Options
        assert other == options and hash(other) == hash(options) and repr(other) == repr(options)
        other._timeout = timedelta(seconds=6)
        assert other != options
    assert dataclasses.replace(options, slots=3) == ringreduce.Options(slots=3, stall_seconds=60)
    assert "slots=8" in repr(options)
    with pytest.raises(AttributeError, match="slots"):
        options.slots = 9
    with pytest.raises(AttributeError, match="timeout"):  # that is `_timeout`
        options.timeout = timedelta(seconds=5)  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        ringreduce.Options(slots="many")  # type: ignore[arg-type]


@on_ranks(2, 20.0)
def test_what_is_not_offered(me: Rank) -> None:
    """What only other kinds of backends can do says so, in words of torch's."""
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(CPU)
    private = "_" if TORCH >= (2, 15) else ""
    assert not getattr(backend, f"{private}supports_time_estimate")
    for call in (backend.suspend, backend.resume):
        with pytest.raises(Exception):  # noqa: B017  of torch's choice
            call()
    with pytest.raises(Exception, match="excludes itself"):
        backend.shrink([me.rank])
    dist.barrier()


# ---- docs/torch.md: what torch keeps to its own backends, and since when it does not

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
c10d: Any = torch._C._distributed_c10d


def record_an_end(group: Any) -> None:
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    entries = pickle.loads(c10d._dump_fr_trace(backend="ringreduce"))["entries"]
    assert entries[-1]["state"] == "completed"


def read_a_record(group: Any) -> None:
    from torch.distributed.flight_recorder.components.types import Op

    entry = dict.fromkeys(("collective_seq_id", "p2p_seq_id", "time_created_ns"), 0)
    lists = {key: [] for key in ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")}
    name = {"profiling_name": "ringreduce:barrier", "process_group": ("0", "")}
    Op({**entry, **lists, **name, "state": ""}, {"0": {0, 1}}, "0")


def use_bfloat16_hook(group: Any) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def set_timeout(group: Any) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), group)
    assert extension().timeout_seconds(group._get_backend(CPU)) == 77


# By the row's first column: the version that the second names ("never", "CUDA" for builds with
# CUDA), and a call that raises where it is closed.
OPENED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Records of calls": ("2.14", lambda g: c10d.FlightRecorderHook.attach(g).remove()),
    "Records of their ends": ("2.15", record_an_end),
    "`torchfrtrace`": ("2.15", read_a_record),
    "NaN check": ("2.14", lambda g: c10d.NanCheckHook.attach(g).remove()),
    "`dist.monitored_barrier`": ("2.14", lambda g: dist.monitored_barrier()),
    "`dist.split_group` on the CPU": ("2.15", lambda g: dist.split_group(split_ranks=[[0, 1]])),
    "Sequence numbers of the group": ("2.14", lambda g: g._get_sequence_number_for_group()),
    "`get_error`": ("2.14", lambda g: g._get_backend(CPU).get_error()),
    "`_set_pg_timeout`": ("2.14", set_timeout),
    "SyncBatchNorm on the CPU": ("never", lambda g: nn.SyncBatchNorm(3)(torch.ones(4, 3))),
    "`bf16_compress_hook`": ("CUDA", use_bfloat16_hook),
}


def open_features(me: Rank) -> set[str]:
    found = set()
    for name, (_, probe) in OPENED.items():
        try:
            probe(dist.group.WORLD)
            found.add(name)
        except Exception as error:
            print(name, "is closed:", error)
        dist.barrier()
    return found


def test_what_torch_keeps_to_its_own_backends(pool: Pool, world: MakeWorld) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/torch.md").read_text()
    expected = set()
    for name, (since, _) in OPENED.items():
        assert f"\n| {name} | {since} |" in page, f"docs/torch.md has no row for {name}, {since}"
        if since == "CUDA":
            is_open = torch.version.cuda is not None
        else:
            is_open = since != "never" and tuple(map(int, since.split("."))) <= TORCH
        if is_open:
            expected.add(name)
    for found in pool.run(open_features, world(2, 20.0)):
        assert found == expected, "torch has changed; correct docs/torch.md and this table"
