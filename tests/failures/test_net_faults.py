"""A few runs of net_faults.py, and that it would see what it looks for."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch
from hosts import why_not
from net_faults import judge, run
from net_plan import Plan, plan_of
from net_program import Left, WrongNumbersError, check
from pool import Died, Done, Outcome, Pool, Raised


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("kind", "seed"),
    [("kill", 1), ("kill two", 2), ("slow kill", 3), ("short stop", 4), ("cut", 5),
     ("short cut", 6), ("partition", 7), ("leave", 8), ("reset", 9)],
)  # fmt: skip
def test_a_fault_ends_all_ranks_or_none(pool: Pool, kind: str, seed: int) -> None:
    assert run(pool, plan_of(seed, kind)).wrong == []


# ---- what the judge must find: each of these is one change to a run in which all is well

CUT = Plan(seed=0, hosts=2, per_host=1, line={}, kind="cut", victims=[0], away=[1])
LEAVE = replace(CUT, kind="leave", away=[])
KILL = replace(CUT, kind="kill", away=[])
RESET = replace(CUT, kind="reset", away=[])


def raised(rank: int, when: float, message: str, kind: str = "PeerLost") -> Done:
    kinds = (f"ringreduce.errors.{kind}", "torch.distributed.DistBackendError")
    return Done(rank, Left(0, Raised(rank, kinds, message, 100 + when, ""), 0.1))


def right(rank: int) -> Done:
    return Done(rank, Left(30, None, 0.1))


def wrong(plan: Plan, *outcomes: Outcome) -> str:
    return "\n".join(judge(plan, outcomes, 100.0, {0, 1}, slack=0.0).wrong)


def test_the_judge_finds_nothing_where_all_is_well() -> None:
    assert not wrong(CUT, raised(0, 4, "rank 1 is lost"), raised(1, 4, "rank 0 is lost"))
    assert not wrong(KILL, Died(0, -signal.SIGKILL), raised(1, 0.5, "rank 0 is lost"))
    assert not wrong(LEAVE, Died(0, 0), right(1))
    assert not wrong(RESET, right(0), right(1))


@pytest.mark.parametrize(
    ("says", "second"),
    [
        ("after 9.00 s", raised(1, 9, "rank 0 is lost")),
        ("it names {1}", raised(1, 4, "rank 1 is lost")),
        ("it names set()", raised(1, 4, "somebody is lost")),
        ("no PeerLost", raised(1, 4, "rank 0 is late", "Timeout")),
        ("WRONG NUMBERS", raised(1, 4, "rank 0", "WrongNumbersError")),
        ("only [0] of [0, 1]", right(1)),
        ("Died", Died(1, None)),
        ("took 60.0 s to leave", Done(1, Left(30, None, 60.0))),
    ],
)
def test_the_judge_finds(says: str, second: Outcome) -> None:
    said = wrong(CUT, raised(0, 4, "rank 1 is lost"), second)
    assert says in said


def test_the_judge_finds_who_ended_otherwise_than_it_was_to() -> None:
    assert "rank 0 was to end" in wrong(LEAVE, right(0), right(1))
    assert "rank 0 was to end" in wrong(KILL, Died(0, 0), raised(1, 0.5, "rank 0 is lost"))
    assert "it must not raise" in wrong(LEAVE, Died(0, 0), raised(1, 0.5, "rank 0 has left"))
    assert "only [0]" in wrong(RESET, raised(0, 0.5, "rank 1 is lost"), right(1))


def test_wrong_numbers_are_seen() -> None:
    good = torch.arange(5)
    check(good, good.clone(), "a call")
    with pytest.raises(WrongNumbersError, match="a call: element 3 of 5 is 3, not 7"):
        check(good, torch.tensor([0, 1, 2, 7, 4]), "a call")
