"""Measures the figures of README.md and docs/, all of one commit, and writes them there.

    make figures                                       # all, in one run (--list says how long)
    python benchmarks/figures.py --list                # what is measured, and how long each takes
    python benchmarks/figures.py --only small_call     # some measurements or tables
    python benchmarks/figures.py --only membership     # one that make figures leaves out
    python benchmarks/figures.py --draft --visits 1    # touches no docs, prints the tables
    python benchmarks/figures.py write                 # the tables again, from the results
    python benchmarks/figures.py check                 # what make lint refuses
    python benchmarks/figures.py compare OLD NEW       # two folders of results

_figures_plan.py has the commands, _figures_tables.py the rows, _figures_pages.py the markers in the
pages.  Each command is run several times, spread over the whole run, so that a figure's spread
holds what the machine did meanwhile.  What these visits found goes to
benchmarks/results/figures/NAME.jsonl (of a draft, to build/figures): a line with the command, the
commit and the machine, then one for each visit, behind which each report of a suite has its own.
A command that fails, or needs what is not there, leaves its tables as they are.  The exit status is
1 if any failed.

`compare` names the figures of NEW whose median lies outside the spread that is printed in OLD.
Times move with the machine, and ratios less, so it counts them apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from _figures_pages import BadMarker, check, replace_blocks
from _figures_plan import (
    FRAMEWORKS,
    MEASUREMENTS,
    MPI,
    ROOT,
    ROOT_ONLY,
    TABLES,
    WHERE,
    Measurement,
    in_run,
)

RESULTS = ROOT / "benchmarks" / "results" / "figures"
DRAFTS = ROOT / "build" / "figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A figure in a cell: the median, a unit perhaps ("x" of a ratio), and the spread.
FIGURE = re.compile(r"([\d.,]+)(?: ([A-Za-z%/]+))? \(([\d.,]+)-([\d.,]+)\)")

UNIT_SECONDS = {"us": 1e-6, "ms": 1e-3}  # two runs may write a time in different units
RATIOS, OTHERS = "ratios", "times, rates and counts"


def why_not(one: Measurement) -> str:
    """What the measurement needs and is not there, or ""."""
    if one.needs == ROOT_ONLY:
        sys.path.append(str(ROOT / "tests"))
        import hosts

        return hosts.why_not(veth=True)
    there = {
        "": True,
        MPI: bool(importlib.util.find_spec("mpi4py") and shutil.which("mpirun")),
        FRAMEWORKS: frameworks_python().exists(),
    }[one.needs]
    return "" if there else f"needs {one.needs}"


def frameworks_python() -> Path:
    """That of the environment that `make frameworks` makes."""
    return ROOT / ".venv-frameworks" / "bin" / "python"


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


# All that may change a figure.
CODE = ("--", ".", ":!*.md", ":!benchmarks/results")


def code_commit() -> str:
    """The last commit that changed more than pages and results."""
    return git("log", "-1", "--format=%h", "--abbrev=7", *CODE)


def changed() -> list[str]:
    """Files that may change a figure and differ from HEAD."""
    return git("diff", "--name-only", "HEAD", *CODE).splitlines()


# ---- the run


def arguments_of(one: Measurement, output: Path) -> tuple[list[str], dict[str, str]]:
    """The command as it is run, and variables for it."""
    words = shlex.split(one.command)
    variables = {}
    while "=" in words[0]:
        name, variables[name] = words.pop(0).split("=", 1)
    python = str(frameworks_python()) if one.needs == FRAMEWORKS else sys.executable
    programs = {"python": [python], "torchrun": [python, "-m", "torch.distributed.run"]}
    return [*programs[words[0]], *words[1:], one.output, str(output)], variables


def visit(one: Measurement, log: Path, limit: float) -> Any:
    """What one run of the command found. Raises RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="figures-") as folder, log.open("w") as out:
        output = Path(folder) if one.folder else Path(folder) / "found.json"
        command, variables = arguments_of(one, output)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"took more than {limit:.0f} s: {log}") from error
            raise
        if status:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"ended with status {status}: {log}\n{end}")
        if one.folder:
            paths = sorted(output.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            return {path.stem: json.loads(path.read_text()) for path in paths}
        return json.loads(output.read_text())


def schedule(names: Sequence[str], visits: int | None) -> list[str]:
    """The order of all visits: each measurement's are spread evenly over the run."""
    turns = []
    for place, name in enumerate(names):
        count = visits or MEASUREMENTS[name].visits
        turns += [((number + 0.5) / count, place, name) for number in range(count)]
    return [name for _, _, name in sorted(turns)]


def measure(names: Sequence[str], visits: int | None, results: Path) -> tuple[dict[str, Any], bool]:
    """Runs all visits; the results of what was measured completely, and whether nothing failed."""
    from ringreduce.core.processes import exit_at
    from ringreduce.tools.bench.machine import describe_machine

    exit_at(signal.SIGTERM, signal.SIGHUP)  # so that the command that runs is ended too
    logs = DRAFTS / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    wanted, failed = [], set()
    for name in names:
        if reason := why_not(MEASUREMENTS[name]):
            print(f"skipped: {name} {reason}; its tables stay as they are", flush=True)
        else:
            wanted.append(name)
    commit = code_commit()
    found: dict[str, dict[str, Any]] = {
        name: {
            "command": MEASUREMENTS[name].command,
            "commit": commit,
            "machine": describe_machine(),
            "visits": [],
        }
        for name in wanted
    }
    turns = schedule(wanted, visits)
    total, begun = sum(MEASUREMENTS[name].seconds for name in turns), time.monotonic()
    for number, name in enumerate(turns, 1):
        if name in failed:
            continue
        one, load, start = MEASUREMENTS[name], os.getloadavg()[0], time.monotonic()
        began = datetime.now(timezone.utc).isoformat(timespec="seconds")
        told = f"[{number}/{len(turns)}, {start - begun:.0f} s of about {total}] {name}"
        print(f"{told} (about {one.seconds} s)", flush=True)
        log = logs / f"{name}-{len(found[name]['visits']) + 1}.txt"
        try:
            seen = visit(one, log, limit=120 + 8 * one.seconds)
        except RuntimeError as error:
            print(f"FAILED: {name} {error}", flush=True)
            failed.add(name)
            continue
        seconds = round(time.monotonic() - start, 1)
        found[name]["visits"].append(
            {"began": began, "seconds": seconds, "load": round(load, 2), "found": seen}
        )
    results.mkdir(parents=True, exist_ok=True)
    done = {name: found[name] for name in wanted if name not in failed}
    for name, document in done.items():
        write_results(results / f"{name}.jsonl", document)
        mean = sum(one["seconds"] for one in document["visits"]) / len(document["visits"])
        print(f"{name}: {mean:.0f} s a visit, planned {MEASUREMENTS[name].seconds}")
    print(f"{time.monotonic() - begun:.0f} s in all, planned {total}", flush=True)
    return done, not failed


# ---- the tables


def write_results(path: Path, document: dict[str, Any]) -> None:
    """Writes what the visits found; what all reports say of the machine once."""
    from ringreduce.core.files import replacing

    suites = [suite_of(one["found"]) for one in document["visits"]]
    every = [report for suite in suites for report in suite]
    same = {
        key: every[0][key]
        for key in ("machine", "library")
        if every and all(key in one and one[key] == every[0].get(key) for one in every)
    }
    lines: list[dict[str, Any]] = [document | {"visits": len(document["visits"])}]
    lines[0] |= {"reports": same} if same else {}
    for one, suite in zip(document["visits"], suites, strict=True):
        found = one["found"]
        if suite:
            found = {key: value for key, value in found.items() if key != "reports"}
        lines.append(one | {"found": found} | ({"reports": len(suite)} if suite else {}))
        for report in suite:
            own = {key: value for key, value in report.items() if key not in same}
            lines.append({"report": own})
    with replacing(path) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def suite_of(found: Any) -> list[dict[str, Any]]:
    return found.get("reports", []) if isinstance(found, dict) else []


def read_results(folder: Path) -> dict[str, Any]:
    """All results of a folder. Raises OSError, ValueError."""
    found = {}
    for name in MEASUREMENTS:
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            continue
        try:
            head, *lines = map(json.loads, path.read_text().splitlines())
            same, visits = head.pop("reports", {}), []
            while lines:
                visit = lines.pop(0)
                found_then = visit["found"]
                if count := visit.pop("reports", 0):
                    found_then["reports"] = [lines.pop(0)["report"] | same for _ in range(count)]
                visits.append(visit)
            if head["visits"] != len(visits):
                raise ValueError(f"it has {len(visits)} of {head['visits']} visits")
            found[name] = head | {"visits": visits}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: it is damaged: {error!r}") from error
        if not visits:
            raise ValueError(f"{path} holds no measurements")
    return found


def cells_of(name: str, results: dict[str, Any]) -> list[list[str]]:
    """The cells of a table."""
    from _figures_tables import ROWS

    measured = TABLES[name].measured
    return ROWS[name]({m: [one["found"] for one in results[m]["visits"]] for m in measured})


def origin_of(names: Sequence[str], results: dict[str, Any]) -> tuple[str, str]:
    """Commit and machine of some measurements. Raises ValueError if they are not of one."""
    origins = {(results[name]["commit"], machine_of(results[name])) for name in names}
    if len(origins) != 1:
        raise ValueError(
            f"{', '.join(names)} are not of one commit and machine: measure them again"
        )
    return origins.pop()


def machine_of(document: dict[str, Any]) -> str:
    """The machine in words."""
    about = document["machine"]
    cpu = re.sub(r"\((?:R|TM)\)| Processor|@.*", "", about["cpu"]).strip()
    memory = round(about["memory_bytes"] / (1 << 30))
    system = " ".join(about["kernel"].split("-")[0].split()[:2])
    return (
        f"{about['cores']} cores of an {cpu}, {memory} GiB, {system}, torch {about['torch']}, "
        f"Python {about['python']}"
    )


def how(names: Sequence[str], results: dict[str, Any]) -> str:
    """When and how often something was measured."""
    visits = [one for name in names for one in results[name]["visits"]]
    counts = sorted({len(results[name]["visits"]) for name in names})
    days = sorted({one["began"][:10] for one in visits})
    loads = [one["load"] for one in visits]
    often = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    begin, end = (
        datetime.fromisoformat(pick(one["began"] for one in visits)) for pick in (min, max)
    )
    minutes = round((end - begin).total_seconds() / 60)
    return (
        f"{' and '.join(days)}, each command {often} times, spread over {minutes} minutes, "
        f"load {min(loads):.1f} to {max(loads):.1f}"
    )


def where_lines(names: Sequence[str], results: dict[str, Any]) -> list[str]:
    """What the block `where` of a page says."""
    commit, machine = origin_of(names, results)
    return wrap(
        "`make figures` measured the tables that stand right under their commands here at commit "
        f"{commit}, on {machine}: {how(names, results)}. A figure is the median of all "
        "rounds, with the lowest and the highest of them behind it. A ratio is that of two times "
        "of the same round, "
        "likewise. All rounds are in `benchmarks/results/figures/`."
    )


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 115, break_long_words=False, break_on_hyphens=False)


