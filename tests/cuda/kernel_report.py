"""Fails if a GPU kernel spills registers to memory.

    python3 tests/cuda/kernel_report.py build/cuda/ptxas.log

The log is what `ptxas -v` said for each kernel and architecture; the build collects it.  Standard
library only, so that it runs wherever nvcc does.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(\S+)' for '(sm_\w+)'")
FUNCTION = re.compile(r"ptxas info\s*: Function properties for (\S+)")
MEMORY = re.compile(r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill load")
USED = re.compile(r"ptxas info\s*: Used (\d+) registers")


def spills(log: str) -> tuple[int, dict[tuple[str, str], int]]:
    """How many kernels there are, and the bytes that functions spill, by symbol and architecture.

    Raises ValueError for a log that says other things, or in another order, than expected.
    """
    if "ptxas info" not in log:
        raise ValueError("nothing of ptxas in it; is -Xptxas=-v missing?")
    found: dict[tuple[str, str], int] = {}
    kernels, architecture = 0, ""
    entry = None  # the kernel whose "Used" line has not come yet
    lines = iter(enumerate(log.splitlines(), 1))
    for number, line in lines:
        if match := ENTRY.match(line):
            if entry is not None:
                raise ValueError(f"line {number}: nothing was said of {entry}")
            entry, architecture = match.groups()
        elif match := FUNCTION.match(line):
            number, line = next(lines, (number + 1, ""))
            memory = MEMORY.match(line)
            if memory is None or not architecture:
                raise ValueError(f"line {number}: not the memory of {match[1]}")
            found[match[1], architecture] = int(memory[2]) + int(memory[3])
        elif USED.match(line):
            if (entry, architecture) not in found:
                raise ValueError(f"line {number}: registers of an unknown kernel")
            kernels += 1
            entry = None
    if entry is not None:
        raise ValueError(f"it ends before anything was said of {entry}")
    return kernels, {what: bytes for what, bytes in found.items() if bytes}


def demangled(symbol: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None:
        return symbol
    return subprocess.run([tool, symbol], capture_output=True, text=True, check=True).stdout.strip()


def main(path: str) -> int:
    try:
        kernels, spilling = spills(Path(path).read_text())
    except (OSError, ValueError) as error:
        print(f"No report of {path}: {error}", file=sys.stderr)
        return 2
    for (symbol, architecture), count in spilling.items():
        print(f"{demangled(symbol)} spills {count} bytes on {architecture}", file=sys.stderr)
    print(f"{kernels} kernels, {len(spilling)} spill registers")
    return 1 if spilling else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
