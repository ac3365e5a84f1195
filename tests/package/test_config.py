"""The table of environment variables (csrc/base/config.cc), its documentation, its printing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from ringreduce import config

ROOT = Path(__file__).resolve().parents[2]
TABLE = {row["name"]: row for row in config.variables()}
# Of the build and of tests.
OTHERS = "CUDA CUDA_ARCHS OPENSSL SANITIZE SOURCE TEST_PICTURE VERSION"
PRINT = [sys.executable, "-m", "ringreduce.config"]
CLEAN = {name: text for name, text in os.environ.items() if name not in TABLE}


def documented() -> dict[str, list[str]]:
    """The other cells of the rows of docs/options.md, by variable."""
    rows = (ROOT / "docs" / "options.md").read_text().split("\n")
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row[:3] == "| `"]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_documentation_has_the_same_variables() -> None:
    table = {name: [row["default"], row["holds"]] for name, row in TABLE.items()}
    assert {name: [row[0], row[2]] for name, row in documented().items()} == table


def test_no_variable_is_missing_in_the_table() -> None:
    known = set(TABLE) | {"RINGREDUCE_" + name for name in OTHERS.split()}
    files = [ROOT / "README.md"]
    for folder in ("docs", "csrc", "ringreduce"):
        files += [
            path
            for path in (ROOT / folder).rglob("*.*")
            if path.suffix not in (".so", ".pyc", ".png")
        ]
    texts = {path: path.read_text() for path in files if path.is_file()}
    known |= {macro for text in texts.values() for macro in re.findall(r"#define (\w+)", text)}
    unknown = {word: path.name for path, text in texts.items()
               for word in re.findall(r"RINGREDUCE_[A-Z0-9_]*[A-Z0-9]\b(?!_)", text)
               if word not in known}  # fmt: skip
    assert unknown == {}


def test_what_cannot_be_read_is_printed_with_its_error() -> None:
    bad = {"LANES": "65", "PORTS": "5-4", "RING": "0,0", "SLOT_BYTES": "5000", "CUDA_OTHER": "gloo"}
    given = {"RINGREDUCE_" + name: text for name, text in (bad | {"SLOTS": "8"}).items()}
    said = subprocess.run([*PRINT, "--json"], env=CLEAN | given, capture_output=True)
    assert said.returncode == 1, said.stderr
    rows = {row["name"]: row for row in json.loads(said.stdout)}
    assert {name for name, row in rows.items() if row["source"] == "environment"} == set(given)
    assert {name for name, row in rows.items() if row["error"]} == set(given) - {"RINGREDUCE_SLOTS"}
    assert rows["RINGREDUCE_LANES"]["error"].startswith("RINGREDUCE_LANES=65 is not a whole number")


def test_defaults_are_printed() -> None:
    said = subprocess.run(PRINT, env=CLEAN, capture_output=True, text=True)
    assert said.returncode == 0 and "RINGREDUCE_SLOTS = 4  (default)" in said.stdout


def test_the_build_is_printed() -> None:
    from ringreduce import _build_info as built

    assert bool(built.CUDA) != bool(built.CUDA_MISSING)
    cuda = built.CUDA or f"not built, {built.CUDA_MISSING}"
    assert config.build_text() == f"# built for torch {built.TORCH_VERSION}; CUDA: {cuda}"
    said = subprocess.run(PRINT, env=CLEAN, capture_output=True, text=True)
    assert said.stdout.startswith(config.build_text() + "\n")