def block_of(name: str, results: dict[str, Any]) -> list[str]:
    """What stands between the markers of a table: its commands, and the table."""
    from ringreduce.tools.bench.summary import markdown_table

    measured = TABLES[name].measured
    lines = ["", *(f"    {results[m]['command']}" for m in measured), ""]
    lines += [*markdown_table(cells_of(name, results)), ""]
    if TABLES[name].because:
        commit, machine = origin_of(measured, results)
        said = f"Medians, lowest and highest; commit {commit}, {machine}; {how(measured, results)}."
        lines += [*wrap(said), ""]
    return lines


def complete(results: dict[str, Any]) -> list[str]:
    """Tables whose measurements are all there."""
    return [name for name, table in TABLES.items() if all(m in results for m in table.measured)]


def draw(visits: Sequence[dict[str, Any]], path: Path) -> None:
    """The picture of an all-reduce, of the rounds of all visits."""
    from ringreduce.tools.bench.plot import write_plot
    from ringreduce.tools.bench.results import Report

    first, *others = (Report.from_json(one["found"]) for one in visits)
    for other in others:
        for mine, theirs in zip(first.rows, other.rows, strict=True):
            for key, measurement in mine.measurements.items():
                measurement.seconds += theirs.measurements[key].seconds
    write_plot(first, path)


