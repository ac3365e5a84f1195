"""A process group for the Manager of torchft.

    from ringreduce.torchft import ProcessGroupRingReduce
    manager = torchft.Manager(pg=ProcessGroupRingReduce(timeout=timedelta(seconds=30)), ...)

torchft makes the ranks of each quorum a group of their own.  If a rank is lost, the operations of
the others raise at once, torchft discards the step, and the next quorum gets a new group.
"""

import copy
import dataclasses
import functools
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ringreduce import errors
from ringreduce.core import gpu
from ringreduce.core.backend import Backend, Options, count_ranks_on_gpu, extension

try:
    from torchft.process_group import ProcessGroupWrapper
except ModuleNotFoundError as missing:
    if missing.name != "torchft":
        raise
    raise ImportError(
        "torchft is not installed; install it with `pip install 'ringreduce[torchft]'`"
    ) from missing

__all__ = ["ProcessGroupRingReduce"]


def _failure_of(backend: Backend) -> errors.Error | None:
    try:
        extension().check(backend)
    except errors.Error as error:
        return error
    return None


class ProcessGroupRingReduce(ProcessGroupWrapper):
    """A ringreduce group that torchft makes anew for each quorum.

    Ranks in errors are those of the quorum; pid and host say which process it is.

    Args:
        timeout: of an operation, and of making a group; the `_timeout` of
            `options` is ignored.
        options: of the groups.  `on_loss` can only be "error", since torchft divides by the number
            of ranks in the quorum; RINGREDUCE_ON_LOSS has no effect.

    Raises:
        ValueError: on_loss is "continue".
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), options: Options | None = None
    ) -> None:
        options = Options() if options is None else options
        if options.on_loss == "continue":
            raise ValueError(
                "ProcessGroupRingReduce cannot have on_loss='continue': torchft divides a sum by "
                "the number of ranks in the quorum, which a lost rank does not change"
            )
        super().__init__(timeout)
        self._options = dataclasses.replace(options, on_loss="error")
        self._lock = threading.Lock()  # of the next two
        self._cancel: Any = None  # what can end a configure that is under way
        self._backend: Backend = None
        self._error: Exception | None = None

    def getBackendName(self) -> str:
        """The name that torchft shows.

        Returns:
            "torchft-ringreduce".
        """
        return "torchft-ringreduce"

    def abort(self, errored: bool = True) -> None:
        """Ends all that waits in the group, a configure too, on all of its ranks.

        Args:
            errored: torchft itself passes False, at the start of each configure: then a group whose
                work is done is left without an error.
        """
        with self._lock:
            cancel, backend = self._cancel, self._backend
            self._cancel = cancel if errored else extension().Cancel(self._making_it())
        if cancel is not None:
            cancel.end()
        failure = None
        if backend is not None:
            # A rank may be the first that leaves a group whose work is done.
            if errored or not extension().is_idle(backend):
                backend.abort()
            failure = _failure_of(backend)
        self._error = (self._error or failure) if errored else None
        self._pg = None
        self._leave(backend)  # after errored() has the error: calls that waited raise it already
        super().abort(errored)  # logs it

    def shutdown(self) -> None:
        """Finishes what is queued, and leaves the group."""
        with self._lock:
            cancel, backend = self._cancel, self._backend
        if cancel is not None:
            cancel.end()
        self._leave(backend)
        super().shutdown()

    def _leave(self, backend: Backend) -> None:
        with self._lock:
            if backend is None or backend is not self._backend:  # another thread leaves it
                return
            self._backend = None
        backend.shutdown()

    def errored(self) -> Exception | None:
        """Whether the group has failed.

        Returns:
            The error, until the next configure; None if there is none.
        """
        backend = self._backend
        if self._error is None and backend is not None:
            self._error = _failure_of(backend)
        return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that start from now on, and of the next groups.

        Args:
            timeout: as the constructor's.
        """
        super().set_timeout(timeout)
        backend = self._backend
        if backend is not None:
            backend.set_timeout(timeout)

    @property
    def parent(self) -> dist.ProcessGroup:
        """The group of this quorum; raises its error, or Error before the first configure."""
        pg: dist.ProcessGroup | None = self._pg
        if pg is not None:
            return pg
        if self._error is not None:
            raise copy.copy(self._error)
        raise errors.Error(
            "this ProcessGroupRingReduce has no ranks: call configure() first, or the Manager's "
            "start_quorum()"
        )

    def _name(self) -> str:
        # The older torchft counts quorums, the newer one gives the same number as a uuid.
        number = getattr(self, "_quorum_id", None)
        number = getattr(self, "_uuid", None) if number is None else number
        return "torchft" if number is None else f"torchft quorum {number}"

    def _who(self) -> str:
        return f"rank {self._rank} (pid {os.getpid()}) of group '{self._name()}'"

    def _making_it(self) -> str:
        return f"{self._who()} gave up while the group was made"

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        with self._lock:
            cancel = self._cancel = self._cancel or extension().Cancel(self._making_it())
        try:
            backend = extension().create_backend(
                store=store,
                rank=rank,
                size=world_size,
                timeout=self._timeout.total_seconds(),
                name=self._name(),
                global_ranks=[],
                options=self._options,
                gpu_facts=gpu.facts() if extension().cuda_build() else "",
                make_inner=functools.partial(gpu.make_inner, self._timeout),
                count_ranks=count_ranks_on_gpu,
                cancel=cancel,
            )
            with self._lock:
                self._cancel, self._backend = None, backend
            cancel.check()  # later, abort() finds the backend
        except errors.Error as error:
            self.abort()
            self._cancel, self._error = None, error
            raise
        pg = dist.ProcessGroup(store, rank, world_size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        pg._set_default_backend(kind)
        for device in ("cpu", "cuda") if extension().cuda_build() else ("cpu",):
            pg._register_backend(torch.device(device), kind, backend)
        return pg
