"""`python -m ringreduce.doctor`.  Whether machines are fit for ringreduce: tools/doctor/."""

import sys

from ringreduce.tools.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
