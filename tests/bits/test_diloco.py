"""ringreduce.DiLoCo: every round has the bits of an oracle, on all ranks, also after a restart."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diloco_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks
from ranks import same_on_all
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.core.backend import backend_of, extension
from ringreduce.sparse import SparseAverage

SPARSE = "topk:0.02+int2"
CODECS = (None, "bfloat16", "float16", "int8", "int4", SPARSE)


class Net(torch.nn.Module):
    """Of four dtypes, with a parameter that does not train, one that is tied, and a buffer.  A
    message of it has two blocks of the sparse codec."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(37, 141)
        self.middle = torch.nn.Linear(141, 23, dtype=torch.bfloat16)
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.last = torch.nn.Linear(23, 19, dtype=torch.float64)
        self.norm = torch.nn.BatchNorm1d(19)
        self.small = torch.nn.Parameter(torch.full((19, 3), 0.1, dtype=torch.float16))
        self.tied = self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle((self.first(x).tanh() + self.tied).bfloat16())
        x = self.norm(self.last(x.double().tanh()).float())
        return (x @ self.small.float()).square().mean()


# In one fragment, in two and in three, as nearly equal as they can be.
NAMES = ("small", "tied", "first.weight", "middle.weight", "middle.bias", "last.weight",
         "last.bias", "norm.weight", "norm.bias")  # fmt: skip
CUTS = {
    1: [NAMES],
    2: [NAMES[:3], NAMES[3:]],
    3: [NAMES[:3], NAMES[3:4], NAMES[4:]],
}


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def learner(models: list[torch.nn.Module], optimizers: list[Any]) -> Callable[[int, int], None]:
    """The inner step of a rank: two micro-batches, whose gradients add up."""

    def learn(number: int, step: int, rank: int | None = None) -> None:
        draw = torch.Generator().manual_seed(97 * step + (number if rank is None else rank))
        optimizers[number].zero_grad()
        for _ in range(2):
            models[number](torch.randn(4, 37, generator=draw)).backward()
        optimizers[number].step()

    return learn


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With an eps that a float16 parameter has too."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-3)


def digest(model: torch.nn.Module) -> str:
    assert all(p.isfinite().all() for p in model.parameters())
    return oracle.digest(*model.parameters())


def wanted(size: int, steps: int, cut: int, **settings: Any) -> list[list[str]]:
    models: list[torch.nn.Module] = [net() for _ in range(size)]
    learn = learner(models, [adam(model) for model in models])
    return diloco_oracle.train(models, learn, steps, CUTS[cut], **settings)


COMBINATIONS = [
    # fragments, overlap, alpha
    (1, 0, 0.0), (1, 3, 0.0), (2, 1, 0.25), (3, 0, 0.0), (3, 4, 0.0), (3, 2, 0.5),
]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@on_ranks(3)
def test_rounds_have_the_bits_of_the_oracle(me: Rank, codec: str | None) -> None:
    """Overlap 4 with a fragment each 2 steps: several are under way at a time."""
    for fragments, overlap, alpha in COMBINATIONS:
        for feedback in (True, False, 0.95) if codec and (fragments, overlap) == (3, 4) else (1.0,):
            model = net()
            optimizer = adam(model)
            learn = learner([model], [optimizer])
            seen = []
            with ringreduce.DiLoCo(
                model, optimizer, sync_every=6, codec=codec, fragments=fragments, overlap=overlap,
                fragment_update_alpha=alpha, error_feedback=feedback,
            ) as diloco:  # fmt: skip
                while diloco.step < 20:
                    learn(0, diloco.step + 1, me.rank)  # type: ignore[call-arg]
                    seen.append(digest(model))
            case = f"{codec}, {fragments} fragments, overlap {overlap}, alpha {alpha}, {feedback}"
            should = wanted(
                me.world_size, 20, fragments, every=6, overlap=overlap, alpha=alpha, codec=codec,
                feedback=float(feedback),
            )[me.rank]  # fmt: skip
            at = [step for step in range(20) if seen[step] != should[step]]
            assert not at, f"{case}: other bits from step {at[0] + 1} on"
            diloco.sync()
            same_on_all(digest(model))


