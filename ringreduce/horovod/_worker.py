"""One of the processes that `ringreduce.horovod.run` starts: runs the function, keeps its result.

    python -m ringreduce.horovod._worker FOLDER

FOLDER has what to call, and gets `result.N`.
"""

import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ringreduce.core.files import replacing
from ringreduce.horovod._launch import dumps


def main() -> int:
    """The exit status: 0 if the function returned."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    outcome: dict[str, Any] = {}
    try:
        with (folder / "call").open("rb") as file:
            sys.path[:] = pickle.load(file)
            func, args, kwargs = pickle.load(file)
        outcome = {"value": func(*args, **kwargs)}
        data = dumps(outcome)
    except BaseException:
        # The clock is one for all processes: the first error is the cause of the others.
        outcome = {"error": traceback.format_exc(), "when": time.monotonic()}
        data = pickle.dumps(outcome)
    with replacing(folder / f"result.{rank}", "wb") as file:
        file.write(data)
    return int("error" in outcome)


if __name__ == "__main__":
    sys.exit(main())
