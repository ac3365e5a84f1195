"""What cannot be done is refused with one clear error on its caller, before anything is sent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from blame import expect
from conftest import MakeWorld
from pool import Done, Pool, Raised, Rank, on_ranks, run_ranks
from processes import wait_until
from test_bits import reduce_op
from test_failures import add_up
from torch._subclasses.fake_tensor import FakeTensorMode


def _backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def _cuda() -> torch.Tensor:
    """One that says it is on a GPU, where there is none."""
    with FakeTensorMode():
        return torch.ones(2, device="cuda")


def _sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def _allreduce_complex(op: dist.ReduceOp) -> object:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return _backend().allreduce([torch.ones(2, dtype=torch.complex64)], options)


def _built_with() -> str:
    from ringreduce._build_info import CUDA, CUDA_MISSING

    return re.escape(f"with CUDA ({CUDA})" if CUDA else f"without CUDA ({CUDA_MISSING})")


Tensor = torch.Tensor
Call = Callable[[int], object]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def lists(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [ones(*shape, dtype=dtype) for _ in range(count)]


def expanded(n: int) -> Tensor:
    return ones(1).expand(n)


def _alone(call: Callable[..., Any], *args: Any, kind: Any, root: int, op: Any = None) -> Any:
    """A rooted call straight to the backend: torch's own checks come first otherwise."""
    options = kind()
    options.rootRank = root
    if op is not None:
        options.reduceOp = op
    return call(*args, options)


def overlapping(way: int) -> list[Tensor]:
    """Two tensors of four elements that share some."""
    if way == 0:
        return [ones(4)] * 2
    if way == 1:
        return list(torch.ones(6).unfold(0, 4, 2))
    columns = torch.ones(5, 2)
    return [columns[:4, 0], columns[1:, 0]]


def _coalesced(call: str, outputs: Any, inputs: Any) -> Any:
    return getattr(dist.group.WORLD, call)(outputs, inputs).wait()


_OVERLAPPING: dict[str, Callable[[list[Tensor], int], object]] = {
    "all_gather": lambda out, r: dist.all_gather(out, ones(4)),
    "gather": lambda out, r: dist.gather(ones(4), out, dst=r),
    "all_to_all": lambda out, r: dist.all_to_all(out, lists(2, 4)),
    "all_gather_coalesced": lambda out, r: _coalesced(
        "allgather_coalesced", [[ones(4), out[0]], [ones(4), out[1]]], lists(2, 4)
    ),
    "all_gather_coalesced of one rank": lambda out, r: _coalesced(
        "allgather_coalesced", [out, lists(2, 4)], lists(2, 4)
    ),
    "all_gather_into_tensor_coalesced": lambda out, r: _coalesced(
        "allgather_into_tensor_coalesced", out, lists(2, 2)
    ),
    "reduce_scatter_tensor_coalesced": lambda out, r: _coalesced(
        "reduce_scatter_tensor_coalesced", out, lists(2, 8)
    ),
}