def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
    return ringreduce.DiLoCo(model, optimizer, **{"sync_every": 6, **settings})


def run(me: Rank, diloco: Any, model: torch.nn.Module, learn: Any, steps: int) -> list[str]:
    seen = []
    with diloco:
        while diloco.step < steps:
            learn(0, diloco.step + 1, me.rank)
            seen.append(digest(model))
    return seen


@pytest.mark.parametrize("backend", ["gloo", ""])
def test_beside_another_backend_and_in_a_part_of_the_ranks(
    pool: Pool, world: MakeWorld, backend: str
) -> None:
    given = world(3)
    given = replace(given, backend=backend or given.backend)
    pool.start(two_of_three if not backend else beside, given).results()


def beside(me: Rank) -> None:
    model = net()
    optimizer = adam(model)
    learn = learner([model], [optimizer])
    assert (
        run(me, make(model, optimizer), model, learn, 13)
        == wanted(me.world_size, 13, 1, every=6, codec="int4")[me.rank]
    )


def two_of_three(me: Rank) -> None:
    """Ranks 0 and 1, which differ at first: the second one receives the parameters of the first."""
    group = dist.new_group([0, 1])
    if me.rank == 2:
        return
    model = net()
    with torch.no_grad():
        model.first.weight += me.rank
    optimizer = adam(model)
    learn = learner([model], [optimizer])
    assert (
        run(me, make(model, optimizer, groups=group), model, learn, 7)
        == wanted(2, 7, 1, every=6, codec="int4")[me.rank]
    )


@on_ranks(2)
def test_a_round_in_each_step_is_data_parallel_training(me: Rank) -> None:
    """With outer SGD of rate 1: to the bit where all arithmetic is exact, and else nearly."""
    for exactly in (True, False):
        models = [torch.nn.Linear(40, 1, bias=False) for _ in range(2)]
        for model in models:
            torch.nn.init.constant_(model.weight, 0.25)
        mine, ddp = models[0], DistributedDataParallel(models[1])
        optimizers = [torch.optim.SGD(model.parameters(), lr=2**-6) for model in models]
        outer = torch.optim.SGD(mine.parameters(), lr=1.0)
        draw = torch.Generator().manual_seed(me.rank)
        with make(mine, optimizers[0], sync_every=1, codec=None, outer_optimizer=outer):
            for _ in range(20):
                x = torch.randint(-8, 9, (4, 40), generator=draw).float()
                for model, optimizer in zip((mine, ddp), optimizers, strict=True):
                    optimizer.zero_grad()
                    (model(x).sum() if exactly else (model(x) / 8 - 1).square().mean()).backward()
                    optimizer.step()
                if exactly:
                    assert torch.equal(*(model.weight for model in models))
        torch.testing.assert_close(*(model.weight for model in models))


def sent() -> int:
    """Bytes to ranks that this one does not share memory with.  Collective: operations look at the
    lines every 20 ms, and all before the first of these has arrived."""
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    assert dist.group.WORLD is not None
    return sum(line[1] for line in extension().lines(backend_of(dist.group.WORLD)))


def by_sites(me: Rank, name: str) -> tuple[str, str, str, int]:
    """Two hosts of two ranks; the ranks of a host train as one.  Digests between rounds, after one
    and after one by time, and the bytes that this rank has sent."""
    os.environ.pop("RINGREDUCE_WIRE", None)
    os.environ["RINGREDUCE_HOSTID"] = f"{name} {me.rank // 2}"
    me.init(name, size=4)
    try:
        hosts = ringreduce.topology.of().hosts
        assert hosts == ((0, 1), (2, 3))
        site, _ = dist.new_subgroups_by_enumeration([list(host) for host in hosts])
        torch.manual_seed(me.rank)
        plain = torch.nn.Linear(256, 2048)
        model = DistributedDataParallel(plain, process_group=site)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(me.rank)

        def learn() -> str:
            optimizer.zero_grad()
            model(torch.randn(4, 256, generator=draw)).square().mean().backward()
            optimizer.step()
            return digest(plain)

        with pytest.raises(ValueError, match="site"):
            make(model, optimizer, groups=site)
        with make(model, optimizer, sync_every=2):
            before = sent()
            _, _, between, after = (learn() for _ in range(4))
            used = sent() - before
        with make(model, optimizer, sync_seconds=0.02) as diloco:
            while diloco.rounds < 3:
                last = learn()
        return between, after, last, used
    finally:
        dist.destroy_process_group()


