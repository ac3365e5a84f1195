"""`python -m ringreduce.plan`.  What a job will cost: tools/plan/."""

import sys

from ringreduce.tools.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
