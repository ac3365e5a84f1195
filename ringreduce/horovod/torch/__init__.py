"""The API of `horovod.torch` 0.28 on ringreduce: `import ringreduce.horovod.torch as hvd`.

docs/horovod.md lists what differs.
"""

import sys

from ringreduce.horovod import (
    _compression,
    _functions,
    _operations,
    _optimizer,
    _sync_batch_norm,
    _world,
)
from ringreduce.horovod._compression import Compression
from ringreduce.horovod._errors import HorovodInternalError, HostsUpdatedInterrupt
from ringreduce.horovod._functions import *  # noqa: F403
from ringreduce.horovod._operations import *  # noqa: F403
from ringreduce.horovod._optimizer import DistributedOptimizer
from ringreduce.horovod._sync_batch_norm import SyncBatchNorm
from ringreduce.horovod._world import *  # noqa: F403
from ringreduce.horovod.torch import elastic

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "elastic",
]
__all__ += _functions.__all__
__all__ += _operations.__all__
__all__ += _world.__all__

# Horovod's modules, for scripts that import from them or reach into them.
mpi_ops = sys.modules[__name__]
compression, functions = _compression, _functions
optimizer, sync_batch_norm = _optimizer, _sync_batch_norm
for _name in ("compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]
for _name in ("sampler", "state"):
    sys.modules[f"{__name__}.elastic.{_name}"] = elastic
    setattr(elastic, _name, elastic)