def test_sites_of_several_ranks(pool: Pool, world: MakeWorld) -> None:
    """Ranks of a site are equal in each step, all are after a round, and a line carries each
    round's code once a host."""
    call = pool.start(by_sites, world(0), pool.name("sites"), ranks=4, fresh=True)
    between, after, last, used = zip(*call.results(), strict=True)
    assert between[0] == between[1] != between[2] == between[3]
    assert len(set(after)) == len(set(last)) == 1
    code = 2 * extension().coded_bytes("int4", 2048 * 257)  # two rounds
    for host in (used[:2], used[2:]):
        assert code <= sum(host) < code * 1.05, (used, code)


def by_shards(me: Rank, name: str) -> None:
    """Two sites of two ranks.  Shards have the bits of models of DistributedDataParallel."""
    me.init(name, size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "shards"))
        kinds = []
        for sharded in (False, True):
            torch.manual_seed(3)
            plain = torch.nn.Sequential(
                torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
            )
            model: Any = plain
            if sharded:
                fully_shard(plain[0], mesh=mesh["shards"])
                fully_shard(plain, mesh=mesh["shards"])
            else:
                model = DistributedDataParallel(plain, process_group=mesh.get_group("shards"))
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.25, momentum=0.5)
            kinds.append((plain, model, optimizer))

        def whole(kind: int) -> list[torch.Tensor]:
            parameters = [p.detach() for p in kinds[kind][0].parameters()]
            return [p.full_tensor() for p in parameters] if kind else parameters

        def learn(kind: int, step: int) -> None:
            _, model, optimizer = kinds[kind]
            draw = torch.Generator().manual_seed(10 * step + me.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=draw)).square().mean().backward()
            optimizer.step()

        site = mesh.get_group("sites")
        plain, _, optimizer = kinds[1]
        for groups in (mesh.get_group("shards"), dist.new_group()):
            with pytest.raises(ValueError, match="site"):
                make(plain, optimizer, groups=groups)
        crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][me.rank in (1, 2)]
        with pytest.raises(ringreduce.errors.Mismatch, match="shards"):
            make(plain, optimizer, groups=crossed)
        inputs = torch.ones(2, 6)
        with torch.no_grad():
            plain(inputs)  # which leaves some parameters whole
        for groups, overlap in (("host", 0), (site, 1)):
            settings = {"codec": None, "sync_every": 2, "fragments": 2, "overlap": overlap}
            made = [
                make(model, optimizer, groups=among, **settings)
                for (_, model, optimizer), among in zip(kinds, (site, groups), strict=True)
            ]
            for diloco in made:
                diloco.__enter__()
            for step in range(9):
                for kind in range(2):
                    learn(kind, step)
                assert all(map(torch.equal, whole(0), whole(1))), (groups, step)
            for diloco in made:
                diloco.__exit__(None, None, None)
                diloco.sync()
            same_on_all(oracle.digest(*whole(1)))
            for _ in range(2):  # what is whole is gathered anew after a round
                with torch.no_grad():
                    assert torch.equal(kinds[0][0](inputs), plain(inputs))
                for diloco in made:
                    diloco.sync()
        other = {**made[1].state_dict(), "rank": 3 - me.rank, "shard": 1 - me.rank % 2}
        with pytest.raises(ValueError, match=f"shard {1 - me.rank % 2}"):
            made[1].load_state_dict(other)
        made[1].load_state_dict(saved(made[1].state_dict()))
        # By time, a second a step.  Ranks of a site count other tokens, and weigh by their sum.
        step = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ringreduce.diloco.clock.now", lambda: step)
            made = [
                make(model, optimizer, codec=None, sync_seconds=2.0, groups=among)
                for (_, model, optimizer), among in zip(kinds, (site, "host"), strict=True)
            ]
            with made[0], made[1]:
                for step in range(1, 7):
                    for kind, diloco in enumerate(made):
                        diloco.count(1 + me.rank * step)
                        learn(kind, step)
                    assert all(map(torch.equal, whole(0), whole(1))), step
                    assert [diloco.rounds for diloco in made] == [step // 2] * 2
        same_on_all(oracle.digest(*whole(1)))
    finally:
        dist.destroy_process_group()


def test_sites_with_shards(pool: Pool, world: MakeWorld) -> None:
    pool.start(by_shards, world(0), pool.name("shards"), ranks=4, fresh=True).results()


@on_ranks(2, WIRE="tcp", remade=True)
def test_bytes_on_the_line(me: Rank) -> None:
    """A round each 30 steps: with int4 at least 200 times fewer than DDP's float32, and with the
    greatest 2 % of the elements 2,000 times."""
    used = []
    for codec in ("DDP", "int4", SPARSE):
        ddp = codec == "DDP"
        torch.manual_seed(0)
        plain = torch.nn.Linear(512, 2048)
        model = DistributedDataParallel(plain) if ddp else plain
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        rounds = {"sync_every": 30, "codec": codec}
        with contextlib.nullcontext() if ddp else make(plain, optimizer, **rounds):
            for step in range(31):
                if step == 1:  # the first has DDP's sorting of buckets; the last has the round
                    before = sent()
                optimizer.zero_grad()
                model(torch.ones(1, 512)).square().mean().backward()
                optimizer.step()
        used.append(sent() - before)
        del model
    assert used[0] > 200 * used[1] > 0 and used[0] > 2000 * used[2] > 0, used


@pytest.mark.parametrize("codec", ["int8", SPARSE])
@on_ranks(2)
def test_rounds_by_time_weigh_by_tokens(me: Rank, codec: str) -> None:
    """Rank 1 makes two steps in the time of one, and so has other tokens."""
    model = net()
    optimizer = adam(model)
    learn = learner([model], [optimizer])
    passed, pace = 0.0, (2, 4)[me.rank]
    patch = pytest.MonkeyPatch()
    patch.setattr("ringreduce.diloco.clock.now", lambda: passed)

    def tokens(rank: int, step: int) -> int:
        return 10 + rank * step

    seen = []
    diloco = make(model, optimizer, sync_seconds=1.0, codec=codec)
    with diloco:
        for number in range(6 * pace):
            diloco.count(tokens(me.rank, number // pace + 1))
            passed += 1 / pace
            learn(0, number + 1, me.rank)
            if number % pace == pace - 1:
                seen.append(digest(model))
    patch.undo()
    assert diloco.rounds == 6 and diloco.step == 6 * pace

    models: list[torch.nn.Module] = [net() for _ in range(2)]
    inner = learner(models, [adam(one) for one in models])

    def learn_a_round(rank: int, round: int) -> None:
        paces = (2, 4)[rank]
        for number in range(paces * (round - 1), paces * round):
            inner(rank, number + 1)

    assert seen == diloco_oracle.train(
        models, learn_a_round, 6, CUTS[1], every=1, codec=codec,
        weights=lambda rank, step: (2, 4)[rank] * tokens(rank, step),
    )[me.rank]  # fmt: skip


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(("at", "codec"), [(7, "int4"), (8, SPARSE), (12, "int4")])
@on_ranks(3)
def test_a_restart_goes_on_bit_for_bit(me: Rank, at: int, codec: str) -> None:
    """With averages under way, too; with another rank's state a rank begins at its parameters."""
    settings: dict[str, Any] = {"fragments": 3, "overlap": 4, "fragment_update_alpha": 0.5,
                                "codec": codec, "error_feedback": 0.9}  # fmt: skip
    model = net()
    optimizer = adam(model)
    diloco = make(model, optimizer, **settings)
    learn = learner([model], [optimizer])
    with diloco:
        while diloco.step < at:
            learn(0, diloco.step + 1, me.rank)
        kept = saved((model.state_dict(), optimizer.state_dict(), diloco.state_dict()))
        assert len(kept[2]["pending"]) == 2 and kept[2]["residuals"]
        while diloco.step < 20:
            learn(0, diloco.step + 1, me.rank)
        ended, state = digest(model), saved(diloco.state_dict())
    again = net()
    optimizer = adam(again)
    second = make(again, optimizer, **settings)
    again.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    second.load_state_dict(kept[2])
    learn = learner([again], [optimizer])
    with second:
        while second.step < 20:
            learn(0, second.step + 1, me.rank)
        assert digest(again) == ended
        assert (second.step, second.rounds) == (diloco.step, diloco.rounds)
        assert all(
            torch.equal(value, second.state_dict()[kind][name])
            for kind in ("parameters", "residuals")
            for name, value in state[kind].items()
        )

    states: list[Any] = [None] * me.world_size
    dist.all_gather_object(states, kept)
    again.load_state_dict(states[0][0])
    second.load_state_dict(states[0][2])
    if me.rank:
        assert not second.state_dict()["residuals"]
        for name, value in second.state_dict()["parameters"].items():
            assert torch.equal(again.get_parameter(name), value.to(again.get_parameter(name).dtype))
    before = second.state_dict()
    values = kept[2]["parameters"]
    for wrong, says in (
        ({**kept[2], "version": 2}, "no state_dict"),
        ({k: v for k, v in kept[2].items() if k != "rounds"}, "no rounds"),
        ({**kept[2], "marks": [(0, 0)]}, "fragments"),
        ({**kept[2], "parameters": {"small": torch.zeros(1)}}, "fit"),
        ({**kept[2], "parameters": {k: v.half() for k, v in values.items()}}, "float16"),
        ({**kept[2], "residuals": {"small": torch.zeros(1)}}, "residual"),
        ({**kept[2], "pending": [(7, 3, [])]}, "under way"),
        ({**kept[2], "outer": "Adam"}, "Adam"),
    ):
        with pytest.raises(ValueError, match=says):
            second.load_state_dict(wrong)
        assert second.state_dict()["rounds"] == before["rounds"]
    second.sync_from(1)
    same_on_all(oracle.digest(*second.state_dict()["parameters"].values()))
    same_on_all(second.step)


def small(**settings: Any) -> tuple[torch.nn.Module, Any, Callable[[], None]]:
    """A model of two parameters, its DiLoCo, and an inner step."""
    torch.manual_seed(2)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = make(model, optimizer, codec=None, sync_every=4, **settings)
    draw = torch.Generator().manual_seed(dist.get_rank())

    def learn() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=draw)).square().mean().backward()
        optimizer.step()

    return model, diloco, learn


@on_ranks(3)
def test_ranks_that_went_apart_are_named_in_the_next_round(me: Rank) -> None:
    model, diloco, learn = small(overlap=1)
    kept = []
    with diloco:
        for _ in range(10):
            learn()
            kept.append(saved((model.state_dict(), diloco.state_dict())))
    # Rank 2 loads an older checkpoint; then one whose values differ in a bit.
    for rank_2_has in (4, 9):
        values, state = kept[rank_2_has if me.rank == 2 else 9]
        model.load_state_dict(values)
        if rank_2_has == 9 and me.rank == 2:
            state["parameters"]["bias"].view(torch.int32)[0] += 1
        diloco.load_state_dict(state)
        with pytest.raises(ringreduce.Mismatch, match=r"\[2\] are in another round"):
            diloco.sync()
        diloco.sync_from(0)
        diloco.sync()
        same_on_all(digest(model))
    # With a round under way, of whose averages nobody has heard.
    if me.rank == 1:
        next(iter(diloco._parts()))[1].master.data[0] += 1
    with diloco:
        while diloco.step % 4:
            learn()
        diloco.sync_from(0)
        diloco.sync()
    same_on_all(digest(model))


@on_ranks(2)
def test_rounds_by_time_that_take_long_leave_time_for_steps(me: Rank) -> None:
    now = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringreduce.diloco.clock.now", lambda: now)
        model, diloco, learn = small(sync_seconds=3.0)
        land = diloco._await

        def lands(flight: Any) -> None:
            nonlocal now
            now += 20
            land(flight)

        patch.setattr(diloco, "_await", lands)
        with diloco:
            for step in range(1, 10):
                now += 1
                learn()
                assert diloco.rounds == step // 3
        # Rank 1 is a new process, which has the state of one that counts tokens.
        diloco.count(4)
        diloco.sync()
        new_model, new, _ = small(sync_seconds=3.0)
        if me.rank == 1:
            model, diloco = new_model, new
        diloco.sync_from(0)
        diloco.sync()
    same_on_all(digest(model))


@on_ranks(2)
def test_an_exception_leaves_rounds_under_way(me: Rank) -> None:
    """The other ranks apply them, so this one does when it goes on."""
    model, diloco, learn = small(overlap=3)
    for _ in range(2):
        with contextlib.suppress(KeyError), diloco:
            while diloco.step < 13:
                learn()
                if diloco.step == 5 and me.rank == 0:
                    raise KeyError("of the program")
    diloco.sync()
    same_on_all(digest(model))


@on_ranks(2)
def test_what_optimizers_and_models_may_be(me: Rank) -> None:
    class After(torch.optim.Optimizer):
        """An optimizer with hooks of its own, which changes parameters behind another one."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(0.5)

    class Wrapped(torch.optim.Optimizer):
        """As Accelerate's: it has none of the attributes of an optimizer but these."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)

    torch.manual_seed(me.rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="Bare has no hooks"):
        make(model, type("Bare", (Wrapped,), {"__init__": lambda self, one: None, "param_groups":
                                              inner.param_groups})(inner))  # fmt: skip
    # A compiled model, and a compiled step of an optimizer that is wrapped.
    compiled = torch.compile(model, backend="eager")
    diloco = make(compiled, Wrapped(inner), sync_every=2)
    assert set(diloco.state_dict()["parameters"]) == {"1.weight", "1.bias"}
    step = torch.compile(inner.step, backend="eager")
    with diloco:
        for _ in range(4):
            inner.zero_grad()
            model(torch.ones(3, 6)).square().mean().backward()
            step()
        assert (diloco.step, diloco.rounds) == (4, 2)
        same_on_all(oracle.digest(*model[1].parameters()))
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"0\.weight was not trained"):
            diloco.sync()
    after = After(torch.optim.SGD(model.parameters(), lr=0.1))
    with make(model, after, sync_every=1):
        model(torch.ones(3, 6)).square().mean().backward()
        after.step()
        same_on_all(digest(model))


