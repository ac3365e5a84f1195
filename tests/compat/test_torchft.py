"""ProcessGroupRingReduce gives each quorum of torchft a group that works.

Skipped where torchft is not installed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from blame import blamed, expect
from conftest import MakeWorld
from pool import Died, Pool, Raised, Rank, describe

pytest.importorskip("torchft", reason="needs `pip install 'ringreduce[torchft]'`")

import torchft
from torchft import process_group as tpg
from torchft.checkpointing.pg_transport import PGTransport
from torchft.coordination import LighthouseServer

from ringreduce import Options
from ringreduce.torchft import ProcessGroupRingReduce

PATIENCE = timedelta(seconds=60)  # where no deadline is tested
SUM = dist.ReduceOp.SUM


class Member:
    """A rank with a ProcessGroupRingReduce, which it configures as a Manager would."""

    def __init__(self, me: Rank, prefix: str, size: int) -> None:
        self.me, self.prefix, self.number = me, prefix, me.rank
        self.store = me.store(f"{prefix}/test")
        self.pg: Any = ProcessGroupRingReduce(PATIENCE)
        self.handles: list[str] = []
        if not hasattr(self.pg, "configure"):  # the newer torchft
            self.store.set(f"handle/{me.rank}", self.pg.get_reconfigure_handle())
            self.handles = [self.store.get(f"handle/{r}").decode() for r in range(size)]

    def configure(self, quorum: int, members: Sequence[int]) -> None:
        if self.handles:
            options = tpg.ReconfigureOptions()
            options.uuid, options.handles = quorum, [self.handles[m] for m in members]
            self.pg.reconfigure(options).wait()
            return
        place = f"{self.me.store_host}:{self.me.store_port}/{self.prefix}/{quorum}"
        self.pg.configure(place, "0", members.index(self.number), len(members), quorum)

    def check(self, members: Sequence[int]) -> None:
        """Every call of torchft's wrapper gives what it must, and no error is left."""
        pg, size, rank = self.pg, len(members), members.index(self.number)
        total = sum(range(1, size + 1))

        def own(*shape: int) -> torch.Tensor:
            return torch.full(shape, rank + 1.0)

        def run(work: Any) -> None:
            assert work.wait()
            work.get_future().wait()

        assert pg.size() == size and pg.errored() is None
        for op in (c10d.AllreduceOptions(), SUM):
            run(pg.allreduce([t := own(1000)], op))
            assert (t == total).all()
        several = [own(3), own(5) + 1]
        run(pg.allreduce_coalesced(several, c10d.AllreduceCoalescedOptions()))
        assert (several[0] == total).all() and (several[1] == total + size).all()

        each = torch.arange(1.0, size + 1)
        rows = [torch.zeros(2) for _ in members]
        run(pg.allgather([rows], [own(2)], c10d.AllgatherOptions()))
        assert torch.stack(rows).equal(each.repeat(2, 1).T)
        outputs = [torch.zeros(size), torch.zeros(2 * size)]
        run(pg.allgather_into_tensor_coalesced(outputs, [own(1), own(2)], c10d.AllgatherOptions()))
        assert outputs[0].equal(each) and outputs[1].equal(each.repeat_interleave(2))

        run(pg.reduce_scatter([t := torch.zeros(1)], [list(each * own(size))], sums()))
        assert t.item() == (rank + 1) * total
        outputs = [torch.zeros(1), torch.zeros(2)]
        inputs = [each * own(size), own(2 * size)]
        run(pg.reduce_scatter_tensor_coalesced(outputs, inputs, sums()))
        assert outputs[0].item() == (rank + 1) * total and (outputs[1] == total).all()

        t, splits = torch.zeros(size), [1] * size
        run(pg.alltoall_base(t, each + 10 * rank, splits, splits, c10d.AllToAllOptions()))
        assert t.equal(rank + 1 + 10 * (each - 1))
        options = c10d.BroadcastOptions()
        options.rootRank = size - 1
        run(pg.broadcast([t := own(7)], options))
        assert (t == size).all()
        run(pg.broadcast_one(t := own(7), 0))
        assert (t == 1).all()
        if size > 1:
            sent = pg.send([own(3)], (rank + 1) % size, 5)
            run(pg.recv([t := torch.zeros(3)], (rank - 1) % size, 5))
            sent.wait()
            assert (t == (rank - 1) % size + 1).all()
        run(pg.barrier(c10d.BarrierOptions()))

    def failed_with(self, call: Callable[[], Any]) -> Raised:
        """The error of a call, which `errored()` gives as well, and calls from then on."""
        with pytest.raises(RuntimeError) as caught:
            call()
        found = describe(self.number, caught.value)
        assert isinstance(self.pg.errored(), type(caught.value))
        with pytest.raises(type(caught.value)) as again:
            self.pg.allreduce([torch.ones(1)], SUM).wait()
        for text in (str(self.pg.errored()), str(again.value)):
            assert blamed(text) == blamed(found.message), text
        return found


