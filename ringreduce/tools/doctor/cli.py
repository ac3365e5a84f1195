"""The command: who this process is, the facts of all ranks, all checks, the report of rank 0."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from ringreduce.core.launchers import identify
from ringreduce.tools.doctor import checks, network  # noqa: F401 (they enter their checks in the table)
from ringreduce.tools.doctor.exchange import CannotMeet, Gathered, collect
from ringreduce.tools.doctor.judge import judge
from ringreduce.tools.doctor.report import counted, status_of, to_json, to_text

_USAGE = 2  # as argparse's own
_RANK_0_TELLS = 5.0  # seconds; a launcher may end rank 0 when this rank ends with an error


def _heading(gathered: Gathered, aside: str) -> str:
    """What was looked at."""
    one = gathered.facts[0]
    came = f"{len(gathered.facts)} of " * bool(gathered.absent)
    text = (
        f"ringreduce {one.ringreduce}, torch {one.torch}; {came}"
        f"{counted(one.world_size, 'rank')} ({one.launcher}) on "
        f"{counted(len(gathered.hosts()), 'host')}"
    )
    if gathered.lines:
        trips = sorted(line.round_trip * 1e3 for line in gathered.lines if not line.error)
        text += f"; {len(trips)} of {len(gathered.lines)} connections work"
        text += f", round trips {trips[0]:.2f} to {trips[-1]:.2f} ms" if trips else ""
    return text + (aside and f".{aside}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Looks, and prints what was found.

    Args:
        arguments: of the command line; None for those of the process.

    Returns:
        The exit status: 0, or 1 if something will not work or is slow, 2 for bad usage.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.doctor",
        description="Tell whether this machine, or under torchrun, mpirun or srun all machines of "
        "the job, are fit for ringreduce, and what to do. Exit status 1: something will not work "
        "or is slow.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (%(default)g)",
    )
    options = parser.parse_args(arguments)
    if not 0 < options.timeout < 1e6:
        parser.error("--timeout must be a number of seconds above 0")

    try:
        me = identify(os.environ)
        gathered = collect(me, options.timeout)
    except ValueError as error:  # of the launcher's variables
        print(f"python -m ringreduce.doctor: {error}", file=sys.stderr)
        return _USAGE
    except CannotMeet as error:
        # Ranks say only what keeps them from rank 0, which says the rest.
        found = [one for one in judge(error.gathered) if one.severity == "fault"]
        text = to_json(found) if options.json else to_text(found, "")
        print(text.strip(), file=sys.stderr if me.rank else sys.stdout, flush=True)
        time.sleep(_RANK_0_TELLS * bool(me.rank))
        return 1
    if gathered is None:
        return 0
    found = judge(gathered)
    print(to_json(found) if options.json else to_text(found, _heading(gathered, me.aside)))
    return status_of(found)
