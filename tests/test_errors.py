"""The error classes: what they are, and how they surface from Work, Future and DDP's backward."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from blame import blamed, expect
from conftest import MakeWorld
from pool import Died, Done, Pool, Raised, Rank, describe
from ranks import exception_of
from test_failures import add_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

NAMES = ("PeerLost", "Timeout", "Mismatch", "Aborted")


def test_the_hierarchy() -> None:
    import ringreduce

    assert issubclass(ringreduce.Error, dist.DistBackendError)
    for name in NAMES:
        kind = getattr(ringreduce, name)
        assert kind.__mro__[1] is ringreduce.Error
        assert kind.__module__.startswith("ringreduce") and kind.__name__ == name
        assert kind.__doc__, name
        with pytest.raises(RuntimeError, match="text") as caught:
            raise kind("text")
        facts = (caught.value.rank, caught.value.reporter, caught.value.group, caught.value.final)
        assert facts == (None, None, "", None), name  # nobody's but of an error of a group
    assert re.match(r"\d+\.\d+", ringreduce.__version__)


def die_with_work_posted(me: Rank, way: str) -> list[Raised]:
    """Rank 1 dies with operations of all others in flight; returns what these saw."""
    dist.all_reduce(torch.ones(3))
    if me.rank == 1:
        me.hear()  # once the first call has ended on all ranks
        os.kill(os.getpid(), signal.SIGKILL)
    me.tell("begun")
    seen = []
    works = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(4)]
    futures = [work.get_future() for work in works]
    for work, future in zip(works, futures, strict=True):
        try:
            if way == "wait":
                work.wait()
            elif way == "future":
                future.wait()
            elif way == "value":
                while not future.done():
                    time.sleep(0.01)
                future.value()
            elif way == "exception":
                while not work.is_completed():
                    time.sleep(0.01)
                assert not work.is_success()
                told = exception_of(work)
                assert told is not None
                raise told
            else:
                future.then(lambda f: f.value()).wait()
        except (RuntimeError, dist.DistBackendError) as error:
            seen.append(describe(me.rank, error))
    try:  # later calls say the same, blocking or not
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    except dist.DistBackendError as error:
        seen.append(describe(me.rank, error))
    return seen


@pytest.mark.parametrize("way", ["wait", "future", "value", "exception", "then"])
def test_asynchronous_errors_surface(pool: Pool, world: MakeWorld, way: str) -> None:
    call = pool.start(die_with_work_posted, world(3), way)
    for rank in (0, 2):
        call.heard(rank)
    call.tell(1)
    outcomes = call.outcomes()
    assert isinstance(outcomes[1], Died), outcomes
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, Done), outcome
        assert len(outcome.value) == 5, "every operation must fail"
        for raised in outcome.value[4:] if way == "then" else outcome.value:
            assert expect(raised, "PeerLost", {1}).group
        for raised in outcome.value:  # `.then()` keeps the text, not the class
            assert raised.isa("RuntimeError")
            assert 1 in blamed(raised.message), raised.message
    assert pool.run(add_up, world(3)) == [6.0] * 3


def backward_without_a_peer(me: Rank, way: str) -> None:
    import ringreduce

    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(200, 200) for _ in range(6)]), bucket_cap_mb=0.2)
    if way == "hook":
        ringreduce.register_comm_hook(model)
    elif way == "python hook":
        model.register_comm_hook(None, ringreduce.hooks.allreduce_hook)
    for step in range(4):
        loss = model(torch.ones(2, 200)).sum()
        if me.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()


@pytest.mark.parametrize("way", ["backend", "hook", "python hook"])
def test_ddps_backward_raises(pool: Pool, world: MakeWorld, way: str) -> None:
    outcomes = pool.start(backward_without_a_peer, world(3), way).outcomes()
    assert isinstance(outcomes[1], Died), outcomes
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, Raised), outcome
        if way == "python hook":  # its future comes from `.then()`, which keeps the text alone
            assert outcome.isa("RuntimeError") and 1 in blamed(outcome.message), outcome
        else:
            expect(outcome, "PeerLost", {1})
    assert pool.run(add_up, world(3)) == [6.0] * 3


def wait_for_a_while(me: Rank) -> float:
    dist.barrier()
    if me.rank == 1:
        me.hear()  # comes only after rank 0 has given up
        dist.all_reduce(torch.ones(3))
        return 0.0
    began = time.monotonic()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(RuntimeError):
        work.wait(timeout=timedelta(seconds=0.3))
    return time.monotonic() - began


def test_wait_takes_a_timeout(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(wait_for_a_while, world(2))
    call.await_end([0], 20.0)
    call.tell(1)
    first = call.outcomes()[0]
    assert isinstance(first, Done) and first.value >= 0.2, first
