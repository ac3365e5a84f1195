"""The figures in README.md and docs/: their markers, and what `make lint` refuses.

Markers are comments of Markdown, which no reader sees:

    <!-- figures NAME commit=1234abc machine="2 cores of ..." -->
    <!-- measured NAME commit=1234abc machine="..." because="it needs a GPU" -->
    <!-- end -->

What lies between `figures` and `end` is written by `make figures` (benchmarks/figures.py), which
measures all of it in one run: so all of a page are of one commit and one machine.  A table that
this run does not measure stands between `measured` and `end`, with a commit and a machine of its
own and the reason.  If benchmarks/figures.py knows its NAME, it writes it when asked for that name.
commit=unrecorded is for figures from before there were markers, whose commit nobody wrote down.

Only the standard library is needed here: lint runs before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from _figures_plan import ROOT, TABLES, WHERE

FIGURES, MEASURED = "figures", "measured"
ATTRIBUTES = {FIGURES: {"commit", "machine"}, MEASURED: {"commit", "machine", "because"}}
MARKER = re.compile(r"<!-- (figures|measured)\b(.*) -->")
ATTRIBUTE = re.compile(r'(\w+)=("[^"]*"|\S+)')
END = "<!-- end -->"
UNRECORDED = "unrecorded"
COMMIT = re.compile(rf"[0-9a-f]{{7,40}}|{UNRECORDED}")

# Times and rates.  "x" is how many times as fast; GB and % are no times.
UNIT = r"(?:us|ms|s|seconds|milliseconds|microseconds|[GMK]B/s|[GMk]bit/s|tokens/s|x)"
NUMBER = r"~?[-+]?\d[\d,]*(?:\.\d+)?"
SPREAD = rf"(?: \({NUMBER}(?:-| to ){NUMBER}\))?"
VALUE = re.compile(rf"\**{NUMBER}{SPREAD} {UNIT}(?![\w/])")
PLAIN = re.compile(rf"\**{NUMBER}(?:-{NUMBER})?{SPREAD}\**( %)?|-|")
IN_TITLE = re.compile(rf"(?:^|[\s,(/]){UNIT}(?:$|[\s,)])")
COMMAND = re.compile(
    r"(?:^|`|\s)(?:[A-Z_]+=\S+ )*(?:(?:python3?|torchrun|mpirun|make) [\w./-]|build/|benchmarks/\w)"
)
RUN = re.compile(r"^ {4}(?:[A-Z_]+=\S+ )*(?:python3?|torchrun) .*")
PROGRAM = re.compile(r"(?<=\s)(?:-m ringreduce[\w.]*|(?:benchmarks|examples|tests)/[\w/]+\.py)")


@dataclass
class Block:
    """What lies between two markers; `first` is the number of the opening one, from 0."""

    kind: str
    name: str
    commit: str
    machine: str
    because: str
    first: int
    last: int
    lines: list[str]


class BadMarker(Exception):
    """A marker that cannot be read: its line, from 0, and why."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line


def blocks_of(lines: Sequence[str]) -> list[Block]:
    """All blocks of a page. Raises BadMarker."""
    found: list[Block] = []
    opened: Block | None = None
    for number, line in enumerate(lines):
        if line.strip().startswith("<!-- end"):
            if opened is None or line != END:
                raise BadMarker(number, f"an end without a beginning, or not just {END}")
            opened.last = number
            opened.lines = list(lines[opened.first + 1 : number])
            found.append(opened)
            opened = None
        elif re.match(r"\s*<!-- *(figures|measured)\b", line):
            if opened is not None:
                raise BadMarker(number, f"the one of line {opened.first + 1} has no {END} yet")
            opened = read_marker(number, line)
    if opened is not None:
        raise BadMarker(opened.first, f"it has no {END}")
    return found


def read_marker(number: int, line: str) -> Block:
    """The block that a line begins. Raises BadMarker."""
    match = MARKER.fullmatch(line)
    if match is None:
        raise BadMarker(number, "a marker is one line of its own")
    kind, rest = match[1], match[2]
    values = {key: value.strip('"') for key, value in ATTRIBUTE.findall(rest)}
    name = ATTRIBUTE.sub("", rest).strip()
    if not re.fullmatch(r"\w+", name) or values.keys() != ATTRIBUTES[kind] or "" in values.values():
        wanted = ", ".join(sorted(ATTRIBUTES[kind]))
        raise BadMarker(number, f"{kind} takes a name, and each of: {wanted}")
    if not COMMIT.fullmatch(values["commit"]):
        raise BadMarker(number, f"{values['commit']} is no commit")
    because = values.get("because", "")
    return Block(kind, name, values["commit"], values["machine"], because, number, number, [])


def marker_of(block: Block) -> str:
    """The opening marker."""
    text = f'<!-- {block.kind} {block.name} commit={block.commit} machine="{block.machine}"'
    return text + (f' because="{block.because}" -->' if block.because else " -->")


def replace_blocks(text: str, written: dict[str, tuple[str, str, list[str]]]) -> str:
    """The page with new commits, machines and lines in the blocks of those names."""
    lines = text.splitlines()
    for block in reversed(blocks_of(lines)):
        if block.name in written:
            block.commit, block.machine, inner = written[block.name]
            lines[block.first : block.last + 1] = [marker_of(block), *inner, END]
    return "\n".join(lines) + "\n"


