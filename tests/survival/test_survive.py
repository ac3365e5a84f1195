"""Groups with on_loss="continue": survivors finish the operation in which a rank is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from blame import expect, expect_all
from conftest import MakeWorld
from pool import Call, Died, Done, Pool, Raised, Rank
from test_children import without_pidfds
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.core.backend import backend_of, extension

WIRES = ["tcp"] if os.environ.get("RINGREDUCE_WIRE") == "tcp" else ["memory", "tcp"]
every_wire = pytest.mark.parametrize("wire", WIRES)


def on(wire: str) -> dict[str, str]:
    """Settings of a group that goes on after losses."""
    return {"ON_LOSS": "continue", **({"WIRE": "tcp"} if wire == "tcp" else {})}


OPS = {"SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG, "BOR": dist.ReduceOp.BOR}
AFTER = 30  # calls of the survivors after the loss


def addend(rank: int) -> int:
    return 1 << 5 * rank


def contributors(t: torch.Tensor, op: str, size: int) -> set[int]:
    """The ranks, as bits, whose addends some element has; fails where no ranks give the element."""
    masks = range(1, 1 << size)
    sums = {m: float(sum(addend(r) for r in range(size) if m >> r & 1)) for m in masks}
    found = set()
    for value in t.double().unique().tolist():
        ranks = {m: m.bit_count() if op == "AVG" else 1 for m in masks}
        of_value = [m for m in masks if abs(sums[m] / ranks[m] - value) < 1e-3]
        assert len(of_value) == 1, f"{value} is not {op} over any ranks"
        found.add(of_value[0])
    return found


def reduce_on(
    me: Rank, n: int, op: str, dtype: str, style: str, lost: int
) -> list[tuple[bytes, set[int]]]:
    """All-reduces until AFTER results lack all `lost` ranks, so that none ends before its loss.
    Returns the last results: the bytes, and the sets of ranks whose addends an element has."""
    mine = torch.full((n,), addend(me.rank), dtype=getattr(torch, dtype))
    results: list[tuple[bytes, set[int]]] = []
    left = AFTER
    while left > 0:
        t = mine.clone()
        work = dist.all_reduce(t, op=OPS[op], async_op=style == "async")
        if work is not None:
            work.wait()
        if style == "barriers":
            dist.barrier()
        results.append((t.numpy().tobytes(), contributors(t, op, me.world_size)))
        if len(results) == 4:
            me.tell("flowing")
        results = results[-AFTER - 5 :]
        left -= all(mask.bit_count() == me.world_size - lost for mask in results[-1][1])
    return results


def run_and_kill(call: Call, victims: list[int], draw: random.Random) -> list[Any]:
    """The survivors' values."""
    call.hear_all("flowing")
    for victim in victims:
        time.sleep(draw.random() * 0.03)
        call.signal(victim, signal.SIGKILL)
    outcomes = call.outcomes()
    for outcome in outcomes:
        wanted = Died if outcome.rank in victims else Done
        assert isinstance(outcome, wanted), f"rank {outcome.rank}: {outcome}"
    return [outcome.value for outcome in outcomes if isinstance(outcome, Done)]


@every_wire
def test_sigkill_costs_no_all_reduce(pool: Pool, world: MakeWorld, full: bool, wire: str) -> None:
    """Each result is the same on all survivors, over all ranks or over all but the lost."""
    seed = int(os.environ.get("RINGREDUCE_SEED", random.randrange(10**6)))
    print(f"RINGREDUCE_SEED={seed}")
    draw = random.Random(seed)
    for trial in range(100 if full else 10):
        size = draw.choice([2, 3, 4])
        victims = draw.sample(range(size), draw.randint(1, size - 1) if trial % 3 == 0 else 1)
        op = draw.choice(list(OPS))
        dtype = "int32" if op == "BOR" else draw.choice(["float32", "float64", "int32"])
        dtype = "float32" if op == "AVG" else dtype
        n, style = draw.choice([1, 1000, 300_000]), draw.choice(["blocking", "async", "barriers"])
        case = f"trial {trial}: {victims} of {size}, {n} {dtype}, {op}, {style}"
        env = {**on(wire), "ALGORITHM": draw.choice(["auto", "direct", "twoshot"])}
        call = pool.start(reduce_on, world(size, **env), n, op, dtype, style, len(victims))
        values = run_and_kill(call, victims, draw)
        live = sum(1 << r for r in range(size) if r not in victims)
        for results in values:
            assert results == values[0], f"{case}: survivors have other bits"
            assert all(mask & live == live for _, masks in results for mask in masks), case
            assert results[-1][1] == {live}, case
        if len(victims) == 1:  # first the slices that include it, then the others
            assert all(mask in (live, (1 << size) - 1) for r in values[0] for mask in r[1]), case


