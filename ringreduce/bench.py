"""`python -m ringreduce.bench`.  Collectives beside their peers: tools/bench/."""

import sys

from ringreduce.tools.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
