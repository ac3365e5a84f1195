"""Puts a ringreduce group wherever torch makes a Gloo group, for tests gated on the name "gloo"."""

from __future__ import annotations

import datetime
import functools
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d

from ringreduce.core import backend as _backend

_GLOO = c10d.ProcessGroupGloo
# What _new_process_group_helper was called with last, which ProcessGroupGloo is not told.
_asked: dict[str, Any] = {}


class _LooksLikeGloo(type):
    """`ProcessGroupGloo(...)` makes our backend, and isinstance takes it for one of Gloo."""

    def __call__(
        cls,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        enable_reconfigure: bool = False,  # passed by torch 2.14 and later
    ) -> _backend.Backend:
        options = c10d._DistributedBackendOptions()
        options.store = store
        options.group_rank = rank
        options.group_size = size
        options.timeout = timeout
        options.group_id = _asked["group_name"]
        options.global_ranks_in_group = _asked["global_ranks_in_group"]
        return _backend.create(options, None)

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, _GLOO):
            return True
        return isinstance(instance, _distributed_c10d.Backend) and instance.name() == "ringreduce"

    def __getattr__(cls, name: str) -> Any:
        return getattr(_GLOO, name)


class _Substitute(metaclass=_LooksLikeGloo):
    pass


def _tell_cpp(group: c10d.ProcessGroup) -> None:
    """Says in C++ what the group is: DDP's logger casts what calls itself Gloo to Gloo's class."""
    custom = c10d.ProcessGroup.BackendType.CUSTOM
    backend = group._get_backend(torch.device("cpu"))
    for device in group._device_types:
        group._register_backend(device, custom, backend)
    group._set_default_backend(custom)


def take_over(distributed_test: ModuleType) -> None:
    """From now on torch.distributed makes our groups where "gloo" is asked for."""
    make_group, make_wrapper = c10d._new_process_group_helper, c10d._create_process_group_wrapper
    parameters = inspect.signature(make_group)
    events_of = distributed_test.get_profiling_event

    @functools.wraps(make_group)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        _asked.update(parameters.bind(*args, **kwargs).arguments)
        group, store = make_group(*args, **kwargs)
        if isinstance(group, c10d.ProcessGroup):
            _tell_cpp(group)
        return group, store

    @functools.wraps(make_wrapper)
    def create_process_group_wrapper(*args: Any, **kwargs: Any) -> Any:
        # The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL compares calls through a Gloo group proper.
        c10d.ProcessGroupGloo = _GLOO
        try:
            return make_wrapper(*args, **kwargs)
        finally:
            c10d.ProcessGroupGloo = _Substitute

    @functools.wraps(events_of)
    def get_profiling_event(event_name: str, *args: Any, **kwargs: Any) -> Any:
        return events_of(event_name.replace("gloo:", "ringreduce:"), *args, **kwargs)

    # torch notes name and ranks of a group in the options of its Gloo backend, for logs.
    _distributed_c10d.Backend.options = property(lambda backend: SimpleNamespace())
    c10d.ProcessGroupGloo = _Substitute
    c10d._new_process_group_helper = new_process_group_helper
    c10d._create_process_group_wrapper = create_process_group_wrapper
    distributed_test.get_profiling_event = get_profiling_event
