"""ringreduce.elastic: ranks that are started again join the others, and take over their state."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import launchers
import pytest
import survive_faults
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Done, Pool, Raised, Rank
from processes import alive, free_port
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import elastic
from ringreduce.core.backend import backend_of, extension
from ringreduce.supervise import Ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("RINGREDUCE_WIRE") == "tcp", reason="needs shared memory"
)


def faults(runs: int, folder: Path) -> None:
    """In a process of its own, whose server for forks has imported what the ranks need."""
    first = os.environ.get("RINGREDUCE_SEED", str(int.from_bytes(os.urandom(3), "big")))
    counts = folder / "counts.json"
    options = ["--runs", str(runs), "--seed", first, "--out", str(counts)]
    done = subprocess.run(
        [sys.executable, survive_faults.__file__, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads(counts.read_text())["ranks_joined"] > 0


@pytest.mark.nightly
def test_random_faults(tmp_path: Path, full: bool) -> None:
    faults(20 if full else 4, tmp_path)  # of 15 faults each


# ---- a newcomer, while another rank's place stays vacant

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

rank, first = int(os.environ["RANK"]), Path(sys.argv[1], os.environ["RANK"])
is_first = not first.exists()
first.touch()
if rank == 3 and not is_first:
    sys.exit(7)  # its place stays vacant

import torch
import torch.distributed as dist
import ringreduce
from ringreduce import elastic

ringreduce.init()
names = ("GROUP_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
node, per_node, local = (int(os.environ[name]) for name in names)
assert rank == node * per_node + local and dist.get_world_size() == 4
if not is_first:
    try:
        dist.all_reduce(torch.ones(1))
    except ringreduce.Error as error:
        assert "call restore() of a ringreduce.elastic.State" in str(error), error
changes = []
weights = torch.full((1000,), float(rank))
state = elastic.State(step=0, names=["a", rank], weights=weights)
state.on_change(changes.append)
state.restore()
if is_first:
    assert state.names == ["a", 0] and state.weights.tolist() == [0.0] * 1000
while state.step < 20 or state.live_ranks != [0, 1, 2]:
    state.step += 1
    state.weights += 1
    if state.step == 10 and is_first and rank in (1, 2, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.002)
    state.commit()
assert state.names == ["a", 0] and state.weights.tolist() == [float(state.step)] * 1000
assert changes[-1] == [0, 1, 2] and state.is_leader() == (rank == 0), changes
assert ringreduce.live_ranks() == [0, 1, 2]

t = torch.full((3,), float(rank))
dist.broadcast(t, 2)
assert t.tolist() == [2.0] * 3
dist.reduce(t, 1)
assert rank != 1 or t.tolist() == [6.0] * 3
out = torch.zeros(1)
dist.scatter(out, [torch.ones(1) * r for r in range(4)] if rank == 2 else None, 2)
assert out.item() == rank
if rank == 2:
    dist.send(torch.tensor([5.0]), 1)
elif rank == 1:
    assert dist.recv(out) == 2 and out.item() == 5.0
for call in (
    lambda: dist.all_gather([torch.ones(1) for _ in range(4)], out),
    lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
    lambda: dist.broadcast(out, 3),
    lambda: dist.recv(out, 3),
):
    try:
        call()
        raise SystemExit("a call without rank 3 did not raise")
    except ringreduce.PeerLost as error:
        assert "rank 3" in str(error), error
dist.barrier()
dist.destroy_process_group()
sys.stdout.write(f"rank {rank} is done\\n")
"""


