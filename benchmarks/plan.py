"""How well `python -m ringreduce.plan` predicts, on what its constants were not fitted on.

    python benchmarks/plan.py                          # all parts; between hosts as root
    python benchmarks/plan.py --parts shared,lan --out benchmarks/results/plan.json

    shared  ranks of one host, other sizes than fitted
    beyond  the same with three ranks on a core, of which nothing is fitted
    lan     emulated hosts; fitted with 2, 3 and 4 on a line of 200 Mbit/s, predicted to 8 on others
    wan     the same with 20 ms round trip and 50 Mbit/s
    steps   DDP; from a timeline of 2 hosts, for other hosts, lines and codecs

Each part fits constants to its own measurements and predicts others: in `shared` these take turns
in the same rounds, elsewhere the others are measured afterwards.  All hosts are network namespaces
of this machine and share its cores, which the model is told; the backward of `steps` sleeps, as if
it ran on an accelerator.  --out keeps what other parts have written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "net"), str(Path(__file__).parents[1] / "tests")]

from compare import allowed  # noqa: E402
from hosts import Hosts  # noqa: E402

from ringreduce.tools.bench.machine import describe_machine  # noqa: E402
from ringreduce.tools.bench.settings import format_size  # noqa: E402
from ringreduce.tools.bench.summary import format_time  # noqa: E402
from ringreduce.tools.plan import constants, measure, step  # noqa: E402
from ringreduce.tools.plan.constants import Point  # noqa: E402
from ringreduce.tools.plan.lines import Line  # noqa: E402
from ringreduce.tools.plan.model import KINDS, Job, Model  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
CORES = len(os.sched_getaffinity(0))
TESTED = (2 * KIB, 12 * KIB, 48 * KIB, 192 * KIB, 768 * KIB, 3 * MIB)
SHARED_CALLS = [
    measure.Call(kind, size) for kind in KINDS for size in (*TESTED, 12 * MIB, 25 * MIB)
]
PATIENCE = 600.0
Rows = list[dict[str, Any]]  # a prediction and what was measured, in seconds


@dataclass(frozen=True)
class Net:
    """Emulated hosts: the arguments of tests/hosts.py, and the same as the model sees it."""

    rate_mbit: float
    delay_ms: float = 0.0
    loss: float = 0.0
    congestion: str = "cubic"

    @property
    def line(self) -> Line:
        """For the model. tc's tbf counts Ethernet's headers and has a bucket of 70 kB."""
        shaped = self.delay_ms == 0
        return Line(
            rate=self.rate_mbit * 1e6 / 8, round_trip=2e-3 * self.delay_ms, loss=self.loss,
            mtu=1514 if shaped else 1500, burst=70_000 if shaped else 0,
            congestion=self.congestion,
        )  # fmt: skip

    @contextlib.contextmanager
    def hosts(self, count: int) -> Iterator[Hosts]:
        """They exist inside the block."""
        options: dict[str, Any] = {"rate_mbit": self.rate_mbit}
        if self.delay_ms:
            options |= {"delay_ms": self.delay_ms, "loss": self.loss, "shared_line": True}
        else:
            options["veth"] = True
        with allowed(self.congestion), Hosts(count, **options) as hosts:
            for host in hosts.all:
                host.sysctl("net.ipv4.tcp_congestion_control", self.congestion)
            yield hosts

    def job(self, hosts: int) -> Job:
        """One rank on each host."""
        return Job(hosts, hosts, self.line, CORES, emulated=True, bandwidth_known=True)

    @property
    def environment(self) -> dict[str, str]:
        """Of the ranks."""
        return {
            "RINGREDUCE_BANDWIDTH_MBIT": f"{self.rate_mbit:g}",
            "RINGREDUCE_CONGESTION": self.congestion,
        }

    def __str__(self) -> str:
        return str(replace(self.line, burst=0))


def measured(net: Net, hosts: int, calls: Sequence[measure.Call], options: Any) -> list[Point]:
    """Times of the calls among emulated hosts."""
    spec = {"calls": [vars(c) for c in calls], "rounds": options.rounds, "span": options.span}
    command = [sys.executable, "-m", "ringreduce.tools.plan.measure", json.dumps(spec)]
    with net.hosts(hosts) as network:
        outcomes = network.start(command, environment=net.environment).wait(PATIENCE)
    for outcome in outcomes:
        if outcome.code:
            raise RuntimeError(f"rank {outcome.rank} of {hosts}: {outcome.output[-2000:]}")
    times = json.loads(outcomes[0].output.splitlines()[-1])
    return measure.points_of(calls, times, net.job(hosts))


# ---- what was predicted beside what happened


def row(what: str, seconds: float, low: float, high: float, predicted: Any) -> dict[str, Any]:
    """For the document: measured median, p10 and p90, and the prediction."""
    return {
        "what": what, "measured": seconds, "p10": low, "p90": high,
        "predicted": predicted.seconds, "low": predicted.low, "high": predicted.high,
    }  # fmt: skip


def compared(model: Model, points: Sequence[Point], part: str) -> Rows:
    """A row for each measured call."""
    rows = []
    for p in points:
        found = model.collective(p.kind, p.size, p.job, p.codec)
        where = (
            f"{p.job.ranks} ranks" if p.job.line is None else f"{p.job.hosts} hosts, {p.job.line}"
        )
        what = f"{p.kind} {format_size(p.size)} {p.codec}".strip()
        rows.append(
            row(what, p.seconds, p.low, p.high, found)
            | {"part": part, "where": where, "bound": found.bound, "ranks": p.job.ranks,
               "bytes": p.size, "codec": p.codec, "algorithm": found.algorithm}
        )  # fmt: skip
    show(rows)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as text."""
    for r in rows:
        inside = "" if r["low"] <= r["measured"] <= r["high"] else "  outside"
        print(
            f"{r['part']:7} {r['where']:45} {r['what']:26} {format_time(r['measured']):>9} "
            f"({format_time(r['p10'])} - {format_time(r['p90'])}) {format_time(r['predicted']):>9} "
            f"{100 * (r['predicted'] / r['measured'] - 1):6.1f} %{inside}",
            flush=True,
        )


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The errors of each part and place, as a table in Markdown."""
    lines = [
        "| | predictions | median error | p90 | largest | outside the interval |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        groups.setdefault(f"{r['part']}: {r['where']}", []).append(r)
        groups.setdefault(f"all of {r['part']}", []).append(r)
        if r["part"] not in ("steps", "beyond"):
            groups.setdefault("all collectives", []).append(r)
    for name, found in groups.items():
        errors = sorted(abs(r["predicted"] / r["measured"] - 1) for r in found)
        p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        outside = sum(not r["low"] <= r["measured"] <= r["high"] for r in found)
        cells = [
            name,
            len(found),
            *(f"{e:.1%}" for e in (statistics.median(errors), p90, errors[-1])),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} | {outside} |")
    return lines


# ---- the parts


def inside(calls: Sequence[measure.Call], ranks: int, options: Any) -> list[Point]:
    """Times of the calls among ranks of this machine, which take turns."""
    times = measure.start_ranks(calls, ranks, options.rounds, options.span, {})
    return measure.points_of(calls, times, Job(ranks, cores=CORES))


def shared(options: Any) -> Rows:
    """Ranks of one host. Fitted and predicted sizes take turns, so both see the same neighbours."""
    fitted, points, tested = measure.calls_inside(), [], []
    for ranks in (2, 4):
        found = inside([*fitted, *SHARED_CALLS], ranks, options)
        points += found[: len(fitted)]
        tested += found[len(fitted) :]
    return compared(constants.fit(points, Model(cores=CORES)), tested, "shared")


Fitted = Sequence[tuple[Net, int]]
LAN: Fitted = [(Net(200), hosts) for hosts in (2, 3, 4)]
WAN: Fitted = [*((Net(50, 10), hosts) for hosts in (2, 3, 4)), (Net(50, 10, 1e-4, "bbr"), 2)]


def fitted_to(nets: Fitted, options: Any) -> Model:
    """The constants of these emulated hosts."""
    points: list[Point] = []
    for net, hosts in nets:
        points += measured(net, hosts, measure.calls_between(), options)
    model = constants.fit(points, Model(cores=CORES))
    print(f"# {model.sockets}\n# {model.spread}", flush=True)
    if options.keep:
        constants.save(options.keep, model, {}, points)
    return model


def between(
    part: str, fitted: Fitted, tested: Sequence[tuple[Net, Sequence[int]]], options: Any
) -> Rows:
    """Emulated hosts: constants of some, predictions of others."""
    model = fitted_to(fitted, options)
    rows = []
    calls = measure.calls_between(TESTED, ("bfloat16", "int8", "int4"))
    for net, counts in tested:
        for hosts in counts:
            rows += compared(model, measured(net, hosts, calls, options), part)
    return rows


def lan(options: Any) -> Rows:
    """Lines without delay."""
    tested = [(Net(200), (8,)), (Net(100), (2, 4, 8)), (Net(300), (3, 6))]
    return between("lan", LAN, tested, options)


def wan(options: Any) -> Rows:
    """Lines with delay, and one with loss."""
    tested = [
        (Net(30, 20), (2, 4)), (Net(80, 5), (2, 8)),
        (Net(30, 20, 1e-3, "bbr"), (2,)),
    ]  # fmt: skip
    return between("wan", WAN, tested, options)


# Layers of a model, elements each, and seconds of their backward; the forward takes half as long.
LAYERS, ELEMENTS, BACKWARD, STEPS = 8, 1 << 16, 0.006, 40


def train(folder: str, codec: str) -> None:
    """A rank of `steps`: DDP with a bucket for each layer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ringreduce

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD / 2)
            return x.clone()

        @staticmethod
        def backward(_: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(BACKWARD)
            return x

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            side = int(ELEMENTS**0.5)
            self.linear = torch.nn.Linear(side, side)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Sleep.apply(self.linear(x))  # type: ignore[no-untyped-call]
            return found

    torch.set_num_threads(1)
    dist.init_process_group("ringreduce")
    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=ELEMENTS * 4 / MIB)
    if codec:
        ringreduce.register_comm_hook(ddp, codec=codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    x = torch.ones(4, int(ELEMENTS**0.5))

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            ddp(x).sum().backward()
            optimizer.step()

    run(6)
    with ringreduce.timeline(folder):
        run(STEPS)
    dist.destroy_process_group()


def trained(net: Net, hosts: int, codec: str) -> step.Step:
    """The steps of a run on emulated hosts."""
    with tempfile.TemporaryDirectory() as folder, net.hosts(hosts) as network:
        command = [sys.executable, __file__, "--train", folder, "--codec", codec]
        for outcome in network.start(command, environment=net.environment).wait(PATIENCE):
            if outcome.code:
                raise RuntimeError(f"rank {outcome.rank}: {outcome.output[-2000:]}")
        return step.replayed(Path(folder)).step


def steps(options: Any) -> Rows:
    """DDP steps: the timeline of 2 hosts on one line, replayed for others."""
    model = fitted_to((*LAN, *WAN), options)
    base = trained(Net(200), 2, "")
    rows = []
    for net, hosts, codec in (
        (Net(200), 2, ""), (Net(200), 4, ""), (Net(200), 8, ""), (Net(100), 2, ""),
        (Net(100), 4, ""), (Net(300), 6, ""), (Net(200), 2, "int8"), (Net(200), 4, "int8"),
        (Net(200), 8, "int8"), (Net(100), 4, "bfloat16"), (Net(100), 8, "int4"),
        (Net(50, 10), 2, ""), (Net(50, 10), 4, "int8"),
    ):  # fmt: skip
        ran = trained(net, hosts, codec)
        found = step.predict(base, net.job(hosts), model, codec)
        rows.append(
            row(f"step {codec}".strip(), *constants.quantiles(ran.times), found)
            | {"part": "steps", "where": f"{hosts} hosts, {net}", "ranks": hosts, "codec": codec}
        )  # fmt: skip
        show(rows[-1:])
    return rows


def beyond(options: Any) -> Rows:
    """Ranks of one host, more than were measured."""
    points = measure.measure_here(options.rounds, options.span, lambda what: print(f"# {what}"))
    model = constants.fit(points, Model(cores=CORES))
    return compared(model, inside(SHARED_CALLS, 3 * CORES, options), "beyond")


PARTS = {"shared": shared, "lan": lan, "wan": wan, "steps": steps, "beyond": beyond}


def main() -> int:
    """Measures the parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--span", type=float, default=0.05, help="seconds of a call in a round")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="the constants of the last part, as a file")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--codec", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.codec)
        return 0
    rows: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        rows = [
            r for r in json.loads(options.out.read_text())["rows"]
            if r["part"] not in options.parts.split(",")
        ]  # fmt: skip
    for part in options.parts.split(","):
        begin = time.monotonic()
        rows += PARTS[part](options)
        print(f"# {part}: {time.monotonic() - begin:.0f} s", flush=True)
        if options.out:
            lines = ",\n".join(map(json.dumps, rows))
            head = json.dumps({"machine": describe_machine()})[:-1]
            options.out.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