# Calls of a rank of two, `r`, each with what is wrong.  Those in a pair are with what the message
# must say, whatever its class; the others raise a ValueError with a reason.
BAD: dict[str, Call | tuple[Call, str]] = {
    "complex BAND": (lambda r: _allreduce_complex(dist.ReduceOp.BAND), "complex"),
    "complex MAX": (
        lambda r: dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX),
        "complex",
    ),
    "float8": (lambda r: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), "float8_e5m2"),
    "uint16": (lambda r: dist.all_reduce(torch.ones(2).to(torch.uint16)), "uint16"),
    "sparse maximum": (lambda r: dist.all_reduce(_sparse(), dist.ReduceOp.MAX), "(?i)sparse.*MAX"),
    "sparse broadcast": (lambda r: dist.broadcast(_sparse(), 0), "(?i)sparse"),
    "quantized": (lambda r: dist.all_reduce(_quantized()), "(?i)quanti|qint8"),
    "quantized broadcast": (lambda r: dist.broadcast(_quantized(), 0), "(?i)quanti|qint8"),
    "meta": (lambda r: _backend().allreduce([torch.ones(2, device="meta")]), "(?i)meta|cpu"),
    "cuda": (
        lambda r: _backend().allreduce([_cuda()]),
        f"cuda:0: this ringreduce was built {_built_with()}.*; use nccl",
    ),
    "two tensors": (
        lambda r: _backend().allreduce([torch.ones(2), torch.ones(2)]),
        "(?i)one|single",
    ),
    "no tensor": (lambda r: _backend().allreduce([]), "(?i)one|single|empty"),
    "mixed dtypes": (
        lambda r: dist.all_gather([torch.ones(2).int(), torch.ones(2)], torch.ones(2)),
        "(?i)dtype|type",
    ),
    "mixed devices": (
        lambda r: _backend().allgather(
            [[torch.ones(2), torch.ones(2, device="meta")]], [torch.ones(2)]
        ),
        "(?i)meta|cpu|device",
    ),
    "no such root": (lambda r: _backend().broadcast([torch.ones(2)], 7), "7"),
    "overlapping view": (
        lambda r: dist.all_reduce(torch.ones(1).expand(5)),
        "(?i)overlap|expand|same memory|single memory|share",
    ),
    # lists of the wrong length
    "all_gather to 1": lambda r: dist.all_gather(lists(1, 4), ones(4)),
    "all_gather to none": lambda r: dist.all_gather([], ones(4)),
    "gather to 1": lambda r: dist.gather(ones(4), lists(1, 4), dst=r),
    "gather to none": lambda r: _alone(
        _backend().gather, [], [ones(4)], kind=dist.GatherOptions, root=r
    ),
    "gather, not the root's": lambda r: _alone(
        _backend().gather, [lists(2, 4)], [ones(4)], kind=dist.GatherOptions, root=1 - r
    ),
    "scatter of 1": lambda r: dist.scatter(ones(4), lists(1, 4), src=r),
    "scatter, not the root's": lambda r: _alone(
        _backend().scatter, [ones(4)], [lists(2, 4)], kind=dist.ScatterOptions, root=1 - r
    ),
    "reduce_scatter of 1": lambda r: dist.reduce_scatter(ones(4), lists(1, 4)),
    "all_to_all from 3": lambda r: dist.all_to_all(lists(2, 4), lists(3, 4)),
    "coalesced, none": lambda r: _backend().allreduce_coalesced([]),
    "coalesced, the second": lambda r: _backend().allreduce_coalesced(
        [torch.ones(70_000), torch.ones(2).to(torch.uint16)]
    ),
    "all_to_all_single to itself": lambda r: dist.all_to_all_single(
        ones(4), ones(4), [2, 2], [1 + 2 * r, 3 - 2 * r]
    ),
    # sizes
    "all_gather own output": lambda r: dist.all_gather(lists(2, 5), ones(4)),
    "all_gather_into_tensor": lambda r: dist.all_gather_into_tensor(ones(9), ones(4)),
    "scatter size": lambda r: dist.scatter(ones(4), [ones(4), ones(3)], src=r),
    "reduce_scatter own input": lambda r: dist.reduce_scatter(ones(4), lists(2, 5)),
    "reduce_scatter_tensor": lambda r: dist.reduce_scatter_tensor(ones(4), ones(9)),
    "all_to_all own part": lambda r: dist.all_to_all(lists(2, 4), lists(2, 5)),
    "all_to_all_single sizes": lambda r: dist.all_to_all_single(ones(4), ones(6)),
    "all_to_all_single odd": lambda r: dist.all_to_all_single(ones(5), ones(5)),
    "splits add up to less": lambda r: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2, 1]),
    "all_to_all_single, strided": lambda r: dist.all_to_all_single(ones(2, 2), ones(2, 2).t()),
    "negative split": lambda r: dist.all_to_all_single(ones(4), ones(4), [2, 2], [5, -1]),
    "three splits": lambda r: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2, 1, 1]),
    # dtypes
    "all_gather dtype": lambda r: _backend().allgather([lists(2, 4)], [ones(4).double()]),
    "all_gather_into_tensor dtype": lambda r: dist.all_gather_into_tensor(
        ones(8, dtype=torch.int32), ones(4)
    ),
    "all_to_all dtype": lambda r: dist.all_to_all(lists(2, 4), [ones(4), ones(4).int()]),
    "all_to_all_single dtype": lambda r: dist.all_to_all_single(ones(4), ones(4).double()),
    "reduce of uint16": lambda r: dist.reduce(ones(4).to(torch.uint16), 0),
    "reduce_scatter of float8": lambda r: dist.reduce_scatter(
        ones(4).to(torch.float8_e5m2), [ones(4).to(torch.float8_e5m2)] * 2
    ),
    "average of bool": lambda r: dist.reduce(ones(4).bool(), 0, op=dist.ReduceOp.AVG),
    "BAND of float": lambda r: dist.reduce_scatter_tensor(ones(2), ones(4), op=dist.ReduceOp.BAND),
    # outputs whose elements share memory
    "expanded reduce": lambda r: dist.reduce(expanded(4), r),
    "expanded broadcast": lambda r: dist.broadcast(expanded(4), 1 - r),
    "expanded all_gather": lambda r: dist.all_gather([ones(4), expanded(4)], ones(4)),
    "expanded scatter": lambda r: dist.scatter(expanded(4), lists(2, 4) if r == 0 else None, src=0),
    "expanded reduce_scatter": lambda r: dist.reduce_scatter(expanded(4), lists(2, 4)),
    "expanded all_to_all": lambda r: dist.all_to_all([ones(4), expanded(4)], lists(2, 4)),
    "expanded recv": lambda r: dist.recv(expanded(4), 1 - r),
    "expanded all_reduce_coalesced, twice": lambda r: dist.group.WORLD.allreduce_coalesced(
        [expanded(4)] * 2
    ).wait(),
    "expanded in itself": lambda r: dist.all_reduce(torch.ones(6).as_strided((3, 3), (1, 1))),
    # outputs that share memory with each other
    **{
        f"{name}, overlapping in way {way}": partial(call, overlapping(way))
        for way in range(3)
        for name, call in _OVERLAPPING.items()
    },
    # other kinds of tensors
    "sparse reduce": lambda r: _backend().reduce([_sparse()]),
    "sparse send": lambda r: _backend().send([_sparse()], 1 - r, 0),
    "quantized recv": lambda r: _backend().recv([_quantized()], 1 - r, 0),
    "meta all_to_all": lambda r: _backend().alltoall(
        lists(2, 4), [ones(4), torch.ones(4, device="meta")]
    ),
    # ranks that are none
    "reduce to 7": lambda r: _alone(_backend().reduce, [ones(4)], kind=dist.ReduceOptions, root=7),
    "gather to rank 7": lambda r: _alone(
        _backend().gather, [], [ones(4)], kind=dist.GatherOptions, root=7
    ),
    "scatter from -1": lambda r: _alone(
        _backend().scatter, [ones(4)], [], kind=dist.ScatterOptions, root=-1
    ),
    "send to 7": lambda r: _backend().send([ones(4)], 7, 0),
    "recv from -3": lambda r: _backend().recv([ones(4)], -3, 0),
}