@dataclass
class MarkdownTable:
    """A table: the number of its first line, from 0, and its cells, the titles first."""

    first: int
    last: int
    rows: list[list[str]]


def without_fences(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The lines that are not in fenced code, with their numbers."""
    fenced = False
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def tables_of(lines: Sequence[str]) -> list[MarkdownTable]:
    """All tables of a page."""
    found: list[MarkdownTable] = []
    for number, line in without_fences(lines):
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if found and found[-1].last == number - 1:
            found[-1].last = number
            if not all(re.fullmatch(":?-+:?", cell) for cell in cells):
                found[-1].rows.append(cells)
        else:
            found.append(MarkdownTable(number, number, [cells]))
    return found


def is_measured(table: MarkdownTable, before: str) -> bool:
    """Whether it has times or rates; `before` is the paragraph in front of it.

    A unit stands in a cell behind a number.  Or it is in the title of a row or column, or in that
    paragraph, and the cells are plain numbers.
    """
    titles, *rows = table.rows
    cells = [cell for row in rows for cell in row[1:]]
    if any(VALUE.match(cell) for cell in cells):
        return True
    plain = [cell for cell in cells if cell not in ("", "-")]
    if not plain or sum(bool(PLAIN.fullmatch(cell)) for cell in plain) <= len(plain) / 2:
        return False
    named = [*titles, *(row[0] for row in rows), before]
    return any(IN_TITLE.search(text) for text in named)


def around(lines: Sequence[str], table: MarkdownTable) -> tuple[str, str]:
    """The text before a table, up to another table or a heading, and the paragraph behind it."""
    start = table.first
    while start > 0 and not re.match(r"#|\||<!-- end", lines[start - 1]):
        start -= 1
    end = table.last + 1
    while end < len(lines) and not lines[end].strip():
        end += 1
    while end < len(lines) and lines[end].strip() and not re.match(r"#|\||<!--", lines[end]):
        end += 1
    return "\n".join(lines[start : table.first]), "\n".join(lines[table.last + 1 : end])


def last_paragraph(text: str) -> str:
    """The last one that is no command."""
    paragraphs = [p for p in re.split(r"\n\s*\n", text.strip()) if not p.startswith("    ")]
    return paragraphs[-1].replace("\n", " ") if paragraphs else ""


def missing_programs(command: str) -> list[str]:
    """Programs of this tree that a command names and that are not there."""
    missing = []
    for name in PROGRAM.findall(command):
        path = ROOT / name.removeprefix("-m ").replace(".", "/")
        there = [ROOT / name] if "/" in name else [path.with_suffix(".py"), path / "__main__.py"]
        if not any(one.is_file() for one in there):
            missing.append(name)
    return missing


def faults_of(page: str, text: str) -> list[tuple[int, str]]:
    """What is wrong with the figures of a page: the line, from 1, and a sentence."""
    lines = text.splitlines()
    try:
        blocks = blocks_of(lines)
    except BadMarker as error:
        return [(error.line + 1, f"bad marker: {error}")]
    found = []
    known = [block for block in blocks if block.kind == FIGURES]
    for before, block in pairwise(known):
        one_machine = before.machine == block.machine or block.commit == UNRECORDED
        if before.commit != block.commit or not one_machine:
            found.append(
                (block.first + 1,
                 f"{block.name} is of {block.commit} on {block.machine}, but {before.name} on the "
                 f"same page of {before.commit} on {before.machine}: run make figures for both")
            )  # fmt: skip
    for block in known:
        what = TABLES.get(block.name)
        if block.name == WHERE:
            continue
        if what is None or what.because or page not in what.pages:
            found.append((block.first + 1, f"make figures writes no {block.name} on this page"))
    if known and WHERE not in {block.name for block in known}:
        found.append((known[0].first + 1, f"no {WHERE} block says where these were measured"))
    for block in blocks:
        for line in block.lines:
            for name in missing_programs(line) if RUN.match(line) and block.kind == FIGURES else []:
                found.append((block.first + 1, f"{block.name}: there is no {name}"))
    names = {block.name for block in blocks}
    for name, what in TABLES.items():
        if page in what.pages and name not in names:
            found.append((1, f"{name} of benchmarks/figures.py has no markers on this page"))
    return found + table_faults(lines, blocks)


def table_faults(lines: Sequence[str], blocks: Sequence[Block]) -> list[tuple[int, str]]:
    """Tables with times or rates that nobody can measure again."""
    found = []
    for table in tables_of(lines):
        before, behind = around(lines, table)
        inside = [block for block in blocks if block.first < table.first < block.last]
        if not is_measured(table, last_paragraph(before)) and not inside:
            continue
        if not COMMAND.search(before) and not COMMAND.search(behind):
            found.append(
                (
                    table.first + 1,
                    "a table of times or rates without the command that measures them",
                )
            )
    return found


def check(pages: Sequence[Path]) -> list[str]:
    """A line for each fault."""
    faults = []
    same: dict[str, tuple[str, Block]] = {}
    for path in pages:
        page = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        text = path.read_text()
        found = faults_of(page, text)
        faults += [f"{page}:{line}: {fault}" for line, fault in found]
        if any("bad marker" in fault for _, fault in found):
            continue
        for block in blocks_of(text.splitlines()):
            other, first = same.setdefault(block.name, (page, block))
            if block.name in TABLES and block.lines != first.lines:
                faults.append(
                    f"{page}:{block.first + 1}: {block.name} has other figures in {other}"
                )
    return faults
