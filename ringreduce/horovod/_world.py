"""The ranks of a job, as Horovod's API shows them: init, shutdown, ranks, process sets."""

import atexit
import contextlib
import datetime
import logging
import operator
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ringreduce.core.backend import Options, backend_of, extension
from ringreduce.horovod import _rendezvous
from ringreduce.horovod._coordinator import Coordinator
from ringreduce.horovod._errors import HorovodInternalError
from ringreduce.horovod._settings import Settings
from ringreduce.horovod._timeline import Timeline
from ringreduce.launch import init as init_default_group

__all__ = [
    "ProcessSet", "add_process_set", "ccl_built", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "init", "is_homogeneous",
    "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built", "shutdown",
    "size", "start_timeline", "stop_timeline",
]  # fmt: skip

_log = logging.getLogger("ringreduce.horovod")

# Seconds that shutdown waits for the other ranks' coordinators to hear of it.
_SHUTDOWN_SECONDS = 10.0
# Of an elastic run: how long making a group may take, whose ranks have all just been there, twice
# as long each time; and how often it may fail in succession.
_MAKING_TIMEOUT = datetime.timedelta(seconds=10)
_ATTEMPTS = 5


def whole(value: Any, what: str) -> int:
    """The value of an argument that is an integer, also one of numpy or torch.

    Raises:
        ValueError: a float, a bool or something else: it would count as another number than the
            caller meant.
    """
    if "bool" not in str(getattr(value, "dtype", type(value))):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{what} is an integer, not {value!r}")


class ProcessSet:
    """Some of the ranks, which run operations together: `hvd.allreduce(t, process_set=p)`.

    Pass it to `init` or `add_process_set` before it is used.

    Args:
        ranks_or_comm: global ranks.  An MPI communicator is refused.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError:
            raise ValueError(
                "ProcessSet takes a list of ranks; ringreduce has no MPI communicators"
            ) from None
        ranks = [whole(rank, "a rank of a ProcessSet") for rank in ranks]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"a rank can be in a ProcessSet once, not as in {ranks}")
        self.ranks = ranks

    def size(self) -> int | None:
        """How many ranks it has, or None before it was added."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """This process's place in it; -1 if it has none, and None before it was added."""
        if self.process_set_id is None:
            return None
        ranks = self.ranks or []
        return ranks.index(rank()) if rank() in ranks else -1

    def included(self) -> bool | None:
        """Whether this process is in it."""
        return None if self.ranks is None else rank() in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"
        )


global_process_set = ProcessSet([])


@dataclass
class _World:
    """What `init` made."""

    rank: int
    size: int
    hosts: list[str]  # by rank
    owns_default_group: bool
    timeline: Timeline | None
    settings: Settings
    timeout: datetime.timedelta | None
    coordinators: dict[int, Coordinator]  # by id of the process set; those with this rank
    sets: dict[int, ProcessSet]
    next_set: int = 1

    def local_ranks(self) -> list[int]:
        """The ranks of this host."""
        return [r for r in range(self.size) if self.hosts[r] == self.hosts[self.rank]]

    def cross_ranks(self) -> list[int]:
        """The ranks with this local rank, one a host."""
        place = self.local_ranks().index(self.rank)
        by_host: dict[str, list[int]] = {}
        for r, host in enumerate(self.hosts):
            by_host.setdefault(host, []).append(r)
        return [ranks[place] for ranks in by_host.values() if len(ranks) > place]


_world: _World | None = None
# What `init` was called with, for `restart`: comm, process_sets, group_options.
_arguments: tuple[Sequence[int] | None, str | Sequence[ProcessSet] | None, dict[str, Any]] = (
    None,
    None,
    {},
)
_place: _rendezvous.Place | None = None  # of this process in an elastic run


def _get() -> _World:
    if _world is None:
        raise ValueError(
            "Horovod has not been initialized, or hvd.shutdown() was called; use hvd.init()"
        )
    return _world


