"""Training that goes on when ranks are lost, and lets new ones in: `hvd.elastic`.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for state.batch, ... in ...:
                ...  # forward, backward, optimizer.step()
                state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)
    train(state)

started by `horovodrun -np 4 --min-np 2 python train.py`.  When a rank is lost, the others raise
HorovodInternalError in their operations, return to the last commit, and call the function again in
a group without the lost one.  A process that was started in its place waits in `hvd.init()`; the
next commit sees that, the ranks make a group with it, and it receives the state of rank 0.

A new process may run no collectives between `hvd.init()` and the function, because the others run
none there.  On GPUs choose one by `os.environ["LOCAL_RANK"]`, which a process keeps, not by
`hvd.local_rank()`, which changes.
"""

import copy
import functools
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from ringreduce.core.joining import tell_supervisor
from ringreduce.errors import Error
from ringreduce.horovod import _rendezvous, _world
from ringreduce.horovod._errors import HorovodInternalError, HostsUpdatedInterrupt
from ringreduce.horovod._functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ringreduce.horovod._operations import broadcast
from ringreduce.horovod._world import rank, size

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

_log = logging.getLogger("ringreduce.horovod")

# If the same ranks fail so often in succession without a commit, no rank is the cause.
_REPEATS = 3

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="State")


# ---- running


