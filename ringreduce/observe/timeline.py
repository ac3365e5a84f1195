"""A timeline of what all ranks did in their groups, and who was late.

    RINGREDUCE_TIMELINE=traces torchrun ... train.py    # all of a program
    with ringreduce.timeline("traces"):                 # a part of it
        ...

    python -m ringreduce.timeline late traces           # who was late, where, and who waited for it
    python -m ringreduce.timeline summary traces        # a table of ranks and groups
    python -m ringreduce.timeline merge traces          # traces/trace.json, for Perfetto and Chrome

Each rank writes a file (files.py).  Each has the arrivals of its own rank, which are exact; matched
by group and number, they say who was late (late.py, report.py).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ringreduce.core.words import say
from ringreduce.observe import follow
from ringreduce.observe.files import Writer, load
from ringreduce.observe.report import late_text, summary_text, write_trace

_log = logging.getLogger("ringreduce")

_VARIABLE = "RINGREDUCE_TIMELINE"


class timeline:
    """Writes what happens on this rank to a file in a directory, from entry to exit.

        with ringreduce.timeline("traces"):
            train()

    Use it on all ranks, with a directory that they share, or whose files are brought together
    afterwards; `python -m ringreduce.timeline` reads them.  The file is named after the job and the
    rank.  Another recording of that rank is appended.  If the file cannot be written, the log says
    so once, and the program goes on.

    Args:
        directory: made if there is none.
        group: only this group (or the one of ringreduce beside it); None for all of the process,
            those that are made later too.
    """

    _period = 0.05  # seconds between two looks at the records, of which a group keeps 4,096

    def __init__(
        self, directory: str | os.PathLike[str], group: dist.ProcessGroup | None = None
    ) -> None:
        self.directory = Path(directory)
        self.lost = 0  # records that were overwritten before they could be written
        name = None if group is None else group.group_name
        self._wanted = {name, f"{name}/ringreduce"} if name else None
        self._writer = Writer(self.directory)

    @property
    def path(self) -> Path | None:
        """Of the file, once there is one."""
        return self._writer.path

    def __enter__(self) -> timeline:
        follow.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        follow.remove(self)

    # ---- as a sink

    def _wants(self, group: dist.ProcessGroup) -> bool:
        return not self._wanted or group.group_name in self._wanted

    def _take_news(self, news: list[follow.News]) -> None:
        for one in news:
            if one.operations or one.messages:
                self.lost += one.lost
                self._writer.add(one)

    def _close(self) -> None:
        self._writer.close(self.lost)

    def __str__(self) -> str:
        return f"its timeline in {self.directory}"


_by_variable: timeline | None = None


def follow_variable() -> None:
    """Begins what RINGREDUCE_TIMELINE asks for, or ends it, when a group is made."""
    global _by_variable
    directory = os.environ.get(_VARIABLE) or None
    if (_by_variable and str(_by_variable.directory)) == (directory and str(Path(directory))):
        return
    try:
        if _by_variable is not None:
            _by_variable.__exit__()
        _by_variable = timeline(directory).__enter__() if directory else None
    except Exception as error:  # no more threads
        _by_variable = None
        _log.warning("%s is ignored: %s", _VARIABLE, error)


def _forget() -> None:
    global _by_variable
    _by_variable = None


os.register_at_fork(after_in_child=_forget)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the files of a directory.

    Args:
        arguments: of the command line; None for those of the process.

    Returns:
        The exit status: 1 if there is no timeline, or the trace cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.timeline",
        description="Read what RINGREDUCE_TIMELINE=DIR or ringreduce.timeline(DIR) has written.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="one trace of all ranks, for Perfetto and Chrome")
    merge.add_argument("-o", "--output", type=Path, help="DIR/trace.json; with gzip if NAME.gz")
    commands.add_parser("summary", help="a table of ranks and groups")
    late = commands.add_parser("late", help="who was late, where, and who waited for it")
    late.add_argument("-n", "--most", type=int, default=10, help="so many operations are told")
    for command in commands.choices.values():
        command.add_argument(
            "--job",
            default="",
            help="its name or identity, if several wrote there; else the newest",
        )
        command.add_argument("directory", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        folder = load(options.directory)
        job = folder.job(options.job)
        problems: list[str] = []
        if options.command == "merge":
            path = options.output or options.directory / "trace.json"
            count = write_trace(job, path, problems)
            said = f"{path}: {count} events of {len(job.recordings)} recordings"
        elif options.command == "summary":
            said = summary_text(job, problems)
        else:
            said = late_text(job, problems, options.most)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    say("\n".join([said, *folder.notes(job), *problems]))
    return 0
