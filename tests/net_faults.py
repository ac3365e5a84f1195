"""Random faults between hosts: kills, stops, cuts, partitions, resets, early leavers, slow ranks.

    python tests/net_faults.py --runs 200            (make net-faults; needs root)
    python tests/net_faults.py --runs 1 --seed 17    one of them again

Each run has a seed, which decides on the hosts, the line between them, the calls (net_program.py)
and one fault at a random moment.  Either the fault ends the group: then every survivor raises in
time and holds the right rank responsible.  Or it must not: then all finish, with right results.
Nobody hangs and nobody has wrong numbers.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blame import blamed
from hosts import Hosts, why_not
from net_plan import KINDS, LOST, STOPPED_TIMEOUT, Plan, expected, plan_of
from net_program import Left, outcome_of, program
from net_reset import reset_one
from pool import Call, Died, Done, Outcome, Pool, World

# What a busy machine may add to each time: its cores are shared with other ranks and the emulator.
SLACK = 3.0
MOST_LEAVING = 6.0  # seconds that leaving a group may take that has ended


@dataclass
class Ended:
    """How long after the fault the last survivor raised, if any did; or what is wrong.

    `calls`: how many ended right, summed over the ranks that could tell.
    """

    wrong: list[str] = field(default_factory=list)
    latest: float | None = None
    calls: int = 0


def strike(plan: Plan, hosts: Hosts, call: Call) -> tuple[float, set[int]]:
    """Does what the plan says; when, and the ranks at the ends of the connection it has reset."""
    ends: set[int] = set()
    struck = time.monotonic()
    others = [h for h in range(plan.hosts) if h not in plan.away]
    if plan.deadly:
        # Stopped first, so that none ends by itself because another one is lost.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in plan.victims:
                call.signal(rank, number)
    elif plan.kind.endswith("stop"):
        call.signal(plan.victims[0], signal.SIGSTOP)
        time.sleep(plan.seconds)
        call.signal(plan.victims[0], signal.SIGCONT)
    elif plan.away:
        pairs = [(a, b) for a in plan.away for b in others]
        for pair in pairs:
            hosts.cut(*pair)
        if plan.seconds:
            time.sleep(plan.seconds)
            for pair in pairs:
                hosts.heal(*pair)
    elif plan.kind == "reset":
        ends = reset_one([worker.pid for worker in call.workers], plan.victims[0], plan.seed)
    return struck, ends


def look(plan: Plan, outcome: Outcome, struck: float, ends: set[int], slack: float) -> Ended:
    """What is wrong with how one rank ended, and when it raised."""
    rank, ended = outcome.rank, Ended()
    gone = -signal.SIGKILL if plan.deadly else 0 if plan.kind == "leave" else None
    if gone is not None and rank in plan.victims:
        if outcome != Died(rank, gone):
            ended.wrong.append(f"rank {rank} was to end with {gone}: {outcome_of(outcome)}")
        return ended
    if not isinstance(outcome, Done) or not isinstance(outcome.value, Left):
        ended.wrong.append(f"{outcome}\n{getattr(outcome, 'stack', '')}")
        return ended
    left: Left = outcome.value
    ended.calls = left.calls
    if left.leaving > MOST_LEAVING + slack:
        ended.wrong.append(f"rank {rank} took {left.leaving:.1f} s to leave")
    if left.raised is None:
        return ended
    may = expected(plan, rank, ends)
    message = f"rank {rank}: {left.raised.kinds[0]}: {left.raised.message}"
    ended.latest = left.raised.when - struck
    names = blamed(left.raised.message)
    if left.raised.isa("WrongNumbersError"):
        ended.wrong.append(f"WRONG NUMBERS: {message}")
    elif may is None:
        ended.wrong.append(f"it must not raise: {message}")
    elif not left.raised.isa(may.kind) or not left.raised.isa("DistBackendError"):
        ended.wrong.append(f"no {may.kind}: {message}")
    elif not names or not names <= may.names:
        ended.wrong.append(f"it names {names}, not of {may.names}: {message}")
    elif ended.latest > may.until + slack:
        ended.wrong.append(f"after {ended.latest:.2f} s, not {may.until:.2f}: {message}")
    return ended


def judge(
    plan: Plan, outcomes: Sequence[Outcome], struck: float, ends: set[int], slack: float = SLACK
) -> Ended:
    """What is wrong with a run, and when the last rank raised."""
    every = [look(plan, outcome, struck, ends, slack) for outcome in outcomes]
    wrong = [text for ended in every for text in ended.wrong]
    raised = {o.rank for o, ended in zip(outcomes, every, strict=True) if ended.latest is not None}
    survivors = set(range(plan.world)) - (set(plan.victims) if plan.deadly else set())
    if not wrong and raised != survivors and (raised or plan.fatal):
        wrong.append(f"only {sorted(raised)} of {sorted(survivors)} raised")
    times = [ended.latest for ended in every if ended.latest is not None]
    return Ended(wrong, max(times, default=None), sum(ended.calls for ended in every))


def run(pool: Pool, plan: Plan, slack: float = SLACK) -> Ended:
    """One run.  What is wrong with it is empty if nothing is."""
    timeout = STOPPED_TIMEOUT if plan.kind == "long stop" else 60.0
    with Hosts(plan.hosts, seed=plan.seed + 1, **plan.line) as hosts:  # type: ignore[arg-type]
        world = World(
            plan.world,
            "ringreduce",
            (("RINGREDUCE_LOST_SECONDS", str(LOST)),),
            timeout,
            hosts.places(per_host=plan.per_host),
        )
        leaver = plan.victims[0] if plan.kind == "leave" else -1
        call = pool.start(program, world, plan.seed, plan.largest, plan.slow, leaver, fresh=True)
        call.hear_all()
        time.sleep(plan.after)
        struck, ends = strike(plan, hosts, call)
        # Long enough for what must not happen to happen.
        settle = 25.0 if plan.fatal else LOST + 2 if plan.kind in ("middle cut", "reset") else 0.5
        call.await_end(range(plan.world), max(0.5, struck + settle - time.monotonic()))
        if 0 not in call.ended:
            call.tell(0)
        call.await_end(range(plan.world), 40.0)
        return judge(plan, call.outcomes(0.0), struck, ends, slack)


def some_runs(seeds: Sequence[int], kind: str, slack: float) -> int:
    """How many of these failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="net-faults-") as folder:
        pool = Pool(Path(folder), ["ringreduce", "net_program"])
        for seed in seeds:
            plan, start = plan_of(seed, kind), time.monotonic()
            try:
                ended = run(pool, plan, slack)
            except Exception as error:  # a rank did not come so far, or the emulator refused
                ended = Ended([f"{type(error).__name__}: {error}"])
            failed += bool(ended.wrong)
            raised = "" if ended.latest is None else f", the last raised after {ended.latest:.2f} s"
            verdict = "FAILED" if ended.wrong else "right"
            print(
                f"seed {seed}: {plan.kind}, {plan.hosts} hosts of {plan.per_host}{raised}: "
                f"{verdict} ({ended.calls} calls, {time.monotonic() - start:.1f} s)",
                flush=True,
            )
            for wrong in ended.wrong:
                print(f"  {wrong}", flush=True)
            if ended.wrong:
                print(f"  {plan}", flush=True)
        pool.close()
    return failed


