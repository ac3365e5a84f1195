"""`python -m ringreduce.plan`: what a job will cost, before it runs; docs/plan.md has an example.

lines.py      lines between hosts
model.py      the time of a collective, from the constants of an installation
constants.py  these constants: their file, and how they are fitted to measured times
measure.py    measures them, on one machine or between hosts
step.py       the time of a training step: of a model, or of a timeline that is replayed
check.py      what was predicted beside what happened
curve.py      the efficiency up to 100,000 ranks, as a picture
cli.py        the command line
"""