@on_ranks(3)
def test_a_part_of_a_sparse_code_is_left_out(me: Rank) -> None:
    """An all-reduce of survivors may have a part of a lost rank's code; a gather has no such."""
    group = dist.new_group(pg_options=ringreduce.Options(on_loss="continue"))
    assert group is not None and dist.group.WORLD is not None
    for among in (group, dist.group.WORLD):
        message = torch.full((100,), 2.0 * me.rank)
        with pytest.MonkeyPatch.context() as patch:
            if me.rank == 1:
                patch.setattr("ringreduce.sparse._checksum", lambda row: b"part")
            average = SparseAverage(message, None, 0.5, among)
        if among is group:
            average.wait()
            assert message.tolist() == [2.0] * 50 + [0.0] * 50
        else:
            with pytest.raises(ringreduce.Error, match="rank 1 is damaged"):
                average.wait()


@on_ranks(2)
def test_a_step_that_a_scaler_skips_is_not_counted(me: Rank) -> None:
    model = torch.nn.Linear(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    tries = 0
    with make(model, optimizer, sync_every=3) as diloco:
        while diloco.step < 9:
            tries += 1
            optimizer.zero_grad()
            loss = model(torch.ones(2, 64)).square().mean()
            scaler.scale(loss * float("inf") if tries == 5 and me.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert tries == 9 + me.rank
    same_on_all(digest(model))


@on_ranks(2)
def test_bad_arguments_are_named_before_anything_is_sent(me: Rank) -> None:
    model, meta = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(8)).sum().backward()
    stepped.step()
    strange = torch.optim.SGD(torch.nn.Linear(8, 8).parameters(), lr=0.1)
    fsdp1 = type("FullyShardedDataParallel", (torch.nn.Linear,), {})  # the real one needs a GPU
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": 3}, "model"),
        ({"model": torch.nn.ReLU()}, "require a gradient"),
        ({"model": meta, "optimizer": torch.optim.SGD(meta.parameters(), lr=1.0)}, "weight"),
        ({"model": torch.nn.Linear(8, 8, dtype=torch.complex64)}, "complex64"),
        ({"model": fsdp1(8, 8)}, "fully_shard"),
        ({"model": torch.nn.Linear(8, 8)}, "optimizer"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"optimizer": strange}, "optimizer"),
        ({"sync_every": 0}, "sync_every"),
        ({"sync_every": 2.5}, "sync_every"),
        ({"outer_optimizer": strange}, "outer_optimizer"),
        ({"outer_optimizer": stepped}, "outer_optimizer"),
        ({"outer_optimizer": 0.7}, "outer_optimizer"),
        ({"outer_optimizer": lambda parameters: None}, "outer_optimizer"),
        ({"outer_optimizer": optimizer}, "outer_optimizer"),
        ({"outer_optimizer": lambda _: torch.optim.SGD(model.parameters(), 1.0)}, "of all"),
        ({"outer_optimizer": lambda some: torch.optim.SGD(some[:1], 1.0)}, "of all"),
        ({"outer_optimizer": lambda some: torch.optim.LBFGS(some)}, "closure"),
        ({"model": torch.nn.LazyLinear(8)}, "weight has none"),
        ({"codec": "int2"}, "int2"),
        ({"codec": 4}, "codec"),
        *(
            ({"codec": f"topk:{odd}"}, "topk:SHARE")
            for odd in ("0+int2", "1.01+int2", "nan+int2", "x+int2", "0.1", "0.1+int4")
        ),
        ({"error_feedback": 1.1}, "error_feedback"),
        ({"error_feedback": 0}, "error_feedback"),
        ({"error_feedback": "yes"}, "error_feedback"),
        ({"fragments": 3}, "fragments"),  # of two parameters
        ({"fragments": 2, "sync_every": 1}, "fragments"),
        ({"overlap": 6}, "overlap"),
        ({"overlap": -1}, "overlap"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha"),
        ({"fragment_update_alpha": 10**400}, "fragment_update_alpha"),
        ({"groups": "rack"}, "groups"),
        ({"groups": 1}, "groups"),
        ({"sync_seconds": 0}, "sync_seconds"),
        ({"sync_seconds": 1.0, "codec": "float16"}, "float16"),
        *(
            ({"model": whole}, "site")
            for ddp in [DistributedDataParallel(model)]
            for whole in (ddp, torch.compile(ddp), torch.nn.Sequential(ddp))
        ),
    ]
    before = len(ringreduce.records())
    for given, named in cases:
        with pytest.raises((TypeError, ValueError), match=named):
            make(**{"model": model, "optimizer": optimizer, **given})
    assert len(ringreduce.records()) == before
    with pytest.raises(ringreduce.Mismatch, match=r"\[1\] have other arguments"):
        make(model, optimizer, sync_every=6 + me.rank)
    with pytest.raises(ringreduce.Mismatch, match=r"\[1\] have other arguments"):
        make(model, optimizer, codec=f"topk:0.{1 + me.rank}+int2")
    make(model, optimizer, codec=("topk:0.1+int2", "topk:1e-1+int2")[me.rank])
    with pytest.raises(RuntimeError, match="sync_seconds"):
        make(model, optimizer).count(3)