def summary(lines: Sequence[str]) -> str:
    """Of each kind of fault: how many, how many right, and when the last rank raised."""
    pattern = r"seed \d+: (.*), \d+ hosts of \d+(?:, the last raised after (\S+) s)?: (\w+)"
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for line in lines:
        if match := re.match(pattern, line):
            found[match[1]].append((match[2], match[3]))
    text = []
    for kind, runs in sorted(found.items()):
        times = sorted(float(when) for when, _ in runs if when)
        raised = f"; raised after {times[0]:.2f} to {times[-1]:.2f} s" if times else ""
        right = sum(verdict == "right" for _, verdict in runs)
        text.append(f"{kind:>12}: {right} of {len(runs)} right{raised}")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=0, help="the first run's; the next have the next"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--kind", default="", choices=["", *sorted(set(KINDS))], help="no other")
    parser.add_argument("--slack", type=float, default=SLACK, help="seconds for a busy machine")
    parser.add_argument("--part", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if why := why_not():
        print(f"no runs: {why}")
        return 2
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the ranks
    if args.part >= 0:
        seeds = range(args.seed + args.part, args.seed + args.runs, args.jobs)
        return min(100, some_runs(seeds, args.kind, args.slack))
    start, lines = time.monotonic(), list[str]()
    with subprocess.Popen(
        ["sh", "-c", 'for part in $PARTS; do "$@" --part $part & done; wait', "sh",
         sys.executable, __file__, *sys.argv[1:]],
        env={**os.environ, "PARTS": " ".join(map(str, range(args.jobs)))},
        stdout=subprocess.PIPE, text=True,
    ) as parts:  # fmt: skip
        assert parts.stdout is not None
        for line in parts.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    right = sum(": right (" in line for line in lines)
    calls = sum(int(n) for line in lines for n in re.findall(r"\((\d+) calls, ", line))
    print(
        f"\n{summary(lines)}\n{right} of {args.runs} runs right, seeds from {args.seed}, ", end=""
    )
    print(f"{calls:,} calls of ranks right, {time.monotonic() - start:.0f} s")
    return 0 if right == args.runs else 1


if __name__ == "__main__":
    sys.exit(main())
