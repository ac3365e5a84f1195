"""Horovod's API on ringreduce, for scripts of a project whose last release is of 2023.

    import ringreduce.horovod as hvd          # or ringreduce.horovod.torch
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

`horovodrun -np 4 python train.py` starts a script, `hvd.run(func, num_proc=4)` a function.
docs/horovod.md explains how to move a script, and what differs.
"""

from ringreduce.horovod._launch import run
from ringreduce.horovod.torch import *  # noqa: F403
from ringreduce.horovod.torch import __all__ as _of_torch
from ringreduce.horovod.torch import (  # noqa: F401 (as in horovod.torch)
    compression,
    functions,
    mpi_ops,
    optimizer,
    sync_batch_norm,
)

__all__ = [*_of_torch, "run"]
