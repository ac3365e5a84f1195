"""Signal handlers that use the group whose wait they interrupt; and how subgroups name ranks."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from blame import blamed
from conftest import MakeWorld
from pool import Died, Done, Pool, Raised, Rank
from test_failures import signal_a_wait

from ringreduce import _clock


def wait_with_a_handler(me: Rank, does: str) -> str:
    if me.rank == 1:
        me.hear()
        return ""
    said: list[str] = []

    def handler(number: int, frame: object) -> None:
        if does == "destroy":
            dist.destroy_process_group()
        else:
            try:
                dist.all_reduce(torch.ones(1), async_op=does == "async")
                said.append("went on")
            except ValueError as error:
                said.append(str(error))

    before = signal.signal(signal.SIGTERM, handler)
    me.tell("waiting")
    try:
        dist.all_reduce(torch.ones(8))
    except dist.DistBackendError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        signal.signal(signal.SIGTERM, before)
    return " / ".join(said)


@pytest.mark.parametrize("does", ["destroy", "all_reduce", "async"])
def test_a_signal_handler_uses_the_group(pool: Pool, world: MakeWorld, does: str) -> None:
    """Never a deadlock: the handler gets an error, or ends the operation below it."""
    job = pool.start(wait_with_a_handler, world(2, timeout=3.0), does, remade=True)
    _, (outcome, _) = signal_a_wait(job, signal.SIGTERM)
    assert isinstance(outcome, Done), outcome
    if does == "destroy":
        assert "Aborted" in outcome.value and "signal handler" in outcome.value
    elif does == "all_reduce":
        assert "cannot wait for an operation" in outcome.value and "Timeout" in outcome.value
    else:
        assert outcome.value.startswith("went on / Timeout"), outcome.value


def test_a_signal_handler_reads_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that calls hvd does, and waits for 20 s, while the clock is read."""
    now, read = 100.0, []
    time = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(_clock, "time", time)
    clock = _clock.ProcessClock()

    def interrupted() -> float:
        nonlocal now
        time.monotonic = lambda: now
        for _ in range(20):
            now += 1
            clock.now()
        return 100.0

    time.monotonic = interrupted
    reader = threading.Thread(target=lambda: read.append(clock.now()), daemon=True)
    reader.start()
    reader.join(10)
    now += 1
    assert read == [100.0] and clock.now() == 121.0


def in_a_subgroup(me: Rank, what: str) -> None:
    sub = dist.new_group([1, 3], use_local_synchronization=True) if me.rank in (1, 3) else None
    if sub is None:
        return
    dist.all_reduce(torch.ones(1), group=sub)
    if me.rank == 3:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(2), group=sub)
    else:
        dist.all_reduce(torch.ones(1), group=sub)


@pytest.mark.parametrize(("what", "error"), [("kill", "PeerLost"), ("mismatch", "Mismatch")])
def test_a_subgroup_names_global_ranks(pool: Pool, world: MakeWorld, what: str, error: str) -> None:
    outcomes = pool.start(in_a_subgroup, world(4), what, remade=True).outcomes()
    assert isinstance(outcomes[0], Done) and isinstance(outcomes[2], Done)
    raised = outcomes[1]
    assert isinstance(raised, Raised) and raised.isa(error), raised
    assert blamed(raised.message) == {3}, raised.message
    assert isinstance(outcomes[3], Died if what == "kill" else Raised)