def _try(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "accepted"


@on_ranks(2)
def test_operations_without_a_meaning(me: Rank) -> None:
    for dtype in oracle.REDUCIBLE:
        for op in oracle.OPS:
            if oracle.supported(dtype, op):
                continue
            t = torch.ones(3).to(getattr(torch, dtype))
            before = t.clone()
            said = _try(lambda t=t, op=op: dist.all_reduce(t, op=reduce_op(op, me.rank)))
            assert op in said and dtype in said, f"{op} of {dtype}: {said}"
            assert torch.equal(t, before), f"{op} of {dtype} wrote its tensor"
    dist.barrier()


@on_ranks(2)
def test_complex_sums_as_torch_does_them(me: Rank) -> None:
    t = torch.tensor([1 + 2j, 3 - 1j]) * (me.rank + 1)
    dist.all_reduce(t)  # torch hands it down as pairs of real numbers
    assert t.tolist() == [3 + 6j, 9 - 3j]


def refuse(me: Rank, who: list[int]) -> dict[str, str]:
    """What each call said on the ranks that made it; the group goes on after each."""
    said = {}
    for name, row in BAD.items():
        call = row[0] if isinstance(row, tuple) else row
        if me.rank in who:
            try:
                call(me.rank)
                said[name] = "accepted"
            except (ValueError, TypeError, RuntimeError) as error:
                said[name] = f"{type(error).__name__}: {error}"
        t = torch.full((5,), float(me.rank))
        dist.all_reduce(t)
        assert float(t[0]) == 1.0, name
    work = dist.isend(torch.full((3,), float(me.rank)), 1 - me.rank)
    got = torch.empty(3)
    dist.recv(got, 1 - me.rank)
    work.wait()
    assert got.tolist() == [1.0 - me.rank] * 3, "no message was left behind by those"
    return said


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all ranks", "one rank"])
def test_calls_that_cannot_be_made(pool: Pool, world: MakeWorld, who: list[int]) -> None:
    for rank, said in enumerate(pool.run(refuse, world(2, timeout=10.0), who)):
        assert len(said) == (len(BAD) if rank in who else 0)
        for name, text in said.items():
            row = BAD[name]
            if isinstance(row, tuple):
                assert re.search(row[1], text.partition(": ")[2]), f"{name}: {text}"
                continue
            assert text.startswith("ValueError: ") and len(text) > 25, f"{name}: {text}"
            assert "ringreduce" in text or not re.search("expanded|overlapping", name), name
        if rank in who:
            assert "Tensors must be contiguous" in said["all_to_all_single, strided"]


@on_ranks(3)
def test_outputs_that_interleave(me: Rank) -> None:
    """Outputs whose memory interleaves, and shares no element."""
    p, whole = me.world_size, torch.zeros(5, me.world_size)
    dist.all_gather(list(whole.unbind(1)), torch.full((5,), float(me.rank)))
    assert torch.equal(whole, torch.arange(float(p)).expand(5, p))
    grid = torch.zeros(4, 4)  # a border and the middle, whose extents overlap
    parts = [grid[1:3, 1:3], grid[:, 0], grid[:, 3], grid[0, 1:3], grid[3, 1:3]]
    for part in parts:
        part += 1
    dist.group.WORLD.allreduce_coalesced(parts).wait()  # type: ignore[union-attr]
    assert grid.eq(p).all()
    back = torch.arange(4.0).as_strided((2, 2), (1, 2))
    dist.all_reduce(back)
    assert back.tolist() == [[0, 2 * p], [p, 3 * p]]


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_calls_that_only_look_odd(me: Rank) -> None:
    """Calls that only look odd: shapes differ where counts agree, and inputs share memory."""
    p, rank = me.world_size, me.rank
    out = ones(2, 2)
    dist.scatter(out, lists(p, 4, 1) if rank == 0 else None, src=0)
    assert out.tolist() == [[1, 1], [1, 1]]
    gathered = ones(p, 2, 2)
    dist.all_gather_into_tensor(gathered, expanded(4))
    assert gathered.eq(1).all()
    total = ones(2)
    dist.reduce_scatter_tensor(total, expanded(2 * p))
    assert total.tolist() == [p, p]
    scalar = torch.tensor(float(rank))
    dist.reduce(scalar, p - 1)
    assert rank != p - 1 or scalar == p * (p - 1) / 2
    scalars = [torch.tensor(0.0) for _ in range(p)]
    dist.all_gather(scalars, torch.tensor(float(rank)))
    assert [float(s) for s in scalars] == list(range(p))
    rows = torch.empty(0, 7)
    dist.all_to_all_single(rows, torch.empty(0, 7), [0] * p, [0] * p)
    wide = torch.empty(0)
    dist.all_to_all_single(torch.empty(5 * p, 0), torch.empty(5 * p, 0))
    dist.reduce_scatter(wide, [torch.empty(0) for _ in range(p)])
    dist.reduce(wide, 0)
    dist.gather(wide, [torch.empty(0) for _ in range(p)] if rank == 0 else None)


def sum_sparse(me: Rank, case: tuple[str, str, bool]) -> list[Any]:
    dtype, op, hybrid = case
    kind = getattr(torch, dtype)
    dense = torch.zeros(6, 5, dtype=kind)
    if me.rank < 3:  # the last of four has no element at all
        dense[me.rank] = me.rank + 1
        dense[5, 2] = 7
    t = dense.to_sparse(1 if hybrid else 2)
    dist.all_reduce(t, op=getattr(dist.ReduceOp, op))
    assert t.is_sparse and t.is_coalesced() and t.dtype == kind
    return t.to_dense().double().tolist()


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "SUM"), ("float16", "AVG"), ("int64", "SUM"), ("bfloat16", "SUM")]
)
def test_sparse_sums(pool: Pool, world: MakeWorld, dtype: str, op: str, hybrid: bool) -> None:
    wanted = torch.zeros(6, 5, dtype=torch.float64)
    for rank in range(3):
        wanted[rank] += rank + 1
        wanted[5, 2] += 7
    wanted /= 4 if op == "AVG" else 1
    assert pool.run(sum_sparse, world(4), (dtype, op, hybrid)) == [wanted.tolist()] * 4