def init(
    comm: Sequence[int] | None = None,
    process_sets: str | Sequence[ProcessSet] | None = None,
    **group_options: Any,
) -> None:
    """Makes the group of all ranks.  Collective; without effect if it has been made.

    The launcher's variables say who this process is, as for `ringreduce.init`.  A default group of
    torch.distributed that exists is used.

    Args:
        comm: None, or the list of all ranks.
        process_sets: sets to add, in the same order on all ranks; or "dynamic", which is always so.
        group_options: for `ringreduce.init`: timeout, store, rank, world_size, ...

    Raises:
        NotImplementedError: `comm` is a communicator of MPI, or not all ranks.
        ValueError: variables of the launcher or of Horovod that make no sense; names them.  Those
            of Horovod are rank 0's, and all ranks raise.
        ringreduce.Error: the ranks could not meet.
        TimeoutError: of an elastic run: not enough ranks came; says how many, and who is missing.
    """
    global _arguments
    if _world is not None:
        return
    _arguments = comm, process_sets, group_options
    if _rendezvous.is_elastic():
        _init_elastic(comm, process_sets, group_options)
        return
    owns = not dist.is_initialized()
    try:
        if owns:
            init_default_group(**group_options)
        _make_world(comm, process_sets, group_options.get("timeout"), owns)
    except BaseException:
        if owns or _world is not None:
            _drop()
        raise


def _init_elastic(
    comm: Sequence[int] | None,
    process_sets: str | Sequence[ProcessSet] | None,
    group_options: dict[str, Any],
) -> None:
    """Makes a group of the ranks that are there; again, if one of them is lost meanwhile."""
    global _place
    if dist.is_initialized():
        raise ValueError(
            "in an elastic run (HOROVOD_ELASTIC=1) hvd.init() makes the default group of "
            "torch.distributed, but there is one"
        )
    timeout = group_options.get("timeout") or default_pg_timeout
    for attempt in range(1, _ATTEMPTS + 1):
        _place = _rendezvous.here().next_group()
        # Groups are named by their number in the process, and new processes have made none.
        dist.distributed_c10d._world.group_count = 0
        try:
            making = {
                **group_options,
                "store": _rendezvous.store_of(_place),
                "rank": _place.rank,
                "world_size": _place.size,
                "timeout": min(timeout, _MAKING_TIMEOUT * 2 ** (attempt - 1)),
            }
            init_default_group(**making)
            _make_world(comm, process_sets, making["timeout"], owns=True)
            break
        except (dist.DistError, HorovodInternalError) as error:
            _drop()
            if attempt == _ATTEMPTS:
                raise RuntimeError(
                    f"a group could not be made {attempt} times in succession: {error}"
                ) from error
            _log.warning("group %d could not be made: %s", _place.generation, error)
        except BaseException:
            _drop()
            raise
    world = _get()
    world.timeout = timeout
    for group in (dist.group.WORLD, *(one.group for one in world.coordinators.values())):
        if backend := group and backend_of(group):
            backend.set_timeout(timeout)


def restart(has_failed: bool) -> bool:
    """Leaves the group, and makes the next one of an elastic run; whether its ranks are the same.

    `has_failed`: an operation has, so ranks need not agree to leave.
    """
    comm, process_sets, group_options = _arguments
    _leave("makes a new group", 0.0 if has_failed else _SHUTDOWN_SECONDS)
    init(comm, process_sets, **group_options)
    return _place is not None and _place.is_unchanged


def _drop() -> None:
    """Forgets what a failed `init` has made."""
    if _world is not None:
        _leave("could not be initialized", 0.0)
    elif dist.is_initialized():
        dist.destroy_process_group()