def supervise(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringreduce.supervise", *arguments]
    return launchers.run(command)


def test_newcomers_join_while_another_place_is_vacant(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "lives").mkdir()
    port = free_port()
    command = "-m ringreduce.supervise --restarts 3 --nnodes 2 --nproc 2"
    command += f" --master-addr 127.0.0.1 --master-port {port} --node-rank"
    supervisors = [
        subprocess.Popen(
            [sys.executable, *command.split(), str(node), str(script), str(tmp_path / "lives")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    told = [supervisor.communicate(timeout=900) for supervisor in supervisors]
    stdout, stderr = ("".join(texts) for texts in zip(*told, strict=True))
    done = [f"rank {rank} is done" for rank in (0, 1, 2)]
    assert sorted(stdout.splitlines()) == done, stderr
    assert "rank 1 ended with signal SIGKILL; it is started again" in stderr
    assert "joined; 3 of 4 ranks go on" in stderr


HEAD = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import ringreduce
from ringreduce import elastic

ringreduce.init()
rank, life = dist.get_rank(), Path(sys.argv[1], os.environ["RANK"])
lives = len(life.read_text()) if life.exists() else 0
life.write_text("x" * (lives + 1))
"""
END = """
dist.destroy_process_group()
sys.stdout.write(f"rank {rank} is done\\n")
"""


def supervised_lives(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Ranks that know how many processes have been in their place before."""
    script = folder / "script.py"
    script.write_text(HEAD + body + END)
    (folder / "lives").mkdir()
    return supervise(*options, str(script), str(folder / "lives"))


OTHER_MODEL = """
net = torch.nn.Linear(8, 4 if lives == 1 else 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
dice = torch.Generator().manual_seed(rank + 10 * lives)
state = elastic.State(net=net, optimizer=optimizer, dice=dice, drawn=0.0, step=0)
try:
    state.restore()
except ValueError as error:
    print("refused:", error, file=sys.stderr)
    sys.exit(7)
while state.step < 20 or len(state.live_ranks) < 2:
    state.step += 1
    state.drawn = torch.rand((), generator=dice).item()
    if state.step == 10 and rank == 0 and lives == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.002)
    state.commit()
    agreed = torch.tensor([state.drawn, -state.drawn], dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    assert agreed[0] == -agreed[1], "the ranks drew different numbers"
"""


def test_a_newcomer_with_another_model_is_refused(tmp_path: Path) -> None:
    done = supervised_lives(tmp_path, OTHER_MODEL, "--nproc", "2")
    assert sorted(done.stdout.split("\n"))[1:] == ["rank 0 is done", "rank 1 is done"], done
    text = "rank 0 cannot join, because its State differs from that of the running ranks: "
    text += "bias of part net is torch.float32 of shape (4,) on rank 0 and torch.float32 of "
    text += "shape (3,) on rank 1; weight of part net"
    assert "refused: " + text in done.stderr, done.stderr
    assert done.stderr.count(text) == 2  # rank 1 logs it once
    assert "asks again to join" not in done.stderr and "cannot let ranks" not in done.stderr


CODED = """
from torch.nn.parallel import DistributedDataParallel
net = torch.nn.Linear(40, 100, bias=False)
model = DistributedDataParallel(net, init_sync=False)
hook = ringreduce.register_comm_hook(model, codec="int4", stochastic=True, start_after=2)
state = elastic.State(model=model, step=0)

def gradient(rank):
    return torch.randn(100, 40, generator=torch.Generator().manual_seed(1000 * rank + state.step))

def mean_residual():
    held = hook.residual("weight")
    held = torch.zeros(100, 40) if held is None else held
    dist.all_reduce(held, op=dist.ReduceOp.AVG)
    return held.double()

state.restore()
assert lives == 0 or (state.step >= 10 and hook.steps == state.step)
before = None
while state.step < 20 or len(state.live_ranks) < 3:
    (model(torch.eye(40)).T * gradient(rank)).sum().backward()
    state.step += 1
    if state.step == 10 and rank == 1 and lives == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.002)
    before = hook.residual("weight")
    was = state.live_ranks
    state.commit()
    if len(state.live_ranks) > len(was):
        assert before.any() and torch.equal(hook.residual("weight"), before)
owed, total, wanted = mean_residual(), 0, 0
for _ in range(6):
    net.weight.grad = None
    (model(torch.eye(40)).T * gradient(rank)).sum().backward()
    total = total + net.weight.grad.double()
    wanted = wanted + sum(gradient(r).double() for r in range(3)) / 3
    assert (total - wanted).abs().max() > 1e-3  # it is coded
    state.step += 1
    state.commit()
ends = torch.stack([net.weight.grad, -net.weight.grad])
dist.all_reduce(ends, op=dist.ReduceOp.MAX)
assert torch.equal(ends[0], -ends[1]), "the ranks have different bits"
assert (total + mean_residual() - owed - wanted).abs().max() < 1e-5
"""


@pytest.mark.nightly
def test_residuals_stay_when_a_rank_joins(tmp_path: Path) -> None:
    done = supervised_lives(tmp_path, CODED, "--nproc", "3", "--restarts", "1")
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {r} is done" for r in range(3)], done


def test_supervise_starts_lost_ranks_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    done = supervise("--nproc", "2", "--restarts", "0", str(script))
    assert done.returncode == 1
    assert "rank 1 ended with exit status 7" in done.stderr
    script.write_text("import sys; sys.exit(7)")
    done = supervise("--nproc", "1", "--restarts", "2", str(script))
    assert done.returncode == 1 and done.stderr.count("it is started again") == 2, done


def test_supervise_keeps_nothing_in_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other programs may clean it away, or write."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, pathlib, shutil, time
for folder in pathlib.Path(os.environ["TMPDIR"]).glob("*/"):
    (folder / "²").touch()
    time.sleep(0.5)
    shutil.rmtree(folder)
    time.sleep(0.5)
"""
    )
    done = supervise("--nproc", "1", str(script))
    assert done.returncode == 0, done


TELLS = """
import os, subprocess, sys
from ringreduce.core import joining

def without_proc(function):
    def call(path, *arguments, **others):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return function(path, *arguments, **others)
    return call

if os.environ["RANK"] == "0":  # as in another PID namespace
    os.stat, os.readlink = without_proc(os.stat), without_proc(os.readlink)
elif len(sys.argv) == 1:  # in a program that this one starts, without its descriptors
    sys.exit(subprocess.run([sys.executable, __file__, "again"]).returncode)
joining.tell_supervisor(os.environ["RANK"])
"""


def test_supervise_hears_from_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    ranks = Ranks([sys.executable, str(script)], 2, 0)
    for rank in ranks.all:
        ranks.start_again(rank)
    for process in ranks.running.values():
        assert process.wait(120) == 0
    ranks.start(0)  # hears first what the last processes have said
    ranks.end()
    assert ranks.was_made and not ranks.waiting


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_supervise_ends_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    # In one write: the ranks share a pipe.
    script.write_text("import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(240)")
    command = [sys.executable, "-m", "ringreduce.supervise", "--nproc", "2", str(script)]
    # Under nohup it would ignore SIGHUP, as it should.
    heed = partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=heed
    ) as supervisor:
        try:
            assert supervisor.stdout is not None
            ranks = [int(supervisor.stdout.readline()) for _ in range(2)]
            supervisor.send_signal(number)
            assert supervisor.wait(60) == 128 + number
        finally:
            supervisor.kill()
    assert not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc", "0", "x.py"], "--nproc of at least 1 and a script are needed"),
        (["--store-only"], "--store-only goes with --master-port"),
        (["--nproc", "2", "--restarts", "-1", "x.py"], "--restarts must be at least 0"),
        (["--nproc", "2", "--nnodes", "2", "x.py"], "need --master-addr and --master-port"),
    ],
)
def test_supervise_refuses(arguments: list[str], says: str) -> None:
    done = supervise(*arguments)
    assert done.returncode == 2 and says in done.stderr


# ---- what is refused


def go_on_without_store(me: Rank) -> int:
    """Steps of a rank whose store is lost, until another one is lost too, and after that."""

    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection refused")

    state = elastic.State(step=0, join_seconds=timedelta(seconds=5))
    state.restore()
    state._store = Lost()
    while state.step < 20 or len(state.live_ranks) == me.world_size:
        state.step += 1
        state.commit()
        if state.step == 5:
            me.tell("flowing")
    for _ in range(30):
        time.sleep(0.01)
        state.commit()
    return len(state.live_ranks)


def test_a_lost_store_costs_only_the_newcomers(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(go_on_without_store, world(3, ON_LOSS="continue"))
    call.hear_all("flowing")
    call.signal(0, signal.SIGKILL)
    outcomes = call.outcomes()
    assert [o.value for o in outcomes if isinstance(o, Done)] == [2, 2], outcomes
    assert call.log(1).count("no new ranks can join, since the store is lost") == 1


def admit_nobody(me: Rank, ending: str) -> tuple[str, float]:
    """Rank 0 waits for a newcomer that never comes, until another thread ends that."""
    backend: Any = backend_of(dist.group.WORLD)
    errors: list[str] = []

    def prepare() -> None:
        try:
            extension().prepare(backend, "a place of its own", [0, 1], 60.0)
        except ringreduce.Aborted as error:
            errors.append(str(error))

    took = 0.0
    if me.rank == 0:
        thread = threading.Thread(target=prepare)
        thread.start()
        time.sleep(0.3)
        begin = time.monotonic()
        getattr(backend, ending)()
        thread.join(30)
        took = time.monotonic() - begin
        if ending == "shutdown":
            prepare()  # a later one ends too
    return " ".join(errors), took


@pytest.mark.parametrize("ending", ["abort", "shutdown"])
def test_another_thread_ends_a_join(pool: Pool, world: MakeWorld, ending: str) -> None:
    call = pool.start(admit_nobody, world(2, ON_LOSS="continue"), ending, remade=True)
    text, took = call.results()[0]
    why = "abort() was called" if ending == "abort" else "its group was destroyed"
    ended = f"gave up while newcomers joined: {why}"
    assert text.startswith("rank 0") and text.count(ended) == (1 if ending == "abort" else 2), text
    assert took < 10


def accumulate(me: Rank, samples: int) -> list[list[int]]:
    """The samples of each epoch; commits after three batches, and at will."""
    sampler = elastic.ElasticSampler(samples, 2)
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    ringreduce.register_comm_hook(net)
    state = elastic.State(sampler=sampler, net=net.module)
    assert list(state._models) == [net]
    state.restore()
    with pytest.raises(RuntimeError, match="restore\\(\\) is called once"):
        elastic.State().restore()
    epochs: list[list[int]] = []
    while sampler.epoch < 3:
        epochs.append([])
        for number, batch in enumerate(state.batches(sampler)):
            epochs[-1] += batch
            if number % 3 == 2 or state.is_last_batch:
                state.commit()
        state.commit()  # counts no batch
    with pytest.raises(RuntimeError, match="the loader has more batches"):
        list(state.batches([0] * 100))
    with pytest.raises(RuntimeError, match="batches used and not committed"):
        list(state.batches(sampler))
    return epochs


@pytest.mark.parametrize("samples", [12, 16, 29])
def test_commits_count_the_batches_that_were_given(
    pool: Pool, world: MakeWorld, samples: int
) -> None:
    ranks = pool.start(accumulate, world(2, ON_LOSS="continue"), samples, remade=True).results()
    for epochs in zip(*ranks, strict=True):
        assert set(epochs[0]) | set(epochs[1]) == set(range(samples))


def restore_late(me: Rank) -> str:
    me.tell("ready")
    while len(ringreduce.live_ranks()) == me.world_size:
        time.sleep(0.01)
    try:
        elastic.State(step=me.rank).restore()
    except ringreduce.PeerLost as error:
        return str(error)
    return ""


def test_without_rank_0_there_is_no_state_to_start_from(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(restore_late, world(3, ON_LOSS="continue"), remade=True)
    call.hear_all("ready")
    call.signal(0, signal.SIGKILL)
    for outcome in call.outcomes()[1:]:
        assert isinstance(outcome, Done) and "rank 0" in outcome.value, outcome


def start_under_torchrun(me: Rank, name: str, size: int) -> float:
    os.environ |= {"RINGREDUCE_ON_LOSS": "continue", "TORCHELASTIC_RUN_ID": "job"}
    dist.init_process_group(me.backend, store=me.store(name), rank=me.rank, world_size=size)
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()


def test_torchruns_restart_is_no_join(pool: Pool, world: MakeWorld) -> None:
    """All ranks start anew on the store of the last start, with the same restart count."""
    name = pool.name("restart")
    for size in (3, 2):
        call = pool.start(start_under_torchrun, world(0), name, size, ranks=size, fresh=True)
        assert call.results() == [size] * size


def make_or_join(me: Rank, name: str, options: dict[str, Any]) -> bool:
    """Whether the group is made at once."""
    dist.init_process_group(
        "ringreduce",
        store=me.store(name),
        rank=me.rank,
        world_size=2,
        pg_options=ringreduce.Options(**options),
    )
    return bool(extension().is_connected(backend_of(dist.group.WORLD)))


def test_the_caller_can_say_whether_it_joins(pool: Pool, world: MakeWorld) -> None:
    def made(join: bool | str, name: str) -> list[bool]:
        options = {"on_loss": "continue", "join": join}
        call = pool.start(make_or_join, world(0), name, options, ranks=2, fresh=True)
        return [bool(result) for result in call.results()]

    name = pool.name("join")
    assert made("auto", name) == [True, True]  # and marks the store
    assert made("auto", name) == [False, False]
    assert made(False, name) == [True, True]
    assert made(True, pool.name("join")) == [False, False]
    assert pickle.loads(pickle.dumps(ringreduce.Options(join=True))).join is True
    call = pool.start(make_or_join, world(0), name, {"join": True}, ranks=2, fresh=True)
    for outcome in call.outcomes():
        assert isinstance(outcome, Raised) and outcome.isa("ValueError"), outcome
        assert "join=True needs on_loss='continue'" in outcome.message
    with pytest.raises(ValueError, match="join can be 'auto', True or False, not 'never'"):
        ringreduce.Options(join="never")
    with pytest.raises(ValueError, match="not 1"):  # it equals True, and is not taken for it
        ringreduce.Options(join=1)  # type: ignore[arg-type]


def lose_the_root(me: Rank) -> list[float]:
    """Gradients after the loss of rank 0 between the broadcasts of a rebuild of DDP's buckets."""
    net = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(5)))
    for layer in net:
        torch.nn.init.ones_(layer.weight)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    ringreduce.register_comm_hook(model)
    state = elastic.State(model=model)
    state.restore()
    model(torch.ones(1, 1) * me.rank).sum().backward()
    state.commit()
    if me.rank == 0:
        # The last number is that of the buckets; the other ranks have another one.
        dist.broadcast(torch.tensor([0, 1, 2, 3, 4, 3], dtype=torch.int32), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        net.zero_grad()
        model(torch.ones(1, 1) * me.rank).sum().backward()
        state.commit()
    return [layer.weight.grad.item() for layer in net]


def test_a_rebuild_of_buckets_has_one_root(pool: Pool, world: MakeWorld) -> None:
    outcomes = pool.start(lose_the_root, world(3, ON_LOSS="continue"), remade=True).outcomes()
    assert [o.value for o in outcomes if isinstance(o, Done)] == [[1.5] * 5] * 2, outcomes


def make_state(me: Rank, what: str) -> None:
    net = torch.nn.Linear(2, 2)
    parts: dict[str, Any] = {"step": 0}
    if what == "no hook":
        parts["model"] = DistributedDataParallel(net)
    elif what in ("auto", "residuals"):
        parts["model"] = DistributedDataParallel(net)
        codec = "auto" if what == "auto" else "int8"
        hook = ringreduce.register_comm_hook(parts["model"], codec=codec)
        if what == "residuals":
            parts["hook"] = hook
    elif what == "other group":
        parts["model"] = DistributedDataParallel(net, process_group=dist.new_group())
    elif what == "name":
        parts["commit"] = 1
    state = elastic.State(**parts)
    if what == "no restore":
        state.commit()


@pytest.mark.parametrize(
    ("what", "on_loss", "says"),
    [
        ("group", "error", "needs a default group of the backend ringreduce that goes on"),
        ("no hook", "continue", "register ringreduce's hook on each"),
        ("auto", "continue", 'cannot have codec="auto"'),
        ("residuals", "continue", "the CompressionState 'hook' is no part of the State"),
        ("other group", "continue", "must be on the default group"),
        ("name", "continue", "a part of the state cannot be called 'commit'"),
        ("no restore", "continue", "call restore\\(\\) before the first step"),
    ],
)
def test_state_refuses(pool: Pool, world: MakeWorld, what: str, on_loss: str, says: str) -> None:
    outcomes = pool.start(make_state, world(2, ON_LOSS=on_loss), what).outcomes()
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(outcome.message)


# ---- the sampler

RANKS = [0, 2, 3]


def draw(samplers: dict[int, elastic.ElasticSampler], lost: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    """One step of all ranks; the samples of those that are not lost in it."""
    batches = {rank: next(iter(sampler)) for rank, sampler in samplers.items()}
    there = [rank for rank in samplers if rank not in lost]
    for rank in there:
        samplers[rank]._commit(there, 1)
        if lost:
            samplers[rank]._share(there, rank)
    for rank in lost:
        del samplers[rank]
    return [sample for rank in there for sample in batches[rank]]


@pytest.mark.parametrize("samples", [1, 11, 12, 13, 100])
@pytest.mark.parametrize("lost_in", [0, 1, 8])
def test_each_sample_is_seen_whoever_is_lost(samples: int, lost_in: int) -> None:
    samplers = {rank: elastic.ElasticSampler(samples, 4, seed=3) for rank in RANKS}
    for rank, sampler in samplers.items():
        sampler._share(RANKS, rank)
    seen: list[int] = []
    step = 0
    while len(samplers[0]) > 0:
        assert len({len(sampler) for sampler in samplers.values()}) == 1
        seen += draw(samplers, {2} if step == lost_in else set())
        step += 1
    assert set(seen) == set(range(samples))
    # Nothing is repeated but what fills up the last step, once after the loss too.
    assert len(seen) < samples + 2 * 12


def test_a_newcomer_draws_what_the_others_draw() -> None:
    samplers = {rank: elastic.ElasticSampler(100, 4, seed=3) for rank in RANKS}
    for rank, sampler in samplers.items():
        sampler._share(RANKS, rank)
    seen = draw(samplers) + draw(samplers, {3})
    new = elastic.ElasticSampler(100, 4, seed=77)
    new.load_state_dict(samplers[0].state_dict())
    samplers[1] = new
    for rank, sampler in samplers.items():
        sampler._share(sorted(samplers), rank)
    while len(samplers[0]) > 0:
        seen += draw(samplers)
    assert set(seen) == set(range(100)) and len(seen) < 112
    for sampler in samplers.values():
        sampler._next_epoch()
    assert len(set(map(tuple, (s._rest.tolist() for s in samplers.values())))) == 1


def test_sampler_refuses() -> None:
    with pytest.raises(ValueError, match="both must be above 0"):
        elastic.ElasticSampler(0, 4)
    with pytest.raises(ValueError, match="samples=10 does not fit one with samples=11"):
        elastic.ElasticSampler(11, 4).load_state_dict(elastic.ElasticSampler(10, 4).state_dict())
