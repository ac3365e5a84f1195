"""ringreduce.elastic: ranks that are started again join the others, and take over their state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import survive_faults
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Done, Pool, Raised, Rank
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import elastic

pytestmark = [
    pytest.mark.ringreduce,
    pytest.mark.skipif(os.environ.get("RINGREDUCE_WIRE") == "tcp", reason="needs shared memory"),
]


def faults(runs: int) -> None:
    first = int(os.environ.get("RINGREDUCE_SEED", int.from_bytes(os.urandom(3), "big")))
    joined = 0
    for ended in survive_faults.runs(range(first, first + runs), at_once=2):
        assert not ended.wrong, f"make survive RUNS=1 SEED={ended.seed}: {ended.wrong}"
        joined += ended.joined
    assert joined > 0


def test_random_faults() -> None:
    faults(4)


@pytest.mark.slow
def test_many_random_faults() -> None:
    faults(20)  # 300 faults


# ---- a newcomer, while another rank's place stays vacant

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import ringreduce
from ringreduce import elastic

ringreduce.init()
rank, first = dist.get_rank(), Path(sys.argv[1], os.environ["RANK"])
is_first = not first.exists()
first.touch()
if not is_first:
    if rank == 3:
        sys.exit(7)  # its place stays vacant
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
    if state.step == 10 and is_first and rank in (1, 3):
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
    lambda: dist.all_gather([torch.ones(1)] * 4, out),
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
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_newcomer_joins_while_another_place_is_vacant(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "lives").mkdir()
    done = supervise("--nproc", "4", "--restarts", "2", str(script), str(tmp_path / "lives"))
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {r} is done" for r in (0, 1, 2)], done
    assert "rank 1 ended with signal SIGKILL; it is started again" in done.stderr
    assert "rank 1 joined; 3 of 4 ranks go on" in done.stderr


def test_supervise_starts_lost_ranks_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    done = supervise("--nproc", "2", "--restarts", "0", str(script))
    assert done.returncode == 1
    assert "rank 1 ended with exit status 7" in done.stderr
    script.write_text("import sys; sys.exit(7)")
    done = supervise("--nproc", "1", "--restarts", "2", str(script))
    assert done.returncode == 1 and done.stderr.count("it is started again") == 2, done


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc", "0", "x.py"], "--nproc of at least 1 and a script are needed"),
        (["--store-only"], "--store-only goes with --master-port"),
        (["--nproc", "2", "--restarts", "-1", "x.py"], "--restarts must be at least 0"),
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

    state = elastic.State(step=0)
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
    for rank in range(3):
        assert call.heard(rank) == "flowing"
    call.signal(0, signal.SIGKILL)
    outcomes = call.outcomes()
    assert [o.value for o in outcomes if isinstance(o, Done)] == [2, 2], outcomes
    assert call.log(1).count("no new ranks can join, since the store is lost") == 1


def accumulate(me: Rank, samples: int) -> list[list[int]]:
    """The samples of each epoch; commits after three batches, and at will."""
    sampler = elastic.ElasticSampler(samples, 2)
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    ringreduce.register_comm_hook(net)
    state = elastic.State(sampler=sampler, net=net.module)
    assert state._models == [net]
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
    for rank in range(3):
        assert call.heard(rank) == "ready"
    call.signal(0, signal.SIGKILL)
    for outcome in call.outcomes()[1:]:
        assert isinstance(outcome, Done) and "rank 0" in outcome.value, outcome


def make_state(me: Rank, what: str) -> None:
    net = torch.nn.Linear(2, 2)
    parts: dict[str, Any] = {"step": 0}
    if what == "no hook":
        parts["model"] = DistributedDataParallel(net)
    elif what == "codec":
        parts["model"] = DistributedDataParallel(net)
        ringreduce.register_comm_hook(parts["model"], codec="int8")
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
        ("no hook", "continue", "register ringreduce's hook without a codec"),
        ("codec", "continue", "register ringreduce's hook without a codec"),
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
