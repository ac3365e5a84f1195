"""Makes ringreduce groups for torch.distributed, and finds those that exist."""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringreduce import errors
from ringreduce.core import gpu, joining
from ringreduce.core.launchers import job_of
from ringreduce.core.load import load

load()  # an extension that is missing is reported here, not when the first group is made
from ringreduce import _C  # noqa: E402

# A backend object, of whatever kind; torch's stubs name it only in a private module.
Backend = Any

_MADE_BY_TORCH = "default_pg/"


class Moment(list[Callable[[], None]]):
    """Functions that the rest of the package wants called at a moment in the life of groups."""

    def __call__(self) -> None:
        for call in self:
            call()


# The observers (observe/__init__.py) add themselves; nothing here knows them.
before_group = Moment()  # before this process makes a group
on_group_made = Moment()
before_members_change = Moment()  # a group's records are about to be replaced
on_exit = Moment()  # once all groups have been left
# Seconds that daemon threads have at exit to come back from the groups they waited in.
THREADS_GRACE = 0.2


@dataclasses.dataclass(eq=False)
class Options(_C.Options):
    """Options of one group: `init_process_group("ringreduce", pg_options=Options(...))`.

    A `Backend.Options` of torch, for new_group, split_group and DeviceMesh's backend_override too.
    What is None comes from the environment (RINGREDUCE_ALGORITHM, ...), else from the defaults; in
    split_group from the group that is split, where `min_ranks` is at most the size of the part.
    All but `stall_seconds` and `join` are taken from rank 0.  Only torch's own attributes can be
    changed later.

    The timeout of a group is the one given to init_process_group or new_group, or their default.
    Another `_timeout` in the options is ignored, with a warning, as with NCCL.  DeviceMesh passes
    `_timeout` on, 30 min if it was not set; shrink_group takes it, and `ProcessGroup.split_group`
    if it is called without a timeout.  Before torch 2.15 split_group changes the options that it is
    given: use new ones for each group.

    Attributes:
        algorithm: of all-reduce: "auto", "direct", "twoshot", "ring", "bruck" or "hierarchical".
        slot_bytes: size of a slot of shared memory, a multiple of 128 from 4 KiB to 64 MiB.
        slots: how many slots a rank has for each wire, 3 to 32.
        on_loss: "error": a lost rank fails the group.  "continue": the group goes on without it,
            see docs/survive.md.
        min_ranks: with "continue": if fewer ranks are left, the group fails.  1 by default.
        stall_seconds: a wait that lasts longer is logged, with who is waited for.
        order: "rank": sums add the ranks' values in the order 0, 1, 2, ..., so their bits do not
            depend on sizes of messages, algorithms or hosts.  "ring": see docs/design.md.
        join: of a default group with "continue": whether this process takes the place of a lost
            rank in a group that runs, and waits in `elastic.State.restore()` until it is let in
            (True), or makes the group with all other ranks (False).  "auto": as the store and
            torchrun's variables say (`ringreduce/core/joining.py`).

    Raises:
        ValueError: a value that cannot be; those that depend on the group are found with it.
        TypeError: a value of another type.
    """

    algorithm: str | None = None
    slot_bytes: int | None = None
    slots: int | None = None
    on_loss: str | None = None
    min_ranks: int | None = None
    stall_seconds: float | None = None
    order: str | None = None
    join: bool | str = "auto"

    def __post_init__(self) -> None:
        stall = self.stall_seconds
        if stall is not None and not stall > 0:
            raise ValueError(f"stall_seconds must be above 0, not {stall}")
        for name in ("slot_bytes", "slots"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it cannot be negative")
        if self.on_loss not in (None, "error", "continue"):
            raise ValueError(f"on_loss can be 'error' or 'continue', not {self.on_loss!r}")
        if self.order not in (None, "ring", "rank"):
            raise ValueError(f"order can be 'ring' or 'rank', not {self.order!r}")
        if self.join != "auto" and not isinstance(self.join, bool):
            raise ValueError(f"join can be 'auto', True or False, not {self.join!r}")
        if self.min_ranks is not None and self.on_loss != "continue":
            raise ValueError("min_ranks needs on_loss='continue'")
        if self.min_ranks is not None and self.min_ranks < 1:
            raise ValueError(f"min_ranks must be at least 1, not {self.min_ranks}")
        super().__init__(**dataclasses.asdict(self))

    def __setattr__(self, name: str, value: object) -> None:
        """Torch sets its own attributes, such as `_timeout`; C++ has a copy of ours."""
        if name in self.__dict__ or not hasattr(type(self), name):
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(tuple(dataclasses.asdict(self).values()))

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles, and for those of _C.Options, which is what a group has."""
        own = tuple(getattr(self, field.name) for field in dataclasses.fields(Options))
        known = vars(_C.Options.__base__).items()  # of torch, some only in newer ones
        names = [name for name, value in known if getattr(value, "fset", None)]
        return type(self), own, (None, {name: getattr(self, name) for name in names})


def _perform_nocolor_split(backend: Backend, device: torch.device) -> None:
    """What a rank does for a new group that it is not in: nothing, groups of ours need it not."""


@functools.cache
def extension() -> Any:
    """Returns ringreduce._C, told of the exception classes and to be shut down at exit."""
    module = load()
    # new_group calls it on every backend that can split and was given a device (device_id=), but
    # only NCCL's has it.
    kind: Any = torch._C._distributed_c10d.Backend
    if not hasattr(kind, "perform_nocolor_split"):
        kind.perform_nocolor_split = _perform_nocolor_split
    errors.Error._facts_of = staticmethod(module.facts_of)
    module.set_error_types(
        errors.PeerLost, errors.Timeout, errors.Mismatch, errors.Aborted, errors.Error
    )
    # A process that ends without destroy_process_group still finishes what it has queued, and no
    # thread of ours runs while the interpreter is torn down.
    atexit.register(_leave_at_exit, module)
    return module


def _leave_at_exit(module: Any) -> None:
    """Leaves all groups, ends what observes them, and lets daemon threads return to Python.

    One that waited in a group and comes back only after the interpreter is gone is ended by it
    inside torch's C++, which takes the process down: "terminate called without an active
    exception", exit code -6.
    """
    try:
        module.shutdown_all()
    finally:
        on_exit()
    deadline = time.monotonic() + THREADS_GRACE
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


@functools.cache
def _takes_gpus() -> bool:
    return bool(extension().cuda_build()) and torch.cuda.device_count() > 0


def _keep_usable_devices() -> None:
    """Takes "cuda" off the backend's devices if this build or this machine has no GPU for it.

    The registration, during `import torch`, cannot know.  The first group still takes CUDA tensors,
    and says what is missing.
    """
    known = dist.Backend.backend_capability.get("ringreduce", [])
    if "cuda" in known and not _takes_gpus():
        dist.Backend.backend_capability["ringreduce"] = [d for d in known if d != "cuda"]


def create(dist_backend_opts: Any, backend_options: Any) -> Backend:
    """What torch calls to make a group; collective over its ranks.

    Args:
        dist_backend_opts: torch's DistributedBackendOptions: store, rank, size, timeout, name.
        backend_options: what the caller gave as pg_options: None, `Options`, or a backend's.

    Returns:
        The backend, for tensors on the CPU and, in a build with CUDA, on GPUs.

    Raises:
        TypeError: pg_options of another kind.
        ValueError: rank 0's options cannot be; on all ranks.
        Timeout, PeerLost, Error: not all ranks came, or they cannot work together; names them.
    """
    options = Options() if backend_options is None else backend_options
    if not isinstance(options, _C.Options):
        raise TypeError(
            "pg_options of a ringreduce group must be ringreduce.Options, "
            f"not {type(options).__name__}"
        )
    if options._timeout not in (_C.Options()._timeout, dist_backend_opts.timeout):
        warnings.warn(
            f"ringreduce.Options has the timeout {options._timeout}, which is ignored.  The group "
            f"has {dist_backend_opts.timeout}, from init_process_group or new_group or their "
            "default",
            stacklevel=2,
        )
    _keep_usable_devices()
    ranks = list(dist_backend_opts.global_ranks_in_group)
    keeps_store = not dist.is_initialized() and _outlives_its_group(dist_backend_opts)
    all_ranks = dist.get_world_size() if dist.is_initialized() else 0
    connect = joining.when_to_connect(dist_backend_opts, options.on_loss, options.join)
    of_default = connect == "now" and not dist.is_initialized()
    rank, size = dist_backend_opts.group_rank, dist_backend_opts.group_size
    launcher, job = job_of(os.environ, rank, size) if of_default else ("", "")
    before_group()
    backend = extension().create_backend(
        store=dist_backend_opts.store,
        rank=rank,
        size=size,
        timeout=dist_backend_opts.timeout.total_seconds(),
        name=dist_backend_opts.group_id,
        global_ranks=ranks,
        options=options,
        gpu_facts=gpu.facts() if extension().cuda_build() else "",
        of_ranks=all_ranks if 0 < len(ranks) < all_ranks else 0,
        connect=connect,
        make_inner=functools.partial(gpu.make_inner, dist_backend_opts.timeout),
        count_ranks=count_ranks_on_gpu,
        keeps_store=keeps_store,
        launcher=launcher,
        job=job,
        program=os.path.basename(sys.argv[0]) if of_default else "",
    )
    _count_steps()
    if of_default:
        extension().lend_buckets(backend)
    if connect == "now" and extension().goes_on(backend):
        joining.note_made(dist_backend_opts.store)
    on_group_made()
    return backend


@functools.cache
def _count_steps() -> None:
    """Lets torch's optimizers count the training steps that records name."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def count(*_: Any) -> None:
        extension().count_training_step()

    register_optimizer_step_post_hook(count)


def count_ranks_on_gpu(size: int) -> int:
    """How many ranks of the job, at least, share this rank's GPU.

    1 if a group of `size` ranks is all of the job, which then counts by itself; and if the default
    group is another backend's, whose ranks have told nothing of their GPUs.
    """
    world = dist.group.WORLD
    backend = None if world is None else backend_of(world)
    if backend is None or size >= backend.size():
        return 1
    return gpu.ranks_on_gpu(extension().store_of(backend), backend.rank(), backend.size())


def _outlives_its_group(dist_backend_opts: Any) -> bool:
    """Whether this default group's store is to outlive it (csrc/torch/store_keeper.h).

    It is if torch made it: nobody else refers to it then.
    """
    store, root = dist_backend_opts.store, dist_backend_opts.store
    extension().begin_on_store(store)
    own = extension().prefix_in_tcp_store(store)
    # init_process_group puts this prefix before the stores that it makes.
    if not own.startswith(_MADE_BY_TORCH) or dist_backend_opts.group_rank != 0:
        return False
    while hasattr(root, "underlying_store"):
        root = root.underlying_store
    # Keys of another device's backend in this group, which it would find again.
    others = any(
        key.startswith(_MADE_BY_TORCH) and not key.startswith(own) for key in root.list_keys()
    )
    return dist_backend_opts.group_size > 1 and not others


def backend_of(group: dist.ProcessGroup, *devices: str) -> Backend | None:
    """The group's ringreduce backend, or None if it has none.

    One backend object takes tensors of both kinds, so it does not matter for which of them torch
    knows it: CPU tensors, if possible.

    Args:
        group: of whatever backend.
        devices: "cpu", "cuda": only for tensors there.  None given: for either.
    """
    for device in devices or ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:  # a group that has no backend for such tensors at all
            continue
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around each backend.
        backend = getattr(backend, "wrapped_pg", backend)
        if backend.name() == "ringreduce":
            return backend
    return None


def devices_text() -> str:
    """What kinds of tensors this build takes, for errors."""
    if extension().cuda_build():
        return "CPUs and CUDA GPUs"
    from ringreduce._build_info import CUDA_MISSING  # found once the extension is loaded

    return f"CPUs only (it was built without CUDA: {CUDA_MISSING})"


class _Companion:
    """A ringreduce group made beside a group of another backend."""

    def __init__(self, beside: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
        self.beside = weakref.ref(beside)
        self.group = group
        self.raised = False  # its failure, out of a call
        self.backward = -1  # of autograd, in which it averaged the last bucket

    def has_failed(self) -> bool:
        return bool(extension().has_failed(backend_of(self.group)))

    def has_raised(self) -> bool:
        """Whether an operation ended with its failure, out of a call or by a Future."""
        return self.raised or bool(extension().has_raised(backend_of(self.group)))


_companions: list[_Companion] = []


def live_groups() -> Iterator[tuple[dist.ProcessGroup, Backend]]:
    """The groups that torch knows and that have a backend of ringreduce, with it."""
    for group in list(dist.distributed_c10d._world.pg_map):
        backend = backend_of(group)
        if backend is not None:
            yield group, backend


def ranks_of(group: dist.ProcessGroup, backend: Backend) -> list[int]:
    """The global ranks of a group, by their numbers in it."""
    ranks = dist.get_process_group_ranks(group)
    # After a reconfiguration torch does not know them.
    return ranks if len(ranks) == backend.size() else list(range(backend.size()))


def own_rank() -> int:
    """This process's rank in the default group; -1: there is none."""
    return dist.get_rank() if dist.is_initialized() else -1


def job_name() -> str:
    """A name of this job for files and metrics: its launcher's, else its program's."""
    _, job = job_of(os.environ, dist.get_rank(), dist.get_world_size())
    return re.sub(r"[^\w.-]+", "_", job or Path(sys.argv[0]).stem or "job")[:128]


def _is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether torch still knows the group: destroy_process_group makes it forget."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def _companion_of(group: dist.ProcessGroup) -> _Companion | None:
    """The companion of a group, if it has one; destroys those whose group is gone."""
    for companion in list(_companions):
        if not _is_alive(companion.group):
            _companions.remove(companion)
        elif not _is_alive(companion.beside()):
            _companions.remove(companion)
            dist.destroy_process_group(companion.group)
    return next((c for c in _companions if c.beside() is group), None)


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError("call torch.distributed.init_process_group first")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"this rank needs to be in the group, which is {group!r} here")
    return group


def existing_group(group: dist.ProcessGroup | None, call: str) -> dist.ProcessGroup:
    """The group itself if it is ringreduce's, else the one that `ringreduce_group` has made.

    Args:
        group: None for the default group.
        call: what is called with it, for errors.

    Raises:
        RuntimeError: there is no default group.
        TypeError: not a group, one that this rank is not in, or one without a group of ringreduce.
    """
    group = _own_group(group)
    if backend_of(group) is not None:
        return group
    companion = _companion_of(group)
    if companion is None:
        raise TypeError(
            f"{call} takes a group of ringreduce, or one beside which a hook of ringreduce "
            f"averages gradients, and this one is of {dist.get_backend(group)}"
        )
    return companion.group


def ringreduce_group(
    group: dist.ProcessGroup | None, again: bool = True, call: bool = False
) -> dist.ProcessGroup:
    """The group itself if it is ringreduce's, else one of ringreduce over the same ranks.

    The latter is made once a group, with its timeout.  Making it is collective over the ranks.

    Args:
        group: None for the default group.
        again: make it again if it has failed.
        call: an operation follows, which raises the error of a failed group.  Then the group is
            made again only after such an error: until then this rank may be the only one that
            calls, and would wait for ranks that are lost.  After an error all ranks must go on
            from the same step, as with any backend.

    Raises:
        RuntimeError: there is no default group.
        TypeError: not a group, or one that this rank is not in.
        Timeout, PeerLost, Error: as `create`.
    """
    group = _own_group(group)
    if backend_of(group) is not None:
        return group
    companion = _companion_of(group)
    if companion is not None:
        if not (again and companion.has_failed() and (not call or companion.has_raised())):
            return companion.group
        _companions.remove(companion)
        dist.destroy_process_group(companion.group)
    made = _make_companion(group)
    _companions.append(_Companion(group, made))
    return made


@contextlib.contextmanager
def noting_errors(group: dist.ProcessGroup) -> Iterator[None]:
    """Around operations on what `ringreduce_group(..., call=True)` gave: notes that one raised."""
    try:
        yield
    except Exception:
        for companion in _companions:
            if companion.group is group:
                companion.raised = companion.has_failed()
        raise


def group_for_bucket(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> dist.ProcessGroup:
    """`ringreduce_group` for a bucket of DDP.

    DDP raises the errors of a backward at its end.  So only the first bucket of a module, in
    another backward than the last bucket, may make the group again.
    """
    backward = torch._C._current_graph_task_id()
    beside = dist.group.WORLD if group is None else group
    known = [c for c in _companions if c.beside() is beside]
    first = bucket.index() == 0 and all(c.backward != backward for c in known)
    found = ringreduce_group(group, again=first, call=True)
    for companion in _companions:
        if companion.group is found:
            companion.backward = backward
    return found


def group_among(ranks: list[int]) -> dist.ProcessGroup:
    """A ringreduce group over ranks of the default group, with its timeout; once, or after failure.

    Args:
        ranks: those that call this, and no others.
    """
    whole = _own_group(None)
    name = f"{whole.group_name}/ringreduce of {','.join(map(str, ranks))}"
    for made, known in list(dist.distributed_c10d._world.pg_names.items()):
        if known == name:
            if not extension().has_failed(backend_of(made)):
                return made
            dist.destroy_process_group(made)
    return _make_companion(whole, ranks, name)


def _make_companion(
    group: dist.ProcessGroup, ranks: list[int] | None = None, name: str | None = None
) -> dist.ProcessGroup:
    """A ringreduce group over a group's ranks, or some; torch destroys it with the default group.

    What `new_group(use_local_synchronization=True)` does, but for the name: there it comes from the
    number of groups that a rank is in, which need not be the same for all ranks of this one.
    """
    c10d: Any = dist.distributed_c10d
    ranks = ranks or dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend("ringreduce"),
        c10d._get_default_store(),
        group_name=name or f"{group.group_name}/ringreduce",
        timeout=_timeout_of(group),
    )[0]
    c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """The timeout of a group of another backend; torch's default where it does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: datetime.timedelta = options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout
