"""Prints what each GPU kernel takes of a multiprocessor: registers, shared memory, stack, spills.

    python3 tests/cuda/kernel_report.py build/cuda/ptxas.log

Fails if a kernel spills registers to memory.  The log is what `ptxas -v` said for each kernel and
architecture; the build collects it.  Standard library only, so that it runs wherever nvcc does.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(\S+)' for 'sm_(\w+)'")
FUNCTION = re.compile(r"ptxas info\s*: Function properties for (\S+)")
MEMORY = re.compile(r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill load")
USED = re.compile(r"ptxas info\s*: Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Usage:
    """What one function takes on one architecture, in bytes but for the registers."""

    symbol: str
    architecture: int
    stack: int
    spills: int  # stored and loaded
    registers: int | None = None  # None: no kernel, but a function that kernels call
    shared: int = 0  # known when compiled; more may be asked for at launch


def parse(log: str) -> list[Usage]:
    """Raises ValueError for a log that says other things, or in another order, than expected."""
    if "ptxas info" not in log:
        raise ValueError("nothing of ptxas in it; is -Xptxas=-v missing?")
    found: list[Usage] = []
    architecture = None
    entry = None  # the kernel whose "Used" line has not come yet
    lines = iter(enumerate(log.splitlines(), 1))
    for number, line in lines:
        if match := ENTRY.match(line):
            if entry is not None:
                raise ValueError(f"line {number}: nothing was said of {entry}")
            entry, architecture = match[1], int(re.sub(r"\D", "", match[2]))
        elif match := FUNCTION.match(line):
            number, line = next(lines, (number + 1, ""))
            memory = MEMORY.match(line)
            if memory is None or architecture is None:
                raise ValueError(f"line {number}: not the memory of {match[1]}")
            stack, stores, loads = map(int, memory.groups())
            found.append(Usage(match[1], architecture, stack, stores + loads))
        elif match := USED.match(line):
            if not found or found[-1].symbol != entry:
                raise ValueError(f"line {number}: registers of an unknown kernel")
            found[-1].registers = int(match[1])
            found[-1].shared = sum(int(bytes) for bytes in SHARED.findall(line))
            entry = None
    if entry is not None:
        raise ValueError(f"it ends before anything was said of {entry}")
    return found


def demangled(symbols: list[str]) -> dict[str, str]:
    """Names as in the source, without namespaces and parameters; as they are without c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not symbols:
        return {symbol: symbol for symbol in symbols}
    done = subprocess.run(
        [tool], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return dict(zip(symbols, map(short, done.stdout.splitlines()), strict=True))


def short(name: str) -> str:
    """`kernel<float, 4>` of `void ringreduce::cuda::kernel<float, 4>(Call)`."""
    name = re.sub(r"\(anonymous namespace\)::|ringreduce::|cuda::|_INTERNAL\w+::|^void ", "", name)
    depth = 0
    for position, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:position]
    return name


def table(usages: list[Usage]) -> str:
    """A row a function: registers for each architecture, and the most memory of all of them."""
    architectures = sorted({usage.architecture for usage in usages})
    names = demangled(sorted({usage.symbol for usage in usages}))
    rows = [
        ["registers on", *(f"sm_{number}" for number in architectures), "shared", "stack", "spills"]
    ]
    for symbol in sorted(names, key=names.__getitem__):
        mine = {usage.architecture: usage for usage in usages if usage.symbol == symbol}
        registers = [mine[number].registers if number in mine else None for number in architectures]
        memory = [
            max(getattr(usage, what) for usage in mine.values())
            for what in ("shared", "stack", "spills")
        ]
        rows.append([names[symbol], *("-" if r is None else str(r) for r in registers)])
        rows[-1] += map(str, memory)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def main(path: str) -> int:
    try:
        usages = parse(Path(path).read_text())
    except (OSError, ValueError) as error:
        print(f"No report of {path}: {error}", file=sys.stderr)
        return 2
    if not usages:
        print(f"No kernels in {path}")
        return 0
    print(table(usages))
    spilling = [usage for usage in usages if usage.spills]
    names = demangled([usage.symbol for usage in spilling])
    for usage in sorted(spilling, key=lambda usage: (names[usage.symbol], usage.architecture)):
        where = f"on sm_{usage.architecture}"
        print(f"{names[usage.symbol]} spills {usage.spills} bytes {where}", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
