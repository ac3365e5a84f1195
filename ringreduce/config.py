"""`python -m ringreduce.config`: the build, all environment variables, and what is in force now.

The table is that of csrc/base/config.cc.  The exit status is 1 if a value cannot be read.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from ringreduce.core.backend import extension


def variables() -> list[dict[str, str]]:
    """All environment variables, with the values in force.

    Returns:
        A dictionary for each variable.  Its keys are name, default, values (which are allowed),
        meaning, holds (whose value holds), reader ("core" or "Python"), value (in force now; the
        default if the variable is not set), source ("environment" or "default") and error ("" if
        the value can be read).
    """
    rows = extension().config()
    for row in rows:
        row["source"] = "environment" if row["value"] else "default"
        row["value"] = row["value"] or row["default"]
    return list(rows)


def build_text() -> str:
    """What this ringreduce was built with.

    Returns:
        A line, which begins with "# ".
    """
    extension()
    from ringreduce import _build_info as built  # found once the extension is loaded

    cuda = built.CUDA or f"not built, {built.CUDA_MISSING}"
    return f"# built for torch {built.TORCH_VERSION}; CUDA: {cuda}"


def text_of(row: dict[str, str]) -> str:
    """A variable for people.

    Args:
        row: of `variables`.

    Returns:
        A few lines.
    """
    lines = [f"{row['name']} = {row['value']}  ({row['source']})"]
    if row["error"]:
        lines.append(f"    error: {row['error']}")
    reader = ", read by Python" if row["reader"] == "Python" else ""
    lines.append(f"    {row['meaning']} ({row['holds']}{reader})")
    lines.append(f"    values: {row['values']}; default: {row['default']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the build and the variables.

    Args:
        arguments: of the command line; None for those of the process.

    Returns:
        The exit status: 1 if a value cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.config",
        description="Print whether ringreduce was built for GPUs, and if not why; and all "
        "environment variables with the values in force.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    rows = variables()
    lines = [build_text(), *map(text_of, rows)]
    print(json.dumps(rows, indent=2) if options.json else "\n".join(lines))
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