# ---------------------------------------------------------------------------------------------
# Groups that cannot be made


def make(me: Rank, path: str, rank: int, size: int, timeout: float, way: str) -> float:
    """Makes a group on a file and adds up its ranks."""
    if way == "other network namespace" and me.rank == 1:
        assert ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0, "CLONE_NEWNET"
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        me.backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=limit
    )
    me.tell("joined")
    t = torch.ones(1)
    dist.all_reduce(t)
    if way == "stay":
        time.sleep(60)
    return float(t)


def start_each(
    pool: Pool, world: MakeWorld, jobs: list[tuple[int, int]], way: str = "", timeout: float = 30.0
) -> list[str]:
    """Starts processes as (rank, world size), all meeting on one file; returns what each said."""
    path = pool.folder / pool.name("meeting")
    arguments = str(path), jobs, way, timeout
    outcomes = pool.start(make_as, world(0), *arguments, ranks=len(jobs), fresh=True).outcomes()
    for outcome in outcomes:
        assert isinstance(outcome, Raised), f"rank {outcome.rank}: {outcome}"
        assert not outcome.isa("AssertionError"), outcome
    return [o.message for o in outcomes if isinstance(o, Raised)]


def make_as(me: Rank, path: str, jobs: list[tuple[int, int]], way: str, timeout: float) -> float:
    rank, size = jobs[me.rank]
    return make(me, path, rank, size, timeout, way)