def run(
    func: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Decorates a training function, whose first argument is a `State`.

    The function is called once more after each change of the ranks: it has to go on from where the
    state is.  Without HOROVOD_ELASTIC=1, which `horovodrun --min-np` sets, errors pass through.

    Raises:
        TimeoutError: not enough ranks are left; says how many, and which are missing.
        Exception: what the function raises, but for HorovodInternalError and
            HostsUpdatedInterrupt.
    """

    @functools.wraps(func)
    def running(state: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        restarts, needs_sync, has_failed = False, True, False
        repeats, commits = 0, -1
        while True:
            try:
                if restarts:
                    is_unchanged = _world.restart(has_failed)
                    if has_failed and is_unchanged and state._commits == commits:
                        repeats += 1
                    else:
                        repeats = 0
                    commits = state._commits
                    state.on_reset()
                if needs_sync:
                    state.sync()
                if _rendezvous.is_elastic():
                    _rendezvous.here().note_state()
                    tell_supervisor(os.environ.get("RANK", ""))
                result = func(state, *args, **kwargs)
                if _rendezvous.is_elastic():
                    _rendezvous.here().note_end()
                return result
            except (HorovodInternalError, Error) as error:
                if not _rendezvous.is_elastic():
                    raise
                if repeats == _REPEATS:
                    _log.error("the same ranks have failed %d times without a commit", repeats + 1)
                    raise
                if _world.is_initialized():
                    who = f"rank {rank()}"
                else:  # the group could not be made
                    who = f"the process that was started as rank {os.environ.get('RANK', '?')}"
                _log.warning("%s goes back to the last commit: %s", who, error)
                state.restore()
                restarts = needs_sync = has_failed = True
            except HostsUpdatedInterrupt as change:
                restarts, has_failed, needs_sync = True, False, not change.skip_sync

    return cast(Callable[Concatenate[_S, _P], _R], running)


# ---- what a training run remembers


class State:
    """What ranks have to have in common to go on together.

    Args:
        bcast_object: returns rank 0's object on all ranks, such as `hvd.broadcast_object`.
        get_rank: returns this process's rank.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int] = rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._commits = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions that are called when the ranks have changed, before the state is sent:
        to adapt the learning rate to `hvd.size()`, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed: `reset`, and then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """`save`, and then `check_host_updates`; collective.

        It copies the state, so a large model may be committed every few steps only.  What was done
        since the last commit is lost with a rank.  Raises HorovodInternalError, and saves nothing,
        if an operation on a GPU has failed.
        """
        _world.check_operations()
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if new processes wait; collective."""
        if not _rendezvous.is_elastic():
            return
        waits = self._rank() == 0 and _rendezvous.here().has_newcomers()
        if self._told_by_root(waits):
            raise HostsUpdatedInterrupt(skip_sync=False)

    def _told_by_root(self, flag: bool) -> bool:
        return bool(self._bcast_object(flag))

    def save(self) -> None:
        """Remembers the state as it is."""
        raise NotImplementedError

    def restore(self) -> None:
        """Makes the state what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the state that of rank 0, and remembers it; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts what depends on the ranks to their change."""


class ObjectState(State):
    """A state of Python objects, which are attributes of it.

    Args:
        bcast_object, get_rank: as of `State`.
        kwargs: names and first values of the attributes.  Copies of them are remembered.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Remembers copies of the attributes."""
        self._saved = copy.deepcopy({name: getattr(self, name) for name in self._saved})

    def restore(self) -> None:
        """Makes the attributes what was saved last."""
        self._assign()

    def _assign(self) -> None:
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Makes the attributes rank 0's, and remembers them; collective."""
        if self._saved:
            own = {name: getattr(self, name) for name in self._saved}
            self._saved = self._bcast_object(own)
            self._assign()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the samples of an epoch among ranks that come and go.

    As an attribute of a `TorchState` it divides what is left of the epoch when the ranks change.
    Call `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: of which the length is taken.
        shuffle: take the samples in another order in each epoch, the same on all ranks.
        seed: of these orders, the same on all ranks.

    Attributes:
        epoch: as `set_epoch` set it.
        processed_num: samples of this epoch that all ranks have processed.
        remaining_indices: the others, in the order of the epoch.
        num_replicas, rank: among which they are divided, and this process.
        num_samples: how many this process gets.
        total_size: how many all get, with those that are taken twice so that each gets as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which no sample is processed.  To be called when one has ended: at
        the beginning of one it would forget what was processed before the ranks changed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Each rank has processed a batch of `batch_size` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how much of it is processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from there, with the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what is left of the epoch among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        filled = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(filled, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and other Python objects, which are attributes of it.

    Of an attribute with `state_dict` and `load_state_dict` (models, optimizers, schedulers,
    samplers) that is saved and sent, and the object stays.  Others are copied.  Copies of GPU
    tensors are in host memory.

    Args:
        model: a model, if any.
        optimizer: an optimizer, if any.
        kwargs: more of them, or any objects, by name.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._parts = {name: value for name, value in given.items() if _has_state(value)}
        self._part_states: dict[str, Any] = {}
        plain = {name: value for name, value in given.items() if name not in self._parts}
        super().__init__(functools.partial(broadcast_object, name="elastic.state"), rank, **plain)
        for name, part in self._parts.items():
            super().__setattr__(name, part)
            self._part_states[name] = _copied(part.state_dict())

    def __setattr__(self, name: str, value: Any) -> None:
        """Another object in the place of a part takes its place in `save` and `sync` too."""
        if name in getattr(self, "_parts", ()):
            self._parts[name] = value
            self._part_states[name] = _copied(value.state_dict())
        super().__setattr__(name, value)

    def save(self) -> None:
        """Remembers copies of all attributes."""
        self._part_states = {name: _copied(p.state_dict()) for name, p in self._parts.items()}
        super().save()

    def restore(self) -> None:
        """Makes all attributes what was saved last."""
        for name, part in self._parts.items():
            # A copy, as some keep what they are given.
            part.load_state_dict(copy.deepcopy(self._part_states[name]))
            if isinstance(part, torch.optim.Optimizer):
                part.zero_grad()  # some may be of one rank, and some of all
        super().restore()

    def sync(self) -> None:
        """Makes all attributes rank 0's, and remembers them; collective."""
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root_rank=0)
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part, root_rank=0)
            else:
                state = part.state_dict()
                part.load_state_dict(broadcast_object(state, name=f"elastic.{name}"))
        _world.check_operations()  # before any attribute is rank 0's
        super().sync()
        self.save()

    def reset(self) -> None:
        """Divides samplers anew."""
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()

    def _told_by_root(self, flag: bool) -> bool:
        # Not by pickles, since it is asked in each commit.
        own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        return bool(broadcast(own, 0, name="elastic.newcomers").item())


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _copied(value: Any) -> Any:
    """A copy of a state dict, with tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # of the same class, with the versions that a model's has
        copied.update((key, _copied(item)) for key, item in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return copy.deepcopy(value)
