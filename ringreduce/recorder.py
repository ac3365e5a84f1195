"""`python -m ringreduce.recorder`.  What ended a job: observe/recorder.py."""

import sys

from ringreduce.observe.recorder import main

if __name__ == "__main__":
    sys.exit(main())
