"""Whether this machine, or all machines of a job, are fit for ringreduce: `python -m`.

    python -m ringreduce.doctor                                    # this machine
    torchrun --nproc-per-node=4 -m ringreduce.doctor               # the ranks of a job
    srun -N2 --ntasks-per-node=4 python -m ringreduce.doctor --json

`facts.py` reads a rank's machine, and `trial.py` makes groups in a process of its own.
`exchange.py` brings it all to rank 0 and tries the lines between hosts (`probe.py`), `judge.py`
puts it to the checks of `checks.py` and `network.py`, `report.py` is what they say.
"""
