"""Runs a command with its output in files: horovodrun --output-filename.

    python _output.py FOLDER COMMAND ...

writes FOLDER/rank.N/stdout and stderr.  It is run as a file, before each rank, so it imports
nothing that takes time.
"""

import os
import sys

_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def main() -> None:
    """Becomes the command."""
    folder, *command = sys.argv[1:]
    rank, size = next(
        ((os.environ[r], os.environ[s]) for r, s in _RANKS if r in os.environ and s in os.environ),
        ("0", "1"),
    )
    # So wide that names sort as numbers do.
    own = os.path.join(folder, f"rank.{rank.zfill(len(str(int(size) - 1)))}")
    os.makedirs(own, exist_ok=True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        # Appended to: a rank may have been started again.
        path = os.path.join(own, name)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, number)
        os.close(file)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error}")


if __name__ == "__main__":
    main()
