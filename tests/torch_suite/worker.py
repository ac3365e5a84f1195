"""Runs tests of one pass (cases.py) one after another, and writes what came of each to stdout.

run.py starts it.  It writes JSON lines: the tests it is going to run; then for each its name when
it starts, and its name, outcome, seconds and reason when it has ended.  All that the tests print
goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import unittest

import cases


def outcome_of(result: unittest.TestResult) -> tuple[str, str]:
    """pass, skip or fail, and why it was not the first."""
    broken = result.failures + result.errors
    if broken:
        return "fail", broken[0][1].strip()
    if result.skipped:
        return "skip", result.skipped[0][1]
    if result.unexpectedSuccesses or not result.testsRun:
        return "fail", "an unexpected success, or no test"
    return "pass", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", metavar="PART", action="append", help="tests whose names have PART")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork")
    parser.add_argument("tests", nargs="*", help="names; all if there are none")
    arguments = parser.parse_args()

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases.limit_tests(arguments.limit)
    can_fork = not cases.ON_GPUS or cases.on_gpus.can_fork()
    cases.Ranks.start_method = arguments.start if can_fork else "spawn"
    known = cases.all_tests()
    names = [name for name in known if name in arguments.tests or not arguments.tests]
    if arguments.k:
        names = [name for name in names if any(part in name for part in arguments.k)]
    print(json.dumps(names), file=out, flush=True)
    for name in names:
        print(json.dumps(name), file=out, flush=True)
        print(f"=== {name}", file=sys.stderr, flush=True)
        case, method = known[name]
        result = unittest.TestResult()
        start = time.monotonic()
        unittest.TestSuite([case(method)]).run(result)
        outcome, why = outcome_of(result)
        if outcome == "fail":
            print(why, file=sys.stderr, flush=True)
        seconds = round(time.monotonic() - start, 2)
        print(json.dumps([name, outcome, seconds, why]), file=out, flush=True)


if __name__ == "__main__":
    main()
