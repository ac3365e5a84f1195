"""The runs of net_faults.py: what a seed makes of each, and what its ranks may then raise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from net_program import Slow, name_of

LOST = 3.0  # RINGREDUCE_LOST_SECONDS
STOPPED_TIMEOUT = 8.0  # the group's, where a rank is stopped for longer
KINDS = (
    "kill", "kill", "kill two", "short stop", "long stop", "cut", "cut", "short cut", "middle cut",
    "partition", "leave", "slow", "slow kill", "reset",
)  # fmt: skip


@dataclass
class Plan:
    """What a run does, as its seed has it."""

    seed: int
    hosts: int
    per_host: int
    line: dict[str, float]
    kind: str
    victims: list[int] = field(default_factory=list)  # ranks
    away: list[int] = field(default_factory=list)  # hosts that are cut off from the others
    after: float = 0.0  # seconds from the first calls to the fault
    seconds: float = 0.0  # that it lasts, if it ends
    slow: Slow | None = None
    largest: int = 300_000

    @property
    def world(self) -> int:
        return self.hosts * self.per_host

    @property
    def deadly(self) -> bool:
        return "kill" in self.kind

    @property
    def fatal(self) -> bool:
        """Whether no rank can finish."""
        return self.deadly or self.kind in ("cut", "partition", "long stop")

    @property
    def is_scattered(self) -> bool:
        """Whether the hosts that are cut off from the others stand in more than one place."""
        here = [h in self.away for h in range(self.hosts)]
        return sum(here[h] != here[h - 1] for h in range(self.hosts)) > 2

    def waits(self, rank: int) -> bool:
        """Whether the rank may first learn of a loss when the slow rank goes on.

        The slow rank itself does, and so do ranks that wait for its message: it is alive, and a
        message concerns nobody else.  A wait in a collective ends earlier.
        """
        if self.slow is None:
            return False
        message = name_of(self.seed, self.largest, self.world, self.slow.call) == "send"
        return message or self.slow.rank == rank

    def ranks_of(self, hosts: list[int]) -> set[int]:
        return {r for r in range(self.world) if r // self.per_host in hosts}


def plan_of(seed: int, kind: str = "") -> Plan:
    draw = random.Random(f"plan {seed}")
    line = {
        "delay_ms": draw.choice([0.1, 0.1, 1, 10]),
        "rate_mbit": draw.choice([200, 1000]),
        "loss": draw.choice([0, 0, 0.001]),
    }
    plan = Plan(seed, draw.choice([2, 2, 3, 3, 4]), draw.choice([1, 1, 2]), line, "")
    plan.kind = draw.choice(KINDS)
    plan.kind = kind or plan.kind
    if plan.kind == "kill two" and plan.world == 2:
        plan.hosts = 3
    plan.largest = draw.choice([3_000, 300_000])
    plan.after = draw.random() * 1.0
    two = draw.sample(range(plan.world), 2)
    plan.victims = two if plan.kind == "kill two" else two[:1]
    if plan.kind == "partition":
        plan.away = draw.sample(range(plan.hosts), draw.randrange(1, plan.hosts // 2 + 1))
    elif plan.kind.endswith("cut"):
        plan.away = [draw.randrange(plan.hosts)]
    part = draw.random()
    plan.seconds = {
        "short stop": 0.3 + part * (LOST + 3),
        "long stop": STOPPED_TIMEOUT + 3 + part * 3,
        "short cut": 0.1 + part * 0.3 * LOST,
        "middle cut": (0.4 + part * 1.6) * LOST,
    }.get(plan.kind, 0.0)
    if plan.kind.startswith("slow"):
        # The slow one is not the one that is killed.
        plan.slow = Slow(two[1], draw.randrange(10, 40), 10.0 if plan.kind == "slow" else 5.0)
        plan.after += 0.5 if plan.kind == "slow kill" else 0.0
    return plan


@dataclass(frozen=True)
class Expected:
    """What a rank may raise, naming whom, and until how many seconds after the fault."""

    kind: str
    names: set[int]
    until: float


def expected(plan: Plan, rank: int, ends: set[int]) -> Expected | None:
    """None: this rank must come out right."""
    away, victims = plan.ranks_of(plan.away), set(plan.victims)
    everybody = set(range(plan.world))
    if plan.deadly:
        return Expected("PeerLost", victims, 1 + (plan.slow.seconds if plan.waits(rank) else 0.0))
    if plan.kind in ("cut", "partition"):
        other = everybody - away if rank in away else away
        if plan.is_scattered:  # nobody hears anything around the ring
            other = everybody - plan.ranks_of([rank // plan.per_host])
        return Expected("PeerLost", other, LOST + 2)
    if plan.kind == "middle cut":  # either way, but the same for all
        return Expected("PeerLost", everybody, plan.seconds + LOST + 2)
    if plan.kind == "long stop":
        late = plan.seconds + 2 if rank in victims else STOPPED_TIMEOUT + 1
        return Expected("Timeout", victims, late)
    if plan.kind == "reset":
        return Expected("PeerLost", ends, LOST + 2)
    return None
