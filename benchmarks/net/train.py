"""DDP of the wide MLP between hosts: a step with Gloo, with our exact all-reduce, with codecs.

    python benchmarks/net/train.py                     # two hosts, 1 Gbit/s, as root
    python benchmarks/net/train.py --rate-mbit 100 --ways ours,int8,auto --rounds 3
    python benchmarks/net/train.py --hosts 1           # two ranks of one host: shared memory

The model has 17.1 million parameters and little to compute for each, so that a step is as long as
its gradients take.  Hosts are network namespaces of this machine on an emulated line
(tests/hosts.py); their ranks share its processors.  Each way has rank processes of its own, they
take turns, and who is not timed sleeps (benchmarks/ddp.py).  Codecs run with error feedback.
Gradients are checked against the mean of all ranks' own, before and after.  "auto" chooses between
exact gradients and int8 before it is timed, and is held against the exact way.

The bytes of a step are those that the emulator carried, headers included.  With --out FILE all is
written there as JSON: the schema of benchmarks/_ddp_report.py with `line`, and for each way
`link_bytes` of a step (between hosts).  The exit status is 1 if a gradient was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # torch's store asks for the names of addresses, which a namespace has nobody to ask for.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "tests")]

import _ddp_report  # noqa: E402
import ddp  # noqa: E402
from _coded import carried  # noqa: E402
from _ddp_report import STOCK, ModelResult, Run  # noqa: E402
from compare import HostsNetwork  # noqa: E402
from hosts import Hosts, HostsError, why_not  # noqa: E402

from ringreduce.core.processes import exit_at  # noqa: E402
from ringreduce.tools.bench.launch import Controller  # noqa: E402
from ringreduce.tools.bench.machine import describe_machine  # noqa: E402
from ringreduce.tools.bench.results import write_json  # noqa: E402
from ringreduce.tools.bench.settings import CODECS, BenchError, Contender, Settings  # noqa: E402

AUTO = "auto"
WAYS = ("bare", STOCK, "ours", *CODECS, AUTO)


def contenders(names: Sequence[str], interface: str) -> list[Contender]:
    """The ways to train, by name."""
    environment = {"GLOO_SOCKET_IFNAME": interface}
    known = {
        "bare": ("no sync", "bare", "gloo"),
        STOCK: ("DDP, gloo", "ddp", "gloo"),
        "ours": ("DDP, ringreduce hook", "hook", "ringreduce"),
        **{codec: (f"DDP, {codec}", "codec", "ringreduce") for codec in (*CODECS, AUTO)},
    }
    found = []
    for name in names:
        title, kind, backend = known[name]
        found.append(Contender(name, title, kind, backend, environment, program=ddp.PROGRAM))
    return found


def bytes_of_a_step(controller: Controller, hosts: Hosts, steps: int = 2) -> dict[str, float]:
    """What the links carry for one step, by way; the same rounds under no_sync carry nothing."""
    found = {}
    for key, ranks in controller.sets.items():
        before = carried(hosts)
        ranks.ask("round", steps=steps, warmup=0)
        found[key] = (carried(hosts) - before) / steps
    return found


def run(options: argparse.Namespace) -> int:
    """Measure and report; the exit status."""
    world = max(options.hosts, 2)
    settings = Settings("ddp", world, (), timeout=options.timeout)
    line = {"rate_mbit": options.rate_mbit, "delay_ms": options.delay_ms}
    where = (
        f"{options.hosts} hosts of one rank on this machine, {options.rate_mbit:g} Mbit/s, "
        f"{options.delay_ms:g} ms one way"
    )
    if options.hosts == 1:
        line, where = {}, "ranks of one host"
    ways = contenders(options.ways, "wan0" if line else "lo")
    report = Run(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(),
        settings={
            "device": "cpu", "world": world, "dtype": "float32", "rounds": options.rounds,
            "steps": options.steps, "sharing": "",
        },
        titles={way.key: way.title for way in ways},
        notes=[where],
    )  # fmt: skip
    at_link: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(options.hosts, **line)) if line else None
        network = HostsNetwork(hosts, 1) if hosts else None
        controller = stack.enter_context(Controller(settings, range(world), network))
        controller.start(ways)
        print("\n".join(_ddp_report.preamble(report)), flush=True)
        model = ddp.Race(controller, options, "mlp").run()
        report.models.append(model)
        if hosts:
            at_link = bytes_of_a_step(controller, hosts)
        controller.close()
    lines = [*_ddp_report.table(report, model), *verdicts(model, at_link)]
    print("\n".join(["", *lines]), flush=True)
    if options.out:
        document: dict[str, Any] = {"schema": _ddp_report.SCHEMA, **asdict(report), "line": line}
        for key, way in document["models"][0]["ways"].items():
            way["median_s"] = model.ways[key].median
            if key in at_link:
                way["link_bytes"] = at_link[key]
        write_json(options.out, document)
    for fault in report.faults():
        print(f"# WRONG: {fault}", flush=True)
    return 1 if report.faults() else 0


def verdicts(model: ModelResult, at_link: dict[str, float]) -> list[str]:
    """What each way sends for a step, beside exact, and what auto chose."""
    lines = []
    for key, carried_bytes in at_link.items():
        text = f"# {key}: {carried_bytes / 1e6:.2f} MB at the link a step"
        if key in CODECS and at_link.get("ours"):
            text += f", {carried_bytes / at_link['ours']:.4f} of exact's"
        lines.append(text)
    if AUTO in model.ways:
        lines.append(f"# auto chose {model.ways[AUTO].choice}")
        if "ours" in model.ways:
            times = model.ways[AUTO].median / model.ways["ours"].median
            lines.append(f"# auto: a step takes {times:.3f} of exact's")
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with all that benchmarks/ddp.py's Race asks of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2,
        help="1: two ranks of this host, by shared memory, and no line (2)")  # fmt: skip
    add("--rate-mbit", type=float, default=1000.0)
    add("--delay-ms", type=float, default=0.1, help="one way (0.1)")
    add("--ways", type=lambda text: tuple(text.split(",")), default=WAYS,
        help=f"of {', '.join(WAYS)}")  # fmt: skip
    add("--rounds", type=int, default=5, help="timed turns of each way (5)")
    add("--steps", type=int, default=6, help="timed steps in a turn (6)")
    add("--warmup", type=int, default=1, help="steps before them (1)")
    add("--tiny", action="store_true", help="a model of some thousand parameters, to try it")
    add("--timeout", type=float, default=300.0, help="seconds that any one turn may take")
    add("--out", type=Path, metavar="FILE", help="write FILE, JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"--ways: none of {', '.join(WAYS)}: {', '.join(sorted(unknown))}")
    if min(options.hosts, options.rounds, options.steps) < 1:
        parser.error("--hosts, --rounds and --steps are numbers above 0")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}; make it first")
    options.dtype, options.batch, options.set = "float32", None, []
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    reason = why_not()
    if reason and options.hosts > 1:
        print(f"train.py: no hosts here: {reason}", file=sys.stderr)
        return 1
    try:
        return run(options)
    except (BenchError, HostsError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    exit_at(signal.SIGTERM, signal.SIGHUP)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
