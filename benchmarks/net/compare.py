"""All-reduce between hosts, ours beside Gloo of the same run, on lines of several kinds.

    python benchmarks/net/compare.py                       # all paths, as root
    python benchmarks/net/compare.py --paths lan_2,wan_bbr --out benchmarks/results
    python benchmarks/net/compare.py --line 100Mbit,20ms,0.1%,cubic --hosts 4    # a line of yours
    python benchmarks/net/compare.py --backend gloo --compare ""    # the benchmark itself

Hosts are network namespaces of this machine and the lines between them are emulated
(tests/hosts.py); loopback alone needs no root.  All ranks share this machine's processors, which
ranks of several hosts would not: a figure says what the line and the protocol allow, at most.

As in ringreduce.bench each contender has rank processes of its own, they take turns, and whoever
is not timed sleeps; results are checked before and after.  busbw is 2(P-1)/P x bytes / time, in
Mbit/s: what a ring carries over each line.  A hierarchical all-reduce carries less, so its busbw
may be more than the line's rate.  "x limit" is the time over the least that any exact all-reduce
can take: a packet's way and a ring's bytes, headers left out.  With --out DIR each path is written
to DIR/net_PATH.json: the schema of ringreduce.tools.bench.results with `path`, `line`,
`congestion`, `busbw_mbit`, for codecs `link_bytes` (of one call, over all links) and the emulator's
`statistics`.  The exit status is 1 if ours was wrong or could not take part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # torch's store asks for the names of addresses, which a namespace has nobody to ask for.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).parents[2] / "tests")]

from _cases import CASES, GLOO, Case, on_line  # noqa: E402
from _coded import coded_lines, count_bytes  # noqa: E402
from hosts import Hosts, HostsError, why_not  # noqa: E402

from ringreduce.core.processes import exit_at  # noqa: E402
from ringreduce.tools.bench.alternate import measure_row, sleepers_warning  # noqa: E402
from ringreduce.tools.bench.launch import Controller, ThisMachine  # noqa: E402
from ringreduce.tools.bench.machine import describe_machine  # noqa: E402
from ringreduce.tools.bench.results import Report, Row, write_json  # noqa: E402
from ringreduce.tools.bench.settings import (  # noqa: E402
    OURS,
    BenchError,
    Settings,
    Unsupported,
    format_size,
    parse_sizes,
)
from ringreduce.tools.bench.summary import format_time  # noqa: E402

COLUMNS = (
    ("size", 8), ("contender", 18), ("time", 9), ("p10-p90", 20), ("busbw", 9), ("x gloo", 7),
    ("x limit", 7), ("", 7),
)  # fmt: skip


class HostsNetwork:
    """The hosts of a case, for the controller."""

    def __init__(self, hosts: Hosts, per_host: int) -> None:
        self._hosts = hosts
        self._per_host = per_host

    @property
    def store_host(self) -> str:
        return self._hosts[0].address

    def inside(self, rank: int) -> contextlib.AbstractContextManager[None]:
        return self._hosts[rank // self._per_host].inside()


@contextlib.contextmanager
def allowed(congestion: str) -> Iterator[None]:
    """Namespaces may choose that congestion control, which a system allows for a few only."""
    path = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    before = path.read_text()
    if not congestion or congestion in before.split():
        yield
        return
    path.write_text(f"{before.strip()} {congestion}")
    try:
        yield
    finally:
        path.write_text(before)


@contextlib.contextmanager
def hosts_of(case: Case) -> Iterator[Hosts | None]:
    """The case's hosts and lines, or None where there is one host only."""
    if case.hosts == 0:
        yield None
        return
    with allowed(case.congestion), Hosts(case.hosts, **case.line) as hosts:  # type: ignore[arg-type]
        for host in hosts.all:
            if case.congestion:
                host.sysctl("net.ipv4.tcp_congestion_control", case.congestion)
        yield hosts