def write_pages(results: dict[str, Any]) -> None:
    """Puts the tables into the pages, and says what lint will refuse."""
    tables = complete(results)
    pages: dict[Path, str] = {}
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        here = [name for name in tables if page in TABLES[name].pages]
        if not here:
            continue
        written = {}
        for name in here:
            written[name] = (*origin_of(TABLES[name].measured, results), block_of(name, results))
        usual = [m for name in here if not TABLES[name].because for m in TABLES[name].measured]
        if usual:
            usual = list(dict.fromkeys(usual))
            written[WHERE] = (*origin_of(usual, results), where_lines(usual, results))
        pages[path] = replace_blocks(path.read_text(), written)
    for path, text in pages.items():  # now that nothing failed
        path.write_text(text)
    print(f"written: {', '.join(tables)}")
    if "all_reduce" in results:
        draw(results["all_reduce"]["visits"], RESULTS.parent / "all_reduce_2.png")
    for fault in check(PAGES):
        print(f"lint will refuse: {fault}")


# ---- two runs


@dataclass
class Compared:
    """How many figures were compared, and how many left the old spread."""

    count: int = 0
    left: int = 0


def outside(
    old: Sequence[Sequence[str]], new: Sequence[Sequence[str]], counts: dict[str, Compared]
) -> list[str]:
    """What left the old spread in a table, or has none; adds to the counts of RATIOS and OTHERS."""
    found = []
    titles = old[0]
    known = {row_key(old, number): row for number, row in enumerate(old)}
    for number, row in enumerate(new):
        before = known.get(row_key(new, number))
        if before is None:
            found.append(f"{' '.join(row_key(new, number))}: not compared, the row is new")
            continue
        for title, mine, theirs in zip(titles[1:], row[1:], before[1:], strict=True):
            pairs = zip(FIGURE.findall(mine), FIGURE.findall(theirs), strict=False)
            for (middle, new_unit, *_), (_, old_unit, low, high) in pairs:
                compared = counts[RATIOS if new_unit == "x" else OTHERS]
                compared.count += 1
                value = number_of(middle, new_unit)
                if not number_of(low, old_unit) <= value <= number_of(high, old_unit):
                    compared.left += 1
                    what = f"{' '.join(row_key(new, number))}, {title}"
                    now, before_it = f"{middle} {new_unit}", f"{low}-{high} {old_unit}"
                    found.append(f"{what}: {now.strip()}, and before {before_it.strip()}")
    return found


