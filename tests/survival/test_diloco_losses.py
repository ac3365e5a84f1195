"""ringreduce.DiLoCo: survivors finish the round in which a rank is lost; newcomers take part."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Died, Done, Pool, Rank
from test_elastic import supervised_lives
from test_survive import every_wire, on, ranks_in_a_sum, run_and_kill

import ringreduce


def train_on(
    me: Rank, settings: dict[str, Any], rounds_after: int, lost: int = 1
) -> list[tuple[str, str]]:
    """Digests of the global parameters, and of the local ones where a round has just set them, of
    the last rounds; until `rounds_after` rounds without all `lost` ranks."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(me.rank)
    kept: list[tuple[str, str]] = []
    left = rounds_after
    with ringreduce.DiLoCo(model, optimizer, sync_every=4, **settings) as diloco:
        while left > 0:
            x = torch.randn(16, 64, generator=draw)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            if diloco.step % 4 == 0:
                shared = oracle.digest(*diloco.state_dict()["parameters"].values())
                whole = settings["fragments"] == 1 and not settings["overlap"]
                kept.append((shared, oracle.digest(*model.parameters()) if whole else ""))
                left -= ranks_in_a_sum() == me.world_size - lost
            if diloco.step == 8:
                me.tell("flowing")
        diloco.sync()
        kept.append(("", oracle.digest(*model.parameters())))
        assert all(p.isfinite().all() for p in model.parameters())
    return kept[-rounds_after - 5 :]


@every_wire
def test_sigkill_costs_no_round(pool: Pool, world: MakeWorld, full: bool, wire: str) -> None:
    """All survivors have the same bits after each round, whenever ranks are killed."""
    seed = int(os.environ.get("RINGREDUCE_SEED", random.randrange(10**6)))
    print(f"RINGREDUCE_SEED={seed}")
    draw = random.Random(seed)
    codecs = draw.sample([None, "int8", "int4", "topk:0.02+int2"], 4)
    for trial in range(40 if full else 4):
        size = draw.choice([2, 3, 4])
        victims = draw.sample(range(size), draw.randint(1, size - 1) if trial % 4 == 3 else 1)
        fragments, overlap = [(1, 0), (2, 3)][trial % 2]
        settings = {
            "fragments": fragments,
            "overlap": overlap,
            "codec": codecs[(trial + trial // 4) % 4],
        }
        call = pool.start(train_on, world(size, **on(wire)), settings, 6, len(victims))
        values = run_and_kill(call, victims, draw)
        case = f"RINGREDUCE_SEED={seed}, trial {trial}: {victims} of {size}, {settings}"
        assert all(value == values[0] for value in values), case


def go_on_in_a_new_group(me: Rank, prefix: str, under_way: bool) -> list[str]:
    """Digests of the global parameters where the loss was seen, and after a round of the others.
    `under_way`: a round is, whose failure is seen by `sync_from` alone."""
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(me.rank)

    def learn() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=draw)).square().mean().backward()
        optimizer.step()

    def shared() -> str:
        return oracle.digest(*diloco.state_dict()["parameters"].values())

    # Rounds begin in even steps and are applied in odd ones: no step that changes the global
    # parameters is followed by a wait for a round that fails.
    with ringreduce.DiLoCo(model, optimizer, sync_every=4, fragments=2, overlap=1) as diloco:
        while diloco.step < 20:
            if diloco.step == 13 and me.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                before = shared()  # it waits for rounds under way
                learn()
                if under_way and diloco.step == 14:
                    dist.all_reduce(torch.ones(1))
            except ringreduce.PeerLost as error:
                assert error.rank == 1
                break
        assert diloco.step < 20 and (under_way or shared() == before)
        dist.destroy_process_group()
        me.init(prefix, rank=me.rank // 2, size=2)
        diloco.sync_from(1)
        found = [before, shared()]
        while diloco.step < 30:
            learn()
        diloco.sync()
        return [*found, shared(), oracle.digest(*model.parameters())]


@pytest.mark.parametrize("under_way", [False, True], ids=["", "a round is under way"])
def test_training_goes_on_in_a_new_group(pool: Pool, world: MakeWorld, under_way: bool) -> None:
    """A round that fails leaves the global parameters as they were."""
    call = pool.start(go_on_in_a_new_group, world(3), pool.name(), under_way, remade=True)
    first, lost, last = call.outcomes()
    assert isinstance(lost, Died) and isinstance(first, Done) and isinstance(last, Done), (
        first,
        last,
    )
    assert first.value[1:] == last.value[1:] and last.value[0] == last.value[1]


JOINS = """
import oracle
torch.manual_seed(rank)  # they differ at first
model = torch.nn.Linear(64, 32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
diloco = ringreduce.DiLoCo(model, optimizer, sync_every=4, fragments=FRAGMENTS, overlap=OVERLAP)
state = elastic.State(model=model, optimizer=optimizer, diloco=diloco, joined=0)
state.restore()
draw = torch.Generator().manual_seed(rank + 10 * lives)
with diloco:
    assert lives == 0 or diloco.step >= 20
    if lives:
        assert not diloco.state_dict()["residuals"]
        for name, value in diloco.state_dict()["parameters"].items():
            assert torch.equal(model.get_parameter(name), value)
    while state.joined < 6:
        x = torch.randn(16, 64, generator=draw)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if diloco.step == 18 and rank == 1 and lives == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if diloco.step % 4 == 0:
            kept = diloco.state_dict()
            momenta = [s["momentum_buffer"] for s in kept["outer_optimizer"]["state"].values()]
            digest = int(oracle.digest(*kept["parameters"].values(), *momenta)[:12], 16)
            mine = torch.tensor([digest, diloco.step, diloco.rounds])
            agreed = torch.cat([mine, -mine])
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            assert agreed[:3].equal(-agreed[3:]), "the ranks have other bits"
            state.joined += len(state.live_ranks) == 3 and diloco.step > 20
            time.sleep(0.05)  # the new process needs the cores
            state.commit()
    diloco.sync()
"""


@pytest.mark.skipif(os.environ.get("RINGREDUCE_WIRE") == "tcp", reason="needs shared memory")
@pytest.mark.parametrize(
    ("fragments", "overlap"), [pytest.param(1, 0, marks=pytest.mark.nightly), (2, 3)]
)
def test_a_newcomer_takes_part_in_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fragments: int, overlap: int
) -> None:
    """With averages under way while it joins, too."""
    monkeypatch.setenv("PYTHONPATH", str(Path(oracle.__file__).parent), prepend=os.pathsep)
    body = JOINS.replace("FRAGMENTS", str(fragments)).replace("OVERLAP", str(overlap))
    done = supervised_lives(tmp_path, body, "--nproc", "3", "--restarts", "1")
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {r} is done" for r in range(3)], done
    assert "joined; 3 of 3 ranks go on" in done.stderr, done.stderr
