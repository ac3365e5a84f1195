"""Builds and tests ringreduce on several versions of torch: `make torch-matrix`.

    python tests/torch_matrix.py 2.11.0 2.14.1

Each version has an environment of its own, .venv-VERSION, made when it is missing, and kept.  With
--venv it holds torch alone, and borrows everything else.  The table of results also goes to
build/torch-matrix.md, all output to build/torch-matrix-VERSION.log.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = ("passed", "failed", "skipped")


def make(target: str, variables: list[str], log: Path) -> tuple[bool, str, float]:
    """Runs one target; returns whether it passed, its output and the seconds that it took."""
    start = time.monotonic()
    command = ["make", "-C", str(ROOT), target, *variables]
    env = os.environ | {"RINGREDUCE_CUDA": "0"}  # nothing here runs on a GPU
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with log.open("a") as file:
        file.write(done.stdout)
    return done.returncode == 0, done.stdout, time.monotonic() - start


def pytest_counts(output: str) -> str:
    """Of the last line of pytest: passed, failed and skipped."""
    last = re.findall(r"^\d+ \w+.* in [\d.]+s", output, re.MULTILINE)[-1:]
    found = {name: number for number, name in re.findall(r"(\d+) (\w+)", "".join(last))}
    return " / ".join(found.get(name, "0") for name in OUTCOMES) if found else "none"


def suite_counts(output: str) -> str:
    """Of the table of torch-suite: ours and Gloo's, both parts of it together."""
    rows = re.findall(r"(passed|failed|skipped) +(\d+) +(\d+)$", output, re.MULTILINE)
    if not rows:
        return "none"

    def counts(column: int) -> str:
        return " / ".join(str(sum(int(r[column]) for r in rows if r[0] == n)) for n in OUTCOMES)

    known = re.search(r"but for (\d+) on the list", output)
    return f"{counts(1)}{f' ({known[1]} known)' if known else ''}, Gloo {counts(2)}"


def test(version: str, venv: str, base: str) -> tuple[bool, str]:
    """All of one version; returns whether it passed and its row of the table."""
    log = ROOT / "build" / f"torch-matrix-{version}.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    variables = [f"TORCH=torch=={version}", f"VENV={venv}", f"BASE_VENV={base}"]
    good, _, seconds = make("build", variables, log)
    cells = [version, f"{'passed' if good else 'FAILED'}, {seconds:.0f} s"]
    for target, counts in (("test-c10d", pytest_counts), ("torch-suite", suite_counts)):
        if cells[1].startswith("FAILED"):
            cells.append("not run")
            continue
        passed, output, seconds = make(target, variables, log)
        good = good and passed
        cells.append(f"{'' if passed else 'FAILED: '}{counts(output)}, {seconds:.0f} s")
    if not good:
        print(f"torch {version}: see {log}", flush=True)
    return good, f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="+", help="such as 2.14.1")
    parser.add_argument("--torch", default="", help="the requirement that --venv was made with")
    parser.add_argument("--venv", default="", help="an environment of that version")
    args = parser.parse_args()
    rows = [
        "| torch | build | test-c10d: passed / failed / skipped | torch-suite: the same |",
        "|---|---|---|---|",
    ]
    all_good = True
    for version in args.versions:
        mine = args.torch == f"torch=={version}" and args.venv
        venv, base = (args.venv, "") if mine else (f".venv-{version}", args.venv)
        good, row = test(version, venv, base)
        all_good = all_good and good
        rows.append(row)
        print(row, flush=True)
    table = "\n".join(rows)
    (ROOT / "build" / "torch-matrix.md").write_text(table + "\n")
    print(table)
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