def number_of(text: str, unit: str) -> float:
    """The number in a cell, a time in seconds."""
    return float(text.replace(",", "")) * UNIT_SECONDS.get(unit, 1.0)


def row_key(rows: Sequence[Sequence[str]], number: int) -> tuple[str, ...]:
    """What names a row: its first cell, or that of a row above, and other cells without figures."""
    first = next((rows[n][0] for n in range(number, -1, -1) if rows[n][0]), "")
    return (first, *(cell for cell in rows[number][1:3] if cell and not FIGURE.search(cell)))


def compare(old: Path, new: Path) -> int:
    """Prints what left its spread; the exit status is 1 if anything did. Raises as read_results."""
    before, after = read_results(old), read_results(new)
    for folder, results in ((old, before), (new, after)):
        if not results:
            raise ValueError(f"{folder} holds no results")
    counts = {RATIOS: Compared(), OTHERS: Compared()}
    for name in TABLES:
        if name not in complete(before) or name not in complete(after):
            if name in complete(before) or name in complete(after):
                print(f"{name}: not compared, for only one folder has it")
            continue
        for line in outside(cells_of(name, before), cells_of(name, after), counts):
            print(f"{name}: {line}")
    for what, compared in counts.items():
        print(f"{compared.left} of {compared.count} {what} left the spread")
    all_stayed = not any(compared.left for compared in counts.values())
    return 0 if all_stayed and any(compared.count for compared in counts.values()) else 1


