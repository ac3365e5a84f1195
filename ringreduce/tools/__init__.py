"""Programs beside a job: the benchmark, the doctor and the planner.

`python -m ringreduce.bench` and the like start them; nothing that a training program imports needs
them.
"""