def _make_world(
    comm: Sequence[int] | None,
    process_sets: str | Sequence[ProcessSet] | None,
    timeout: datetime.timedelta | None,
    owns: bool,
) -> None:
    """`init`, once there is a default group."""
    global _world
    rank, size = dist.get_rank(), dist.get_world_size()
    if comm is not None and sorted(comm) != list(range(size)):
        raise NotImplementedError(
            "hvd.init(comm=...) takes the list of all ranks; use process_sets for some of them"
        )
    group = _make_group(list(range(size)), timeout)
    own, timeline, problem = Settings(), None, ""
    if rank == 0:
        try:
            own, timeline = Settings.read(), _timeline_of_variables()
        except (ValueError, OSError) as error:
            problem = str(error)
    told: list[tuple[str, Settings, str]] = [("", own, "")] * size
    dist.all_gather_object(told, (_host(), own, problem), group=group)
    _, settings, problem = told[0]
    if problem:
        dist.destroy_process_group(group)
        raise ValueError(f"rank 0 cannot start: {problem}")
    global_process_set.ranks = list(range(size))
    global_process_set.process_set_id = 0
    _world = _World(
        rank=rank,
        size=size,
        hosts=[host for host, _, _ in told],
        owns_default_group=owns,
        timeline=timeline,
        settings=settings,
        timeout=timeout,
        coordinators={0: Coordinator(group, settings, timeline)},
        sets={0: global_process_set},
    )
    atexit.register(_at_exit)
    for one in process_sets if process_sets and not isinstance(process_sets, str) else ():
        add_process_set(one)


def _timeline_of_variables() -> Timeline | None:
    path = os.environ.get("HOROVOD_TIMELINE", "")
    mark = os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0")
    # "DYNAMIC" is Horovod's word for a job that may call start_timeline.
    return Timeline(path, mark) if path not in ("", "DYNAMIC") else None


def _make_group(ranks: list[int], timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """A group of its own, since the user may use the default group in another thread."""
    # Coordinators know a number of ranks that does not change.
    options = Options(on_loss="error")
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend="ringreduce", pg_options=options
    )
    return made


def _host() -> str:
    """What tells hosts apart: containers of one machine may share a boot id, machines a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def shutdown() -> None:
    """Leaves the job.  Operations of other ranks that have not run fail, on all ranks."""
    _leave("called hvd.shutdown() or exited", _SHUTDOWN_SECONDS)


def _leave(why: str, seconds: float) -> None:
    """`shutdown`, for whatever reason; after so many seconds without waiting for other ranks."""
    global _world
    world, _world = _world, None
    if world is None:
        return
    atexit.unregister(_at_exit)
    # Ranks of one process set may not know what has failed in another.
    cause = next((one.cause for one in world.coordinators.values() if one.cause), "")
    for coordinator in world.coordinators.values():
        coordinator.ask_to_close(why, cause)
    with contextlib.ExitStack() as stack:
        for coordinator in world.coordinators.values():
            stack.callback(_end, coordinator, world, why, seconds)
        for one in world.sets.values():
            one.process_set_id = None
        if world.timeline:
            stack.callback(world.timeline.close)
    if world.owns_default_group and dist.is_initialized():
        dist.destroy_process_group()


def _end(coordinator: Coordinator, world: _World, why: str, seconds: float) -> None:
    """Ends a coordinator; one whose thread waits for a rank that does not come is aborted."""
    if not coordinator.close(why, seconds):
        _abort(coordinator)
    if not world.owns_default_group and dist.is_initialized():
        dist.destroy_process_group(coordinator.group)


def _abort(coordinator: Coordinator) -> None:
    """Fails a coordinator's group, so that its thread comes back."""
    if backend := backend_of(coordinator.group):
        backend.abort()
    coordinator.close("was aborted", _SHUTDOWN_SECONDS)


def _forget() -> None:
    """In a forked child, which has none of the threads."""
    global _world
    if _world is not None:
        _world = None
        atexit.unregister(_at_exit)


os.register_at_fork(after_in_child=_forget)


def _at_exit() -> None:
    shutdown()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return _world is not None


def coordinator_of(process_set: ProcessSet) -> Coordinator:
    """The coordinator of a set that this rank is in.

    Raises:
        ValueError: not initialized, or a set that was not added or that this rank is not in.
    """
    world = _get()
    if process_set.process_set_id is None or process_set.process_set_id not in world.sets:
        raise ValueError(f"{process_set} has not been added: use hvd.add_process_set")
    coordinator = world.coordinators.get(process_set.process_set_id)
    if coordinator is None:
        raise ValueError(f"rank {world.rank} is not in {process_set}")
    return coordinator


