"""`python -m ringreduce.timeline`.  A timeline of what all ranks did: observe/timeline.py."""

import sys

from ringreduce.observe.timeline import main, timeline

__all__ = ["timeline"]

__path__: list[str] = []  # else `python -m` warns that the package has imported this module

if __name__ == "__main__":
    sys.exit(main())
