"""`python -m ringreduce.top`.  What the ranks of a job do now: observe/top.py."""

import sys

from ringreduce.observe.top import main

if __name__ == "__main__":
    sys.exit(main())