def sums() -> c10d.ReduceScatterOptions:
    options = c10d.ReduceScatterOptions()
    options.reduceOp = SUM
    return options


QUORUMS = [[0, 1, 2], [2, 0, 1], [0, 2], [1, 0, 2]]


def all_quorums(me: Rank, prefix: str) -> None:
    member = Member(me, prefix, 3)
    with pytest.raises(RuntimeError, match=r"call configure\(\) first"):
        member.pg.allreduce([torch.ones(1)], SUM)
    for quorum, members in enumerate([*QUORUMS, [me.rank]]):
        if me.rank in members:
            member.configure(10 * quorum + (len(members) == 1) * me.rank, members)
            member.check(members)
    member.pg.shutdown()
    member.pg.shutdown()


def test_each_quorum_has_a_group_with_all_calls(pool: Pool, world: MakeWorld) -> None:
    """No rank waits for another before it leaves the last quorum's group."""
    pool.start(all_quorums, world(0), pool.name(), ranks=3).results()


def lose_rank_2(me: Rank, prefix: str, how: str) -> Raised | None:
    member = Member(me, prefix, 3)
    member.configure(1, [0, 1, 2])
    member.check([0, 1, 2])
    if how == "late":
        member.pg.set_timeout(timedelta(seconds=2))
    me.tell("flowing")

    def work_until_the_end() -> None:
        while True:
            works = [member.pg.allreduce([torch.ones(1 << 16)], SUM) for _ in range(3)]
            for work in works:
                work.wait()

    if me.rank == 2 and how != "killed":
        assert me.hear() == "leave"
        if how == "leaves":
            member.pg.shutdown()
        else:
            assert me.hear() == "end"
        return None
    found = member.failed_with(work_until_the_end)
    member.pg.set_timeout(PATIENCE)
    member.configure(2, [1, 0])
    member.check([1, 0])
    return found


@pytest.mark.parametrize(
    ("how", "kind"), [("killed", "PeerLost"), ("leaves", "PeerLost"), ("late", "Timeout")]
)
def test_others_name_a_lost_rank_and_go_on(
    pool: Pool, world: MakeWorld, how: str, kind: str
) -> None:
    """RINGREDUCE_ON_LOSS, which other groups of the program may need, has no effect."""
    members = world(0, ON_LOSS="continue")
    call = pool.start(lose_rank_2, members, pool.name(), how, ranks=3)
    call.hear_all("flowing")
    if how == "killed":
        call.signal(2, signal.SIGKILL)
    else:
        call.tell(2, "leave")
    call.await_end([0, 1], 100.0)
    if how == "late":
        call.tell(2, "end")
    *survivors, lost = call.outcomes()
    assert isinstance(lost, Died) == (how == "killed")
    for survivor in survivors:
        expect(survivor.value, kind, [2], "torchft quorum 1")  # type: ignore[union-attr]