def ranks_in_a_sum() -> int:
    """The same number on all survivors, who may notice a loss at different moments."""
    t = torch.ones(1)
    dist.all_reduce(t)
    return int(t)


def add_by_rank(me: Rank, victim: int) -> bool:
    """Whether a sum after the loss is that of the others' values in ascending order."""
    inputs = [oracle.make_input("float32", "SUM", 9001, r, 1) for r in range(me.world_size)]
    dist.barrier()
    if me.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while ranks_in_a_sum() == me.world_size:
        pass
    t = inputs[me.rank].clone()
    dist.all_reduce(t)
    del inputs[victim]
    return torch.equal(t, oracle.exact(inputs, "SUM", by_rank=True))


@every_wire
def test_survivors_add_by_rank(pool: Pool, world: MakeWorld, wire: str) -> None:
    settings = {**on(wire), "ORDER": "rank", "RING": "2,4,0,3,1"}
    outcomes = pool.start(add_by_rank, world(5, **settings), 1, remade=True).outcomes()
    assert [outcome.rank for outcome in outcomes if outcome == Done(outcome.rank, True)] == [
        0, 2, 3, 4
    ]  # fmt: skip


def train_on(me: Rank, way: str, steps_after: int) -> tuple[list[bytes], list[int], float]:
    """Trains until `steps_after` steps without the lost rank; the weights of the last steps."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    model: torch.nn.Module = net
    if way != "loop":
        model = DistributedDataParallel(net, bucket_cap_mb=0.05)
        if way == "ddp":
            ringreduce.register_comm_hook(model)
        else:
            ringreduce.register_comm_hook(model, codec=way)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(me.rank)
    weights: list[bytes] = []
    loss = torch.zeros(())
    step = 0
    while steps_after > 0:
        x = torch.randn(16, 64, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if way == "loop":
            ringreduce.average_gradients(net)
        optimizer.step()
        weights.append(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
        weights = weights[-steps_after - 5 :]
        step += 1
        if step == 4:
            me.tell("flowing")
        steps_after -= ranks_in_a_sum() < me.world_size
    return weights, ringreduce.live_ranks(), float(loss)


@every_wire
@pytest.mark.parametrize("way", ["ddp", "loop", "int8", "bfloat16"])
def test_training_goes_on_with_equal_weights(
    pool: Pool, world: MakeWorld, full: bool, way: str, wire: str
) -> None:
    draw = random.Random()
    for trial in range(10 if full else 2):
        victim = trial % 3
        call = pool.start(train_on, world(3, **on(wire)), way, 20)
        values = run_and_kill(call, [victim], draw)
        live = [r for r in range(3) if r != victim]
        assert [value[1] for value in values] == [live, live]
        assert values[0][0] == values[1][0], f"rank {victim} of 3, {way}"


def call_all(me: Rank, victim: int) -> dict[str, str]:
    """What each call gives after a loss."""
    dist.barrier()
    me.tell("flowing")
    while ranks_in_a_sum() == me.world_size:
        pass
    found = {}
    t, many = torch.ones(3), [torch.ones(3) for _ in range(me.world_size)]
    live = [r for r in range(me.world_size) if r != victim]

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            found[name] = "done"
        except ringreduce.PeerLost as error:
            found[name] = str(error)
            assert (error.rank, error.reporter, error.final) == (victim, me.rank, False), name

    is_root = me.rank == live[0]
    attempt("live broadcast", lambda: dist.broadcast(t, live[-1]))
    attempt("broadcast", lambda: dist.broadcast(t, victim))
    attempt("all_gather", lambda: dist.all_gather(many, t))
    attempt("all_to_all", lambda: dist.all_to_all(many, list(many)))
    attempt("reduce_scatter", lambda: dist.reduce_scatter(t, many))
    attempt("gather", lambda: dist.gather(t, many if is_root else None, live[0]))
    attempt("reduce", lambda: dist.reduce(t, live[0]))
    attempt("recv", lambda: dist.recv(t, victim))
    attempt("barrier", dist.barrier)
    attempt("monitored_barrier", lambda: dist.group.WORLD.monitored_barrier())
    if is_root:
        dist.send(torch.full((3,), 7.0), live[-1])
    elif me.rank == live[-1]:
        dist.recv(t, live[0])
        assert t.tolist() == [7.0] * 3
    t = torch.ones(3)
    dist.all_reduce(t)
    found["sum"] = str(t.tolist())
    # A part of it belonged to the lost rank.
    average, backend = torch.full((3000,), me.rank + 1.0), backend_of(dist.group.WORLD)
    extension().compressed_all_reduce(
        backend, average, average, codec="bfloat16", op="avg", async_op=False
    )
    found["average"] = str(average.unique().tolist())
    return found


@every_wire
@pytest.mark.parametrize("victim", [0, 2])
def test_calls_that_need_the_lost_rank_raise_and_the_group_goes_on(
    pool: Pool, world: MakeWorld, victim: int, wire: str
) -> None:
    call = pool.start(call_all, world(3, **on(wire)), victim)
    values = run_and_kill(call, [victim], random.Random())
    root = 1 if victim == 0 else 0
    for rank, found in zip([r for r in range(3) if r != victim], values, strict=True):
        done = {"live broadcast", "reduce", "barrier", "monitored_barrier"}
        # Between hosts all ranks raise for the same call.
        done |= {"gather"} if rank != root and wire == "memory" else set()
        for name, text in found.items():
            if name in done:
                assert text == "done", f"{name}: {text}"
            elif name == "sum":
                assert text == "[2.0, 2.0, 2.0]"
            elif name == "average":
                assert text == str([sum(r + 1 for r in range(3) if r != victim) / 2])
            else:
                assert f"rank {victim} (pid " in text and "its process ended" in text, text


def leave_early(me: Rank) -> float:
    t = torch.ones(1000)
    if me.rank == 1:
        dist.destroy_process_group()
        return 0.0
    for _ in range(50):
        t.fill_(1)
        dist.all_reduce(t)
    return float(t[0])


@every_wire
def test_a_rank_that_leaves_is_not_waited_for(pool: Pool, world: MakeWorld, wire: str) -> None:
    call = pool.start(leave_early, world(3, **on(wire)), remade=True)
    assert call.results() == [2.0, 0.0, 2.0]
    assert "rank 1 (pid " in call.log(0) and "has left" in call.log(0)
    assert "2 of 3 ranks go on" in call.log(0)
    assert "go on" not in call.log(2)  # one line is enough


def stop_and_go(me: Rank, victim: int) -> tuple[float, float]:
    dist.barrier()
    me.tell("flowing")
    t = torch.ones(100_000)
    while True:
        t.fill_(1)
        dist.all_reduce(t)
        if t[0] < me.world_size and t[-1] < me.world_size:
            return float(t[0]), float(t[-1])


def test_a_stopped_rank_is_killed_at_the_deadline(pool: Pool, world: MakeWorld) -> None:
    """It could write to the memory of the others later."""
    call = pool.start(stop_and_go, world(3, timeout=2.0, ON_LOSS="continue"), 1, remade=True)
    call.hear_all()
    call.signal(1, signal.SIGSTOP)
    outcomes = call.outcomes()
    assert outcomes[1] == Died(1, -signal.SIGKILL), outcomes
    assert [o.value for o in outcomes if isinstance(o, Done)] == [(2.0, 2.0)] * 2, outcomes
    assert "kills rank 1 (pid " in call.log(0) + call.log(2)


def freeze_and_wake(me: Rank, prefix: str, victim: int) -> set[float]:
    """The values that the calls of the survivors gave once they had gone on."""
    without_pidfds()  # the others can neither see that it is stopped nor kill it
    me.init(prefix, size=3, timeout=2.0)
    me.tell("flowing")
    t = torch.ones(100_000)
    while t[-1] != 2 or t[0] != 2:
        t.fill_(1)
        dist.all_reduce(t)
    me.tell(time.monotonic())
    seen = set()
    until = time.monotonic() + 1
    while min(seen, default=0) >= 0:
        t.fill_(1 if time.monotonic() < until else -10)  # all ranks end with the same call
        dist.all_reduce(t)
        seen |= set(t.unique().tolist())
    return seen


def test_a_frozen_rank_that_cannot_be_killed_is_left_out(pool: Pool, world: MakeWorld) -> None:
    """As in a paused container, or in a PID namespace of its own.  It fails no call of the others
    when it runs again."""
    call = pool.start(
        freeze_and_wake, world(0, ON_LOSS="continue"), pool.name(), 1, ranks=3, fresh=True
    )
    call.hear_all()
    frozen = call.signal(1, signal.SIGSTOP)
    took = max(call.heard(rank) for rank in (0, 2)) - frozen
    call.signal(1, signal.SIGCONT)
    outcomes = call.outcomes()
    assert took < 2.0 + 2.0 + 3.0, f"took {took:.2f} s"
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, Done) and {2.0} < outcome.value <= {2.0, -9.0, -20.0}, outcomes
    expect(outcomes[1], "PeerLost", {1}, r"was left out of group .*Start it again")
    log = call.log(0) + call.log(2)
    assert re.search(r"leaves rank 1 \(pid .* out, whose process does not answer", log), log
    assert "rank 1 (pid " in log and "kills" not in log, log


def reduce_forever(me: Rank) -> None:
    """Tells the number of ranks, whenever it has changed."""
    ranks = 0.0
    while True:
        t = torch.ones(1000)
        dist.all_reduce(t)
        if float(t[0]) != ranks:
            ranks = float(t[0])
            me.tell(ranks)


@every_wire
def test_fewer_than_min_ranks_fail_the_group(pool: Pool, world: MakeWorld, wire: str) -> None:
    call = pool.start(reduce_forever, world(3, MIN_RANKS="2", **on(wire)), remade=True)
    call.hear_all()
    call.signal(0, signal.SIGKILL)
    assert call.heard(2) == 2.0
    call.signal(1, signal.SIGKILL)
    (raised,) = expect_all(call.outcomes(), {0, 1}, "PeerLost", {1})
    assert "1 rank is left" in raised.message and "min_ranks is 2" in raised.message


def make_group(me: Rank, options: dict[str, Any]) -> None:
    dist.init_process_group(
        "ringreduce",
        store=me.store(f"refused {sorted(options.items())}"),
        rank=me.rank,
        world_size=2,
        pg_options=ringreduce.Options(**options),
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_loss": "continue", "min_ranks": 3}, "min_ranks is 3; it can be 1 to 2"),
        ({"on_loss": "continue", "algorithm": "ring"}, "'ring' cannot go on after a loss"),
        ({"order": "rank", "algorithm": "hierarchical"}, "'hierarchical' cannot add in the order"),
    ],
)
def test_what_cannot_be_is_refused_when_the_group_is_made(
    pool: Pool, world: MakeWorld, options: dict[str, Any], says: str
) -> None:
    call = pool.start(make_group, world(0), options, ranks=2, fresh=True)
    for outcome in call.outcomes():
        assert isinstance(outcome, Raised) and outcome.isa("ValueError"), outcome
        assert re.search(says, outcome.message), outcome.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_loss": "ignore"}, "on_loss can be 'error' or 'continue', not 'ignore'"),
        ({"on_loss": "continue", "min_ranks": 0}, "min_ranks must be at least 1, not 0"),
        ({"min_ranks": 2}, "min_ranks needs on_loss='continue'"),
        ({"order": "host"}, "order can be 'ring' or 'rank', not 'host'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ringreduce.Options(**options)
