"""`python -m ringreduce.bench`: see `ringreduce.bench.cli`."""

import sys

from ringreduce.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
