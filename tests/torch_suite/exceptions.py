"""Tests that Gloo passes and ringreduce cannot, each with its cause in torch's source.

At most five may stand here.  run.py reports those that pass by now.
"""

# test -> file:line in torch's source, and what there needs Gloo itself.
EXCEPTIONS: dict[str, str] = {}