@pytest.mark.root
def test_a_group_that_spans_hosts(pool: Pool, world: MakeWorld) -> None:
    """Another network namespace is another host, as far as sockets can tell."""
    for message in start_each(pool, world, [(0, 2), (1, 2)], "other network namespace"):
        assert re.search(r"(?i)host", message) and re.search(r"\brank 1\b", message), message


def from_its_own_pid_namespace(me: Rank, name: str) -> str:
    """What a child that is process 1 of a namespace is told of the other one, which has ended."""
    assert ctypes.CDLL(None, use_errno=True).unshare(0x20000000) == 0, "CLONE_NEWPID"
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            me.init(name, size=2)
            if me.rank == 0:
                dist.all_reduce(torch.ones(4))
        except Exception as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        return said.read()


@pytest.mark.root
@pytest.mark.parametrize("wire", ["", "tcp"])
def test_ranks_in_pid_namespaces_of_their_own(pool: Pool, world: MakeWorld, wire: str) -> None:
    options = {"WIRE": wire} if wire else {}
    call = pool.start(
        from_its_own_pid_namespace, world(0, **options), pool.name(), ranks=2, fresh=True
    )
    said, nothing = call.results()
    assert "rank 1 (pid 1 on host" in said and nothing == ""


WITHOUT_EXTENSION = """
import importlib, sys, torch
known = importlib.import_module
version, torch.__version__ = torch.__version__, "2.99.0"
try:
    import ringreduce
except ImportError as raised:
    print(raised)
torch.__version__ = version
for error in (
    ImportError("_C.so: undefined symbol: _ZN3c10"),
    ImportError("_C.so: failed to map: Cannot allocate memory"),
    ModuleNotFoundError("none", name="ringreduce._C"),
):
    def other(name, *args):
        if name == "ringreduce._C":
            raise error
        return known(name, *args)
    importlib.import_module = other
    try:
        import ringreduce
    except ImportError as raised:
        print(raised)
    for name in [name for name in sys.modules if name.split(".")[0] == "ringreduce"]:
        del sys.modules[name]
"""