def settings_of(case: Case, options: argparse.Namespace) -> Settings:
    """What the controller is told."""
    return Settings(
        collective="all_reduce",
        world=case.world,
        sizes=options.sizes or case.sizes,
        backend=options.backend,
        compare=options.compare,
        iterations=1 if case.slow else None,
        warmup=case.warmup if case.slow else None,
        rounds=options.rounds or case.rounds,
        timeout=options.timeout,
        codecs=case.codecs if options.backend == "ringreduce" else (),
    )


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One path, printed as it goes; its document. Raises BenchError, HostsError."""
    settings = settings_of(case, options)
    contenders = case.contenders(options.backend, options.compare)
    report = Report(
        collective=settings.collective,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine={**describe_machine(), "environment": environment()},
        library={},
        settings=asdict(settings),
        titles={contender.key: contender.title for contender in contenders},
    )
    statistics: dict[str, Any] = {}
    counted: list[dict[str, float]] = []  # bytes of one call at the links, for each row
    start = time.monotonic()
    print(f"\n# {case.title}", flush=True)
    with hosts_of(case) as hosts:
        network = HostsNetwork(hosts, case.per_host) if hosts else ThisMachine()
        with Controller(settings, range(case.world), network) as controller:
            controller.start(contenders)
            report.skipped = dict(controller.skipped)
            for size in settings.sizes:
                try:
                    row = measure_row(controller, settings, size, 4, report.skipped)
                except Unsupported as reason:
                    report.skipped[OURS] = f"it refused: {reason}"
                    break
                if not row.measurements:
                    break
                report.rows.append(row)
                counted.append(count_bytes(controller, hosts, row) if settings.codecs else {})
                print("\n".join(lines_of(case, row, report, counted[-1])), flush=True)
                for warning in sleepers_warning(row):
                    print(f"# warning: {warning}", flush=True)
            if OURS in controller.sets:  # now that its connections are made
                report.library = controller.sets[OURS].ask("about")[0]
                for route in report.library.get("routes", []):
                    print(f"# rank 0, {route}", flush=True)
                if options.backend == "ringreduce" and not report.library.get("routes"):
                    print("# WARNING: ours has no connections: was this TCP?", flush=True)
            controller.close()
        if hosts and not case.line.get("veth"):
            statistics = hosts.statistics()
    for key, reason in report.skipped.items():
        print(f"# left out: {report.titles[key]}: {reason}", flush=True)
    for fault in report.faults():
        print(f"# WRONG: {fault}", flush=True)
    print(f"# {time.monotonic() - start:.0f} s", flush=True)
    document = report.to_json()
    for row, entry, at_link in zip(report.rows, document["rows"], counted, strict=True):
        for key, measurement in entry["measurements"].items():
            measurement["busbw_mbit"] = mbit(row, key)
            if key in at_link:
                measurement["link_bytes"] = at_link[key]
    line = {"hosts": case.hosts, "ranks_per_host": case.per_host, **case.line}
    congestion = case.congestion or default_congestion()
    return document | {
        "path": case.key, "title": case.title, "line": line, "congestion": congestion,
        "environments": {c.key: c.environment for c in contenders}, "statistics": statistics,
    }  # fmt: skip


def mbit(row: Row, key: str) -> float:
    """Bus bandwidth in Mbit/s."""
    return row.busbw(key) * 8e3


def lines_of(case: Case, row: Row, report: Report, at_link: dict[str, float]) -> list[str]:
    """A line of the table for each contender; of codecs also what they send and lose."""
    lines = []
    for key, measurement in row.measurements.items():
        spread = f"{format_time(measurement.quantile(0.1))} - "
        spread += format_time(measurement.quantile(0.9))
        ratio = ""
        if GLOO in row.measurements and key != GLOO:
            ratio = f"{row.measurements[GLOO].median / measurement.median:.2f}"
        limit = 0.0 if key in case.codecs else case.limit(row.bytes)
        over = f"{measurement.median / limit:.2f}" if limit else ""
        wrong = "" if measurement.wrong == 0 and measurement.same_bits else "WRONG"
        cells = (
            format_size(row.bytes), report.titles[key], format_time(measurement.median), spread,
            f"{mbit(row, key):.0f}", ratio, over, wrong,
        )  # fmt: skip
        lines.append(columns(cells))
    return lines + coded_lines(case.codecs, row, at_link)


def columns(cells: Sequence[str]) -> str:
    """Cells under their headings, the contender's name and the verdict to the left."""
    return "  ".join(
        f"{cell:<{width}}" if name in ("contender", "") else f"{cell:>{width}}"
        for cell, (name, width) in zip(cells, COLUMNS, strict=True)
    ).rstrip()


def default_congestion() -> str:
    """The system's congestion control, which new namespaces start with."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def environment() -> str:
    """The variables that change what ringreduce does, of those that all ranks get."""
    names = sorted(name for name in os.environ if name.startswith("RINGREDUCE_"))
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [case.key for case in CASES]
    parser.add_argument("--paths", default=",".join(known), help=f"some of {', '.join(known)}")
    parser.add_argument(
        "--line", action="append", default=[], help="measure this line in place of the paths: a "
        "rate, a round trip, a loss, mtu=, bbr or cubic (docs/plan.md); may be repeated"
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, help="of --line, with a rank each (default: 2)")
    parser.add_argument("--backend", default="ringreduce", help="what is measured as ours")
    parser.add_argument("--compare", default=GLOO, help="backends to compare with")
    parser.add_argument("--sizes", default="", help='"1K,25M", say (default: by path)')
    parser.add_argument("--rounds", type=int, default=0, help="rounds (default: by path)")
    parser.add_argument("--timeout", type=float, default=120.0, help="of any one step, in seconds")
    parser.add_argument("--out", type=Path, help="a folder for net_PATH.json")
    options = parser.parse_args(arguments)
    options.paths = list(filter(None, options.paths.split(",")))
    options.compare = tuple(filter(None, options.compare.split(",")))
    try:
        options.sizes = parse_sizes(options.sizes) if options.sizes else ()
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(options.paths) - set(known):
        parser.error(f"no such path: {', '.join(sorted(unknown))}")
    if options.hosts is not None and (options.hosts < 2 or not options.line):
        parser.error("--hosts is for --line, and two or more")
    options.cases = [case for case in CASES if case.key in options.paths]
    if options.line:
        try:
            options.cases = [on_line(text, options.hosts or 2) for text in options.line]
        except ValueError as error:
            parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; the exit status."""
    options = parse(arguments)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)  # not to fail after minutes
    machine = describe_machine()
    print(
        f"# all-reduce of float32 between hosts; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['kernel']}, torch {machine['torch']}\n"
        f"# TCP congestion control {default_congestion()} unless said otherwise; busbw in Mbit/s\n"
        f"# {columns([name for name, _ in COLUMNS])[2:]}",
        flush=True,
    )
    status = 0
    for case in options.cases:
        if case.hosts and (reason := why_not()):
            print(f"\n# {case.title}: skipped: {reason}", flush=True)
            continue
        try:
            document = measure(case, options)
        except (BenchError, HostsError, OSError) as error:
            print(f"# FAILED: {error}", flush=True)
            status = 1
            continue
        for row in document["rows"]:
            ours = row["measurements"].get(OURS)
            if ours is None or ours["wrong"] or not ours["same_bits"]:
                status = 1
        if OURS in document["skipped"]:
            status = 1
        if options.out:
            write_json(options.out / f"net_{case.key}.json", document)
    return status


if __name__ == "__main__":
    exit_at(signal.SIGTERM, signal.SIGHUP)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