# ---- the command line


def list_all() -> None:
    usual = in_run()
    print(f"{'name':<18}{'visits':>7}{'s each':>8}  command")
    for name, one in MEASUREMENTS.items():
        left = "" if name in usual else "  (only by --only)"
        needs = f"  (needs {one.needs})" if one.needs else ""
        print(f"{name:<18}{one.visits:>7}{one.seconds:>8}  {one.command}{needs}{left}")
    total = sum(MEASUREMENTS[name].seconds * MEASUREMENTS[name].visits for name in usual)
    print(f"make figures: about {total} s, {total / 60:.0f} minutes, on 2 idle cores")


def chosen(parser: argparse.ArgumentParser, only: Sequence[str]) -> list[str]:
    """The measurements that are asked for, by name or by that of a table."""
    if not only:
        return in_run()
    names = set()
    for name in only:
        if name not in MEASUREMENTS and name not in TABLES:
            parser.error(f"--only: there is no {name}; --list has the names")
        names |= {name} & MEASUREMENTS.keys()
        names |= set(TABLES[name].measured if name in TABLES else ())
    return [name for name in MEASUREMENTS if name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("action", nargs="?", default="run", choices=["run", "write", "check", "compare"])
    add("paths", nargs="*", type=Path, help="of check: pages; of compare: two folders")
    add("--list", action="store_true", help="say what is measured and how long it takes")
    add("--only", nargs="+", default=[], metavar="NAME", help="measurements or tables")
    add("--visits", type=int, help="of each command (as --list says)")
    add("--draft", action="store_true", help="touch no docs; print the tables")
    options = parser.parse_args(arguments)
    if options.list:
        list_all()
        return 0
    if options.visits is not None and options.visits < 1:
        parser.error("--visits takes a number above 0")
    if options.action == "compare" and len(options.paths) != 2:
        parser.error("compare takes two folders with results")
    if options.action == "write" and options.draft:
        parser.error("write changes the docs: leave out --draft")
    try:
        if options.action == "check":
            faults = check([path.resolve() for path in options.paths] or PAGES)
            print("\n".join(faults) if faults else "figures: all tables of times have their origin")
            return 1 if faults else 0
        if options.action == "compare":
            return compare(*options.paths)
        if options.action == "write":
            write_pages(read_results(RESULTS))
            return 0
        if not options.draft and (names := changed()):
            parser.error(f"figures are of a commit: commit {', '.join(names)} first, or --draft")
        results, right = measure(
            chosen(parser, options.only), options.visits, DRAFTS if options.draft else RESULTS
        )
        if options.draft:
            for name in complete(results):
                print("\n".join([f"\n{name}", *block_of(name, results)]))
        else:
            stored = read_results(RESULTS).items()
            write_pages({name: one for name, one in stored if one["commit"] == code_commit()})
    except (OSError, ValueError, BadMarker) as error:
        print(f"figures.py: {error}", file=sys.stderr)
        return 1
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