def test_an_extension_that_does_not_load(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_EXTENSION)
    not_for_it, other_torch, no_memory, missing = run_ranks(script, 1)[0].stdout.splitlines()
    assert "torch 2.99.0" in not_for_it and "pip install" in not_for_it
    assert "built for torch" in other_torch and "pip install" in other_torch
    assert no_memory.endswith("does not load: _C.so: failed to map: Cannot allocate memory")
    assert "has not been built" in missing


def test_a_file_of_an_earlier_run(pool: Pool, world: MakeWorld) -> None:
    """Either the new run is right, or it says what the matter is; it does not hang."""
    path = Path(pool.folder / pool.name("stale"))

    def start(way: str, timeout: float) -> object:
        args = (str(path), [(0, 2), (1, 2)], way, timeout)
        return pool.start(make_as, world(0), *args, ranks=2, fresh=True)

    first = start("stay", 30.0)
    for rank in range(2):
        assert first.heard(rank) == "joined"  # type: ignore[attr-defined]
    for rank in range(2):
        first.signal(rank, signal.SIGKILL)  # type: ignore[attr-defined]
    first.outcomes()  # type: ignore[attr-defined]
    assert os.path.exists(path)
    for outcome in start("", 6.0).outcomes():  # type: ignore[attr-defined]
        if not (isinstance(outcome, Done) and outcome.value == 2.0):
            assert isinstance(outcome, Raised), outcome
            assert re.search(r"(?i)stale|earlier|left", outcome.message), outcome.message


def killed_while_joining(me: Rank, path: str, limit: float) -> None:
    me.tell("here")
    make(me, path, me.rank, 3, limit, "")


def has_accepted(pid: int) -> bool:
    """Whether another rank is connected to the socket that a process's group listens at."""
    held = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            held.add(os.readlink(fd))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, _, _, state, inode, *name = line.split()
        connected = state == "03"  # with the name of the one that accepted it
        if connected and f"socket:[{inode}]" in held and "".join(name).startswith("@ringreduce-"):
            return True
    return False


def test_killed_before_the_group_is_whole(pool: Pool, world: MakeWorld) -> None:
    path = str(pool.folder / pool.name("half"))
    over_sockets = os.environ.get("RINGREDUCE_WIRE") == "tcp"
    limit = 4.0 if over_sockets else 20.0
    call = pool.start(killed_while_joining, world(0), path, limit, ranks=2, fresh=True)
    call.heard(0), call.heard(1)
    if over_sockets:
        assert wait_until(lambda: os.path.exists(path) and b"/rank/1" in Path(path).read_bytes())
    else:
        assert wait_until(lambda: has_accepted(call.workers[0].pid))
        time.sleep(0.5)  # nothing shows from outside that its first words are read
    killed = call.signal(1, signal.SIGKILL)
    survivor = call.outcomes()[0]
    if over_sockets:
        # Ranks that share no memory have nothing but the store until all have come to it: there the
        # dead one has left its entry, and it is the deadline that ends the wait for the third.
        expect(survivor, "Timeout", {2}, says="did not join within 4 s")
        return
    assert isinstance(survivor, Raised) and re.search(r"\brank 1\b", survivor.message), survivor
    assert survivor.when - killed <= 8.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_refused(pool: Pool, world: MakeWorld) -> None:
    for said in pool.run(refuse_cuda, world(2)):
        assert re.search("(?i)cuda|cpu", said), said


def refuse_cuda(me: Rank) -> str:
    return _try(lambda: dist.all_reduce(torch.ones(2, device="cuda")))


def test_the_group_goes_on_elsewhere(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(add_up, world(2)) == [3.0] * 2