def check_operations() -> None:
    """Raises HorovodInternalError if an operation on a GPU has failed, after all have ended."""
    for coordinator in list(_world.coordinators.values()) if _world else ():
        coordinator.check()


# ---- process sets


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a set.  Collective over all ranks, in the same order on all.

    Raises:
        ValueError: ranks that there are not, or a set that there is.
    """
    world = _get()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= world.size:
        raise ValueError(f"a process set of ranks {ranks} in a job of {world.size}")
    if any(ranks == other.ranks for other in world.sets.values()):
        raise ValueError(f"there is a process set of ranks {ranks} already")
    # All ranks pass here together, so that a rank's error is not another one's wait.
    group = _make_group(ranks, world.timeout)
    number, world.next_set = world.next_set, world.next_set + 1
    added.process_set_id = number
    world.sets[number] = added
    if world.rank in ranks:
        world.coordinators[number] = Coordinator(group, world.settings, world.timeline)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set, on all ranks; False for one that was not added, and for that of all ranks."""
    world = _get()
    number = process_set.process_set_id
    if not number or number not in world.sets:
        return False
    del world.sets[number]
    process_set.process_set_id = None
    if coordinator := world.coordinators.pop(number, None):
        if not coordinator.close("removed the process set", _SHUTDOWN_SECONDS):
            _abort(coordinator)
        dist.destroy_process_group(coordinator.group)
    return True


# ---- ranks


def rank() -> int:
    """This process's number."""
    return _get().rank


def size() -> int:
    """How many processes there are."""
    return _get().size


def local_rank() -> int:
    """This process's number among those of its host."""
    world = _get()
    return world.local_ranks().index(world.rank)


def local_size() -> int:
    """How many processes this host has."""
    return len(_get().local_ranks())


def cross_rank() -> int:
    """The number of this host, among those that have a process with this local rank."""
    world = _get()
    return world.cross_ranks().index(world.rank)


def cross_size() -> int:
    """How many hosts have a process with this local rank."""
    return len(_get().cross_ranks())


def is_homogeneous() -> bool:
    """Whether every host has as many processes as the others."""
    hosts = _get().hosts
    return len({hosts.count(host) for host in hosts}) == 1


# ---- what was built


def mpi_threads_supported() -> bool:
    """Horovod raises it too where MPI is not used."""
    raise ValueError("ringreduce does not use MPI")


def mpi_enabled() -> bool:
    """False: no MPI is used."""
    return False


def mpi_built() -> bool:
    """False: no MPI is used."""
    return False


def gloo_enabled() -> bool:
    """True: Horovod's name for a controller that needs no MPI, which is what there is here."""
    return True


def gloo_built() -> bool:
    """As `gloo_enabled`."""
    return True


def nccl_built() -> int:
    """0: programs ask it to learn whether Adasum adds up inside a host first, which it does not."""
    return 0


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether GPU tensors can be passed to operations."""
    return bool(extension().cuda_build())


def rocm_built() -> bool:
    """False: there is no build for ROCm."""
    return False


# ---- timeline


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Records the stages of operations from now on; rank 0 writes the file.

    A timeline that is being recorded ends; without effect if it is in the same file.

    Raises:
        OSError: the file cannot be written; what is being recorded goes on.
    """
    world = _get()
    before = world.timeline
    if world.rank != 0 or (before and before.path == Path(file_path)):
        return
    _set_timeline(world, Timeline(file_path, mark_cycles))
    if before:
        before.close()


def stop_timeline() -> None:
    """Ends what `start_timeline` began, if it began something."""
    world = _get()
    if timeline := world.timeline:
        _set_timeline(world, None)
        timeline.close()


def _set_timeline(world: _World, timeline: Timeline | None) -> None:
    world.timeline = timeline
    for coordinator in world.coordinators.values():
        coordinator.timeline = timeline
