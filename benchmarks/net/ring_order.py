"""The order of the ring on lines that differ: what is measured, chosen and gained.

    python benchmarks/net/ring_order.py            # six hosts, as root
    python benchmarks/net/ring_order.py --hosts 8 --seed 3 --size 8M

Hosts are network namespaces of this machine (tests/hosts.py).  Each direction between each pair has
a rate of its own, drawn by --seed.  An all-reduce by the ring is timed in the hosts' own order and
in the one that RINGREDUCE_RING=measure finds, several times in turns.  It prints the rates as they
are and as they were measured, the chosen ring's slowest link beside that of the best of all orders,
and how much faster it is beside what the slowest links promise.  The exit status is 1 unless the
chosen slowest link is the best there is and the gain is within 15 % of what was promised.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

from hosts import Hosts, HostsError, why_not  # noqa: E402

from ringreduce.tools.bench.settings import parse_size  # noqa: E402

RATES = (12, 18, 24, 36, 48, 64)  # Mbit/s
TOLERANCE = 0.15
MOST_HOSTS = 9  # of which all orders are tried


def draw(hosts: int, seed: int) -> list[list[float]]:
    """Rates from host to host. The hosts' own ring has a slow link, as it would by mischance."""
    source = random.Random(seed)
    matrix = [[float(source.choice(RATES[1:])) for _ in range(hosts)] for _ in range(hosts)]
    at = source.randrange(hosts)
    matrix[at][(at + 1) % hosts] = float(RATES[0])
    return matrix


def default_congestion() -> str:
    """BBR, if the kernel has it: the losses of what fills queues blur what is compared."""
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return "bbr" if "bbr" in available else ""


def slowest(matrix: Sequence[Sequence[float]], ring: Sequence[int]) -> float:
    """The rate of a ring's slowest link."""
    return min(matrix[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))


def best(matrix: Sequence[Sequence[float]]) -> float:
    """The fastest slowest link of all orders."""
    others = range(1, len(matrix))
    return max(slowest(matrix, (0, *rest)) for rest in permutations(others))


def rank(elements: int, calls: int) -> None:
    """One rank's program: rank 0 writes what it found as a line of JSON."""
    import torch
    import torch.distributed as dist

    from ringreduce import topology

    begin = time.monotonic()
    dist.init_process_group("ringreduce")
    made = time.monotonic() - begin
    times = []
    for call in range(calls + 1):
        t = torch.ones(elements)
        dist.barrier()
        begin = time.monotonic()
        dist.all_reduce(t)
        dist.barrier()
        if call > 0:  # the first makes connections, and TCP finds out what they carry
            times.append(time.monotonic() - begin)
        assert t.eq(dist.get_world_size()).all()
    if dist.get_rank() == 0:
        found = topology.of()
        print("FOUND " + json.dumps({"times": times, "ring": found.ring, "table": str(found),
                                     "matrix": found.matrix, "made": made}))  # fmt: skip
    dist.destroy_process_group()


def run(hosts: Hosts, ring: str, options: argparse.Namespace, port: int) -> dict[str, Any]:
    """One job; what its rank 0 found. Raises HostsError."""
    command = [
        sys.executable, __file__, "--rank", "--size", str(options.size),
        "--calls", str(options.calls),
    ]  # fmt: skip
    job = hosts.start(
        command,
        environment={
            "RINGREDUCE_RING": ring,
            "RINGREDUCE_ALGORITHM": "ring",
            "RINGREDUCE_CONGESTION": options.congestion,
        },
        port=port,
    )
    output = job.outputs(options.timeout)[0]
    for line in output.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    raise HostsError(f"rank 0 said nothing of what it found:\n{output}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=6, help=f"3 to {MOST_HOSTS}")
    parser.add_argument("--seed", type=int, default=1, help="of the rates")
    parser.add_argument("--size", type=parse_size, default="6M", help="bytes of an all-reduce")
    parser.add_argument("--calls", type=int, default=2, help="timed in each run")
    parser.add_argument("--runs", type=int, default=2, help="of each order, in turns")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="one way, of each line")
    parser.add_argument("--congestion", default=default_congestion(), help="of all connections")
    parser.add_argument("--timeout", type=float, default=120.0, help="of one run, in seconds")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        rank(options.size // 4, options.calls)
        return 0
    if not 3 <= options.hosts <= MOST_HOSTS:
        parser.error(f"--hosts: from 3 to {MOST_HOSTS}")
    if reason := why_not():
        print(f"# skipped: {reason}")
        return 0
    matrix = draw(options.hosts, options.seed)
    own = list(range(options.hosts))
    found: dict[str, list[dict[str, Any]]] = {"": [], "measure": []}
    with Hosts(options.hosts, delay_ms=options.delay_ms, rate_mbit=1000) as hosts:
        for a in own:
            for b in own:
                if a != b:
                    hosts.link(a, b, rate_mbit=matrix[a][b])
        for number in range(options.runs):
            for ring in found:
                port = 29400 + 2 * number + bool(ring)
                found[ring].append(run(hosts, ring, options, port))
    return judge(matrix, found, options.size)


def judge(
    matrix: Sequence[Sequence[float]], found: dict[str, list[dict[str, Any]]], size: int
) -> int:
    """Print what was found; 0 if it is as it should be."""
    own = list(range(len(matrix)))
    print("# the lines as they are, Mbit/s:")
    for a, row in enumerate(matrix):
        print(f"  from {a}" + "".join(f"{'-' if a == b else f'{r:.0f}':>6}"
                                      for b, r in enumerate(row)))  # fmt: skip
    print("\n" + found["measure"][0]["table"])
    times = {}
    for ring, runs in found.items():
        all_times = [t for one in runs for t in one["times"]]
        times[ring] = statistics.median(all_times)
        name = "in the chosen order" if ring else "in the hosts' own order"
        spread = f"{min(all_times):.3f} to {max(all_times):.3f}"
        made = statistics.median(one["made"] for one in runs)
        print(f"\nall-reduce of {size} bytes {name}: median {times[ring]:.3f} s ({spread}, "
              f"{len(all_times)} calls); making the group took {made:.2f} s")  # fmt: skip
    status = 0
    possible = best(matrix)
    for one in found["measure"]:
        chosen = slowest(matrix, one["ring"])
        verdict = "the best of all orders" if chosen == possible else "NOT THE BEST"
        print(f"chosen {one['ring']}: slowest link {chosen:.0f} Mbit/s, of all orders "
              f"{possible:.0f}: {verdict}")  # fmt: skip
        status |= chosen != possible
    promised = slowest(matrix, found["measure"][0]["ring"]) / slowest(matrix, own)
    gained = times[""] / times["measure"]
    off = gained / promised - 1
    status |= abs(off) > TOLERANCE
    print(f"promised {promised:.2f} times as fast, measured {gained:.2f}: off by {off:+.1%} "
          f"({'within' if abs(off) <= TOLERANCE else 'BEYOND'} {TOLERANCE:.0%})")  # fmt: skip
    return int(status)


if __name__ == "__main__":
    # torch's store asks for the names of addresses, which a namespace has nobody to ask for.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
