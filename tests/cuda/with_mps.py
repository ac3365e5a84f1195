"""Runs a command under an MPS daemon of its own: with_mps.py CONTROL FOLDER -- COMMAND...

CONTROL is nvidia-cuda-mps-control.  The daemon's pipes and logs lie in FOLDER, so another daemon is
neither used nor disturbed; no setting of the GPU is changed.  Exit status: the command's, or 77 if
MPS does not start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

NOT_POSSIBLE = 77


def main(arguments: list[str]) -> int:
    if len(arguments) < 4 or arguments[2] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    control, folder, command = arguments[0], Path(arguments[1]).resolve(), arguments[3:]
    pipes, logs = folder / "mps-pipe", folder / "mps-log"
    pipes.mkdir()
    logs.mkdir()
    env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    try:
        started = subprocess.run([control, "-d"], env=env, timeout=15).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        started = False
    try:
        # The daemon is there if it answers, here that it has no servers yet.
        if not started or ask(control, "get_server_list", env) != 0:
            show(logs)
            print(f"MPS does not start here ({control} -d)")
            return NOT_POSSIBLE
        return subprocess.run(command, env=env).returncode
    finally:
        # Ends daemon and server, also after an error, and waits until they are gone.
        ask(control, "quit -t 5", env)
        patience = time.monotonic() + 10
        while ask(control, "get_server_list", env) == 0 and time.monotonic() < patience:
            time.sleep(0.1)


def ask(control: str, question: str, env: dict[str, str]) -> int:
    """Exit status of a question to the daemon."""
    try:
        return subprocess.run(
            [control], input=question + "\n", env=env, timeout=15, text=True
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def show(logs: Path) -> None:
    for path in sorted(logs.glob("*.log")):
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