def end_from_outside(me: Rank, prefix: str, where: str) -> Raised | None:
    """Rank 2 does not come, and rank 1 ends the wait of rank 0 as well as its own."""
    member = Member(me, prefix, 3)
    members = [0, 1, 2]
    member.configure(1, members)
    found = None
    if me.rank < 2:
        if me.rank == 1:
            threading.Timer(0.5, member.pg.abort).start()
        if where == "configure":
            found = member.failed_with(lambda: member.configure(2, members))
        else:
            found = member.failed_with(lambda: member.pg.allreduce([torch.ones(1)], SUM).wait())
    member.store.add("over", 1)
    while member.store.add("over", 0) < 3:
        threading.Event().wait(0.01)
    member.configure(3, members)
    member.check(members)
    return found


@pytest.mark.parametrize("where", ["configure", "operation"])
def test_abort_ends_waits_of_all_ranks(pool: Pool, world: MakeWorld, where: str) -> None:
    *ended, late = pool.start(end_from_outside, world(0), pool.name(), where, ranks=3).results()
    assert late is None
    for found in ended:
        expect(found, "Aborted", [1], "abort\\(\\) was called")


def test_sums_over_survivors_are_refused() -> None:
    """torchft would divide them by the number of all ranks."""
    with pytest.raises(ValueError, match="cannot have on_loss='continue'"):
        ProcessGroupRingReduce(options=Options(on_loss="continue"))


class Replicated(torchft.DistributedDataParallel):
    """Goes on after a failed step; torchft 0.2's own hook ends the program, over Gloo too."""

    @staticmethod
    def _comm_hook(state, bucket):  # torch refuses annotations that are strings
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


TOGETHER = 3  # steps of both replica groups that a run needs


def train(me: Rank, lighthouse: str, role: str) -> dict[str, Any]:
    """A replica group of one rank, which sends and receives the state through its group."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(len(role))
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)

    def save() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    pg: Any = ProcessGroupRingReduce(PATIENCE)
    manager: Any = torchft.Manager(
        pg=pg,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=role,
        store_addr="127.0.0.1",
        store_port=server.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        checkpoint_transport=PGTransport(pg, PATIENCE, torch.device("cpu")),
    )
    model = Replicated(manager, net)
    optimizer = torchft.Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(os.getpid())
    together, errors, steps = 0, [], []
    while together < TOGETHER or (role == "survivor" and not errors):
        optimizer.zero_grad()
        if role == "victim" and together == TOGETHER - 1:
            manager.wait_quorum()  # the survivor has this rank in its group
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        if failure := manager.errored():
            errors.append(str(failure.original_exception))
            together = 0
        else:
            steps.append(manager.current_step())
            together += manager.num_participants() == 2
    manager.shutdown()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {"weights": weights.tolist(), "errors": errors, "steps": steps}


def test_a_replica_group_is_killed_and_another_joins(pool: Pool, world: MakeWorld) -> None:
    """torchft's Manager and lighthouse, DDP and checkpoints: only the step of the loss is void."""
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=2000
    )
    address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    try:
        survivor = pool.start(train, world(0), address, "survivor", ranks=1, fresh=True)
        victim = pool.start(train, world(0), address, "victim", ranks=1, fresh=True)
        assert isinstance(victim.outcomes()[0], Died)
        newcomer = pool.start(train, world(0), address, "newcomer", ranks=1, fresh=True)
        stayed, joined = survivor.results()[0], newcomer.results()[0]
    finally:
        lighthouse.shutdown()
    assert len(stayed["errors"]) == 1 and "is lost: its process ended" in stayed["errors"][0]
    assert joined["errors"] == []
    steps = stayed["steps"]
    assert steps == list(range(steps[0], steps[-1] + 1)) and joined["steps"][-1] == steps[-1]
    assert joined["weights"] == stayed["weights"]
