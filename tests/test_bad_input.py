"""What cannot be done is refused with one clear error before anything is sent."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
from blame import expect
from conftest import MakeWorld
from pool import Done, Pool, Raised, Rank, on_ranks, run_ranks
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


# A call and what its message must say: tests/test_odd_inputs.py makes them.
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "complex BAND": (lambda: _allreduce_complex(dist.ReduceOp.BAND), "complex"),
    "complex MAX": (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX),
        "complex",
    ),
    "float8": (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), "float8_e5m2"),
    "uint16": (lambda: dist.all_reduce(torch.ones(2).to(torch.uint16)), "uint16"),
    "sparse maximum": (lambda: dist.all_reduce(_sparse(), dist.ReduceOp.MAX), "(?i)sparse.*MAX"),
    "sparse broadcast": (lambda: dist.broadcast(_sparse(), 0), "(?i)sparse"),
    "quantized": (lambda: dist.all_reduce(_quantized()), "(?i)quanti|qint8"),
    "quantized broadcast": (lambda: dist.broadcast(_quantized(), 0), "(?i)quanti|qint8"),
    "meta": (lambda: _backend().allreduce([torch.ones(2, device="meta")]), "(?i)meta|cpu"),
    "cuda": (
        lambda: _backend().allreduce([_cuda()]),
        f"cuda:0: this ringreduce was built {_built_with()}.*; use nccl",
    ),
    "two tensors": (lambda: _backend().allreduce([torch.ones(2), torch.ones(2)]), "(?i)one|single"),
    "no tensor": (lambda: _backend().allreduce([]), "(?i)one|single|empty"),
    "mixed dtypes": (
        lambda: dist.all_gather([torch.ones(2).int(), torch.ones(2)], torch.ones(2)),
        "(?i)dtype|type",
    ),
    "mixed devices": (
        lambda: _backend().allgather(
            [[torch.ones(2), torch.ones(2, device="meta")]], [torch.ones(2)]
        ),
        "(?i)meta|cpu|device",
    ),
    "no such root": (lambda: _backend().broadcast([torch.ones(2)], 7), "7"),
    "overlapping view": (
        lambda: dist.all_reduce(torch.ones(1).expand(5)),
        "(?i)overlap|expand|same memory|single memory|share",
    ),
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


def test_killed_before_the_group_is_whole(pool: Pool, world: MakeWorld) -> None:
    path = str(pool.folder / pool.name("half"))
    over_sockets = os.environ.get("RINGREDUCE_WIRE") == "tcp"
    limit = 4.0 if over_sockets else 20.0
    call = pool.start(killed_while_joining, world(0), path, limit, ranks=2, fresh=True)
    call.heard(0), call.heard(1)
    time.sleep(0.5)
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
