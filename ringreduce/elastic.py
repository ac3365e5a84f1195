"""Training that goes on when a rank is lost, and that lets a new process take its place.

    ringreduce.init(pg_options=ringreduce.Options(on_loss="continue"))
    model = DistributedDataParallel(net, init_sync=False)
    ringreduce.register_comm_hook(model)
    sampler = elastic.ElasticSampler(len(dataset), batch_size=32)
    state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0)
    state.restore()
    for batch in state.batches(DataLoader(dataset, batch_sampler=sampler)):
        ...  # forward, backward, optimizer.step()
        state.step += 1
        state.commit()

The default group has on_loss="continue" (docs/survive.md): a loss costs no step.  A process that is
started in the place of a lost rank, with the same RANK, finds the running group by the store,
receives the state of the others in `restore`, and takes part from their next step on.

How ranks agree: each commit is a MAX all-reduce of one flag a rank and one token a rank.
Survivors of an all-reduce have the same bits, so all know the same ranks that took part, and the
same newcomers to let in.  Only the lowest rank looks for newcomers in the store, and only while a
rank is missing.  The new group is made beside the old one; a second all-reduce in the old one says
whether all survivors have made it.
"""

import io
import json
import logging
import math
import pickle
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringreduce.compression import CompressionState
from ringreduce.core import clock
from ringreduce.core.backend import (
    backend_of,
    before_members_change,
    extension,
)
from ringreduce.core.joining import note_member, tell_supervisor
from ringreduce.errors import Aborted, Error, PeerLost, Timeout
from ringreduce.hooks import attach, hooked_models

__all__ = ["ElasticSampler", "State"]

_log = logging.getLogger("ringreduce")

_ASKS = "ringreduce/elastic/asks/"  # and the rank: the newcomer's token, and how often it asked
_KINDS = "ringreduce/elastic/kinds/"  # and the rank: what parts the newcomer has
_ANSWERS = "ringreduce/elastic/answers/"  # and the token: the group that lets it in, or a refusal
_PLACE = "ringreduce/elastic/groups/"  # and a number: where the ranks of a group meet
# Settings of a sampler that are the same on all ranks; the seed is sent.
_SAMPLER = ("samples", "batch_size", "shuffle")
# How often newcomers ask, and how often a rank looks for them, in seconds.
_ASK_SECONDS = 0.05
_LOOK_SECONDS = 0.1
# How far apart ranks may give up making a group, in seconds.
_JOIN_SPREAD = 5.0


class ElasticSampler:
    """Hands out batches of sample numbers to ranks that come and go: a DataLoader's batch_sampler.

    In an epoch every sample is handed out at least once.  What counts as seen is decided by
    `State.commit`: the batches of the ranks that took part in it.  The batch of a lost rank is
    handed out again.  The last batches are filled up with samples that were handed out before, so
    that all ranks have the same number of steps.

    Iterate over `State.batches(loader)`, which draws again when the ranks change.

    Args:
        samples: how many there are.
        batch_size: of a rank.
        shuffle: put each epoch in another order, the same on all ranks.
        seed: of these orders, the same on all ranks.

    Raises:
        ValueError: samples or batch_size below 1.
    """

    def __init__(
        self, samples: int, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if samples < 1 or batch_size < 1:
            raise ValueError(f"{samples} samples in batches of {batch_size}: both must be above 0")
        self.samples, self.batch_size, self.shuffle, self.seed = samples, batch_size, shuffle, seed
        self.epoch = 0
        self._ranks = [0]  # that share the rest of the epoch
        self._place = 0  # of this rank among them
        self._rest = self._order()
        self._steps = 0  # of the rest, that are committed
        self._lost: list[torch.Tensor] = []  # batches of lost ranks

    def _order(self) -> torch.Tensor:
        """The samples of an epoch."""
        if not self.shuffle:
            return torch.arange(self.samples, dtype=torch.int64, device="cpu")
        draw = torch.Generator("cpu").manual_seed(hash((self.seed, self.epoch)))
        return torch.randperm(self.samples, generator=draw, device="cpu")

    def _batch(self, step: int, place: int) -> torch.Tensor:
        """The batch of the rank at that place, in a step of the rest."""
        first = (step * len(self._ranks) + place) * self.batch_size
        return self._rest[
            torch.arange(first, first + self.batch_size, dtype=torch.int64, device="cpu")
            % len(self._rest)
        ]

    def __len__(self) -> int:
        """The steps that are left of the epoch."""
        return math.ceil(len(self._rest) / (len(self._ranks) * self.batch_size)) - self._steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._steps, self._steps + len(self)):
            yield self._batch(step, self._place).tolist()

    def _share(self, ranks: list[int], rank: int) -> None:
        """Divides what is left of the epoch among those ranks, of which this is `rank`."""
        taken = self._steps * len(self._ranks) * self.batch_size
        self._rest = torch.cat([*self._lost, self._rest[taken:]])
        self._lost, self._steps = [], 0
        self._ranks, self._place = ranks, ranks.index(rank)

    def _commit(self, ranks: list[int], batches: int) -> None:
        """That many batches of each rank are over, of which those of `ranks` count."""
        for step in range(self._steps, self._steps + batches):
            for place, rank in enumerate(self._ranks):
                if rank not in ranks:
                    self._lost.append(self._batch(step, place))
        self._steps += batches

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._rest, self._steps = self._order(), 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch and what is left of it, for checkpoints too.

        Returns:
            The settings, epoch, and rest: an int64 tensor of the samples that are left.
        """
        taken = self._steps * len(self._ranks) * self.batch_size
        rest = torch.cat([*self._lost, self._rest[taken:]])
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "rest": rest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, with any number of ranks.

        Args:
            state: of `state_dict`.

        Raises:
            ValueError: it is of a sampler with other samples, batch_size or shuffle.
        """
        for name in _SAMPLER:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state of a sampler with {name}={state[name]} does not fit one with "
                    f"{name}={getattr(self, name)}"
                )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._rest, self._steps, self._lost = state["rest"].clone(), 0, []


# The groups whose State was restored.
_restored: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class _TensorsApart(pickle.Pickler):
    """Pickles an object and collects its tensors, which follow on their own."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1


class _TensorsFrom(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> torch.Tensor:
        return self.tensors[index]


class _OneRoot(dist.ProcessGroup):
    """The default group, whose broadcasts come from that rank."""

    def __init__(self, root: int) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())  # type: ignore[call-arg]
        self.root = root

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> Any:  # type: ignore[override]
        # What a root sent before it was lost must not remain in parts of the tensor.
        data = tensors[0].clone()
        work = dist.broadcast(data, self.root, async_op=True)
        work.wait()
        tensors[0].copy_(data)
        return work


class State:
    """What the ranks of a training run have in common, and the boundary of its steps.

    Make it on every rank, with the same names, and call `restore` before the first step and
    `commit` after each.  Ranks join in `commit` and nowhere else.

    Attributes:
        Each of `parts`, by its name; those that are values can be set: `state.step += 1`.

    Args:
        sampler: an `ElasticSampler`, or None.
        join_seconds: how long the others wait in `commit` for a newcomer that ends meanwhile:
            seconds, or a timedelta.
        parts: what newcomers receive: objects with `state_dict` and `load_state_dict` (models,
            optimizers, schedulers, scalers), torch.Generators from which all ranks draw the same
            numbers, and values that can be pickled.  Their tensors lie in CPU memory.  Generators
            that are no part are each rank's own.

    Raises:
        RuntimeError: there is no default group.
        ValueError: the default group is not ringreduce's, does not have on_loss="continue", or has
            a timeout below join_seconds + 5 s; a DistributedDataParallel model among the parts is
            on another group, does not have ringreduce's hook or has it with codec="auto"; a
            CompressionState is among the parts.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        *,
        sampler: ElasticSampler | None = None,
        join_seconds: float | timedelta = 5.0,
        **parts: Any,
    ) -> None:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("call torch.distributed.init_process_group first")
        backend = backend_of(group)
        if backend is None or not extension().goes_on(backend):
            raise ValueError(
                "ringreduce.elastic needs a default group of the backend ringreduce that goes on "
                'after a loss: pg_options=ringreduce.Options(on_loss="continue") or '
                "RINGREDUCE_ON_LOSS=continue"
            )
        if isinstance(join_seconds, timedelta):
            join_seconds = join_seconds.total_seconds()
        if not join_seconds > 0:
            raise ValueError(f"join_seconds must be above 0, not {join_seconds}")
        timeout = extension().timeout_seconds(backend)
        if timeout < join_seconds + _JOIN_SPREAD:
            raise ValueError(
                f"the group's timeout of {timeout:g} s must be at least join_seconds "
                f"({join_seconds:g}) + {_JOIN_SPREAD:g} s: ranks may give a newcomer up that far "
                "apart"
            )
        self._backend = backend
        self._store = extension().store_of(backend)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._join_seconds = join_seconds
        self._parts = [*parts, *(["sampler"] if sampler is not None else [])]
        self.sampler = sampler
        for name, part in parts.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"a part of the state cannot be called {name!r}")
            if isinstance(part, CompressionState):
                raise ValueError(
                    f"the CompressionState {name!r} is no part of the State: each rank has "
                    "residuals of its own, and the State sends the rest by itself"
                )
            setattr(self, name, part)
        # Those that are no part, but inside of one or around one, count too.
        models = {m for part in parts.values() for m in _models_in(part)}
        if any(model.process_group is not group for model in models):
            raise ValueError("the DistributedDataParallel model must be on the default group")
        self._models = {m: s for m, s in hooked_models().items() if m.process_group is group}
        if not models.issubset(self._models):
            raise ValueError(
                "register ringreduce's hook on each DistributedDataParallel model before the State "
                "is made: ringreduce.register_comm_hook(model)"
            )
        self._compressions = [state for state in self._models.values() if state is not None]
        if any(state.codec == "auto" for state in self._compressions):
            raise ValueError(
                'a model of a State cannot have codec="auto", because a newcomer cannot take over '
                'its measurements; choose a codec, for example "int8", or none'
            )
        for model in self._models:
            model.register_forward_pre_hook(lambda model, _: self._before_forward(model))
            model.register_forward_hook(lambda *_: self._let_roots_move(False), always_call=True)
        self._ranks: list[int] = []  # that took part in the last commit, the same on all of them
        self._version = 0  # of these
        self._took_part: list[int] = []
        self._given = 0  # batches since the last commit
        self._groups = 0  # that were prepared so far, the same on all ranks
        self._seen: dict[int, str] = {}  # how newcomers asked when this rank last looked
        self._next_look = 0.0
        self._callbacks: list[Callable[[list[int]], None]] = []

    def _let_roots_move(self, move: bool) -> None:
        """DDP broadcasts buffers from rank 0, which may be lost."""
        extension().set_roots_move(self._backend, move)

    def _before_forward(self, model: Any) -> None:
        """Has the reducer rebuild its buckets, if it is to, and not by itself in forward.

        It broadcasts first the order of the parameters and then the sizes of the buckets.  Both
        must come from one rank, as ranks whose gradients came in another order have other sizes.
        """
        for root in self._ranks if torch.is_grad_enabled() else []:
            group = _OneRoot(root)
            model.reducer._update_process_group(group)
            try:
                model.reducer._rebuild_buckets()
                break
            except PeerLost:  # the same on all ranks, so all turn to the next
                continue
            finally:
                model.reducer._update_process_group(model.process_group)
        self._let_roots_move(True)

    @property
    def took_part(self) -> list[int]:
        """The ranks that took part in the last step and its `commit`; the same on all."""
        return list(self._took_part)

    @property
    def live_ranks(self) -> list[int]:
        """The ranks that took part in the last `commit` or have joined in it; the same on all."""
        return list(self._ranks)

    def is_leader(self) -> bool:
        """Whether this rank is the one that writes checkpoints, for example.

        Returns:
            True on the lowest of `live_ranks`.
        """
        return self._ranks[:1] == [self._rank]

    def on_change(self, callback: Callable[[list[int]], None]) -> None:
        """Has `callback(live_ranks)` called by `restore` and each `commit` that changes them.

        Args:
            callback: takes the ranks, ascending.
        """
        self._callbacks.append(callback)

    # ---- the start

    def restore(self) -> None:
        """Makes this rank's state that of the others; collective over the ranks of a new group.

        At the start of a run all ranks receive the state of rank 0.  A process that takes the place
        of a lost rank waits for the others' next `commit`, and receives their state.

        Raises:
            Timeout: within the group's timeout, no `commit` has let this process in.
            PeerLost: all ranks that had the state are lost; at the start of a run, rank 0.
            ValueError: the running ranks have other parts, for example a model of other shapes.
            RuntimeError: another State of the group was restored before, or this one.
        """
        group = dist.group.WORLD
        assert group is not None
        if group in _restored:
            raise RuntimeError("a group has one State, whose restore() is called once")
        if extension().is_connected(self._backend):
            alive, _ = self._vote({})
            if alive[0] != 0:
                raise PeerLost(
                    "rank 0, which has the state to start from, is lost before restore()",
                    rank=0,
                    final=False,
                )
            self._receive_from([0], self._packed(), is_new=True)
            # Rank 0 too, since ranks whose counts are set agree anew in the next step.
            for state in self._compressions:
                state._take_counts(state.steps, state._loss_scale)
            self._become(alive)
        else:
            self._join()
            note_member()
        _restored.add(group)
        tell_supervisor(str(self._rank))

    def _join(self) -> None:
        """Takes the place of a lost rank."""
        timeout = extension().timeout_seconds(self._backend)
        deadline = clock.now() + timeout
        self._store.set(f"{_KINDS}{self._rank}", json.dumps(self._kinds()))
        failed = ""
        while True:
            token = str(random.SystemRandom().randrange(1, 1 << 62))
            answer = self._ask(token, deadline, timeout, failed)
            if "refused" in answer:
                raise ValueError(answer["refused"])
            self._groups, donors = answer["groups"], answer["donors"]
            try:
                place, members = f"{_PLACE}{self._groups}", answer["members"]
                extension().prepare(self._backend, place, members, self._join_seconds)
            except Error as error:
                if extension().is_ended(self._backend):
                    raise
                failed = f"; its last attempt to join failed: {error}"
                _log.warning("rank %d asks again to join: %s", self._rank, error)
                continue
            before_members_change()
            extension().enter_prepared(self._backend)
            alive, _ = self._vote({})
            # Without any of them, they have given this newcomer up.
            if not set(alive).isdisjoint(donors):
                self._receive_from([r for r in donors if r in alive], None, is_new=True)
                self._become(alive)
                return

    def _ask(self, token: str, deadline: float, timeout: float, failed: str) -> dict[str, Any]:
        """Asks until an answer comes: the number of the group to join, its members, the donors.

        Or why this rank cannot join.  `failed`: how it failed before, for the error.
        """
        asked = 0
        while not self._store.check([_ANSWERS + token]):
            if extension().is_ended(self._backend):
                raise Aborted(
                    f"rank {self._rank} gave up its join: its group was aborted or destroyed"
                )
            if clock.now() > deadline:
                raise Timeout(
                    f"rank {self._rank} asked the running group for {timeout:g} s to be let in; "
                    "no rank called commit(), another process has this rank, or the store is that "
                    f"of a job that has ended{failed}"
                )
            asked += 1
            self._store.set(f"{_ASKS}{self._rank}", f"{token} {asked}")
            time.sleep(_ASK_SECONDS)
        answer: dict[str, Any] = json.loads(self._store.get(_ANSWERS + token))
        return answer

    # ---- the boundary of steps

    def commit(self) -> None:
        """Ends a step: learns of losses, and lets newcomers in; collective.

        The batches that `batches` has given since the last commit count as seen.

        Raises:
            RuntimeError: `restore` was not called.
            PeerLost, Timeout, Mismatch, Aborted: the group has failed; see `ringreduce.errors`.
        """
        if not self._ranks:
            raise RuntimeError("call restore() before the first step")
        alive, tokens = self._vote(self._newcomers())
        self._took_part = alive
        if self.sampler is not None:
            self.sampler._commit(alive, self._given)
            self._given = 0
        joined = False
        if tokens:
            alive, joined = self._admit(alive, tokens)
        if alive != self._ranks or joined:
            self._become(alive)

    @property
    def is_last_batch(self) -> bool:
        """Whether `batches` has given the last batch of the sampler's epoch.

        For those who commit after several batches: they commit after this one too.
        """
        return self.sampler is not None and self._given == len(self.sampler)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches that are left of the sampler's epoch; then the sampler is in the next one.

        Args:
            loader: draws from the sampler: `DataLoader(dataset, batch_sampler=state.sampler)`.

        Returns:
            An iterator over what the loader gives.

        Raises:
            ValueError: the State has no sampler.
            RuntimeError: the loader does not draw from the sampler, or the last batch of the epoch
                was not committed.
        """
        sampler = self.sampler
        if sampler is None:
            raise ValueError("batches() needs a State with a sampler")
        while len(sampler) > 0:
            version, self._given = self._version, 0
            for batch in loader:
                if self.is_last_batch:
                    raise RuntimeError("the loader has more batches than the State's sampler")
                self._given += 1
                yield batch
                if self._version != version:
                    break  # what was drawn ahead is drawn again
            if self._version == version and len(sampler) > 0:
                raise RuntimeError(
                    f"the epoch ended with {self._given} of {len(sampler)} batches used and not "
                    "committed: call commit() after the last batch too (State.is_last_batch)"
                )
        sampler._next_epoch()

    def _vote(self, newcomers: dict[int, int]) -> tuple[list[int], dict[int, int]]:
        """The ranks that take part in this call, and the newcomers' tokens that any has given."""
        size = self._world_size
        votes = [0] * (2 * size)
        votes[self._rank] = 1
        for rank, token in newcomers.items():
            votes[size + rank] = token
        agreed = torch.tensor(votes, dtype=torch.int64, device="cpu")
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        votes = agreed.tolist()
        alive = [r for r in range(size) if votes[r]]
        return alive, {r: votes[size + r] for r in range(size) if votes[size + r] and not votes[r]}

    def _newcomers(self) -> dict[int, int]:
        """The tokens of processes that ask to take the place of a lost rank, if this rank looks."""
        if len(self._ranks) == self._world_size or clock.now() < self._next_look:
            return {}
        self._next_look = clock.now() + _LOOK_SECONDS
        if extension().live_ranks(self._backend)[0] != self._rank:
            return {}
        found = {}
        try:
            for rank in set(range(self._world_size)).difference(self._ranks):
                key = f"{_ASKS}{rank}"
                if not self._store.check([key]):
                    continue
                ask = self._store.get(key).decode()
                # One that has not asked again since may have ended.
                if self._seen.setdefault(rank, ask) == ask:
                    continue
                token = int(ask.split()[0])
                if self._refuse(rank, token):
                    del self._seen[rank]
                else:
                    found[rank], self._seen[rank] = token, ask
        except RuntimeError as error:  # it was in a rank that is lost
            _log.warning("no new ranks can join, since the store is lost: %s", error)
            self._next_look = math.inf
        return found

    def _refuse(self, rank: int, token: int) -> bool:
        """Whether a newcomer's parts are not those of the others; then it is told so."""
        there, here = json.loads(self._store.get(f"{_KINDS}{rank}")), self._kinds()
        names = sorted(there.keys() | here.keys())
        pairs = [(name, there.get(name, "none"), here.get(name, "none")) for name in names]
        me = self._rank
        other = [
            f"{name} is {mine} on rank {rank} and {ours} on rank {me}"
            for name, mine, ours in pairs
            if mine != ours and mine and ours
        ]
        if not other:
            return False
        shown = "; ".join(other[:3]) + (f"; and {len(other) - 3} more" if len(other) > 3 else "")
        text = (
            f"rank {rank} cannot join, because its State differs from that of the running ranks: "
            f"{shown}. Start it with the program, the model and the settings of the running ranks"
        )
        self._store.set(f"{_ANSWERS}{token}", json.dumps({"refused": text}))
        self._store.delete_key(f"{_ASKS}{rank}")
        _log.warning("%s", text)
        return True

    def _admit(self, alive: list[int], tokens: dict[int, int]) -> tuple[list[int], bool]:
        """Makes the group of these ranks and newcomers.  The ranks from now on, and whether it is
        made."""
        self._groups += 1
        self._seen.clear()
        members = sorted([*alive, *tokens])
        answer = json.dumps({"groups": self._groups, "members": members, "donors": alive})
        is_made = torch.ones(1, dtype=torch.int32, device="cpu")
        try:
            # Every rank does, since each may be lost at any time.
            for rank, token in tokens.items():
                self._store.set(f"{_ANSWERS}{token}", answer)
                self._store.delete_key(f"{_ASKS}{rank}")
            packed = self._packed()
            place = f"{_PLACE}{self._groups}"
            extension().prepare(self._backend, place, members, self._join_seconds)
        except Exception as error:  # ours, the store's, or that of a part that cannot be sent
            _log.warning("rank %d cannot let ranks %s join: %s", self._rank, [*tokens], error)
            is_made.zero_()
        try:
            dist.all_reduce(is_made, op=dist.ReduceOp.MIN)
            if not is_made.item():
                extension().drop_prepared(self._backend)
                return alive, False
            before_members_change()
            extension().enter_prepared(self._backend)
        except BaseException:  # newcomers are not to wait for this rank
            extension().drop_prepared(self._backend)
            raise
        together, _ = self._vote({})
        donors = [r for r in alive if r in together]
        self._receive_from(donors, packed, is_new=False)
        for model, state in self._models.items():
            _renew_reducer(model)
            attach(model, state)
        if donors[0] == self._rank:
            names = " and ".join(f"rank {r}" for r in tokens if r in together) or "no rank"
            _log.warning("%s joined; %d of %d ranks go on", names, len(together), self._world_size)
        return together, True

    def _become(self, ranks: list[int]) -> None:
        """These are the ranks from now on."""
        self._ranks = ranks
        self._version += 1
        if self.sampler is not None:
            self.sampler._share(ranks, self._rank)
        for callback in self._callbacks:
            callback(list(ranks))

    # ---- the state on its way

    def _kinds(self) -> dict[str, str]:
        """What ranks must have in common, by name; "" for what fits anything."""
        kinds: dict[str, str] = {}
        for name in self._parts:
            part = getattr(self, name)
            kinds[f"part {name}"] = "a part"
            if isinstance(part, torch.nn.Module):
                for key, value in _state_of(part).items():
                    if isinstance(value, torch.Tensor):
                        lazy = torch.nn.parameter.is_lazy(value)
                        kind = "" if lazy else f"{value.dtype} of shape {tuple(value.shape)}"
                        kinds[f"{key} of part {name}"] = kind
            elif isinstance(part, torch.optim.Optimizer):
                for number, group in enumerate(part.param_groups):
                    count = len(group["params"])
                    kinds[f"group {number} of part {name}"] = f"{count} parameters"
            elif isinstance(part, ElasticSampler):
                for key in _SAMPLER:
                    kinds[f"{key} of part {name}"] = str(getattr(part, key))
        kinds["number of DDP models"] = str(len(self._models))
        for number, state in enumerate(self._models.values()):
            settings = {"codec": None} if state is None else state._settings
            for key, setting in settings.items():
                kinds[f"{key} of the hook of DDP model {number}"] = str(setting)
            if state is not None:
                exact = state.exact_parameters()
                kinds[f"exact of the hook of DDP model {number}"] = str(exact)
        return kinds

    def _content(self) -> dict[str, Any]:
        return {
            "parts": {name: _state_of(getattr(self, name)) for name in self._parts},
            "counts": [(state.steps, state._loss_scale) for state in self._compressions],
        }

    def _load(self, content: dict[str, Any]) -> None:
        for state, counts in zip(self._compressions, content["counts"], strict=True):
            state._take_counts(*counts)
        for name, value in content["parts"].items():
            part = getattr(self, name)
            if isinstance(part, torch.Generator):
                part.set_state(value)
            elif not _has_state(part):
                setattr(self, name, value)
            elif isinstance(part, DistributedDataParallel):
                part.module.load_state_dict(value)
            else:
                part.load_state_dict(value)

    def _packed(self) -> tuple[bytes, list[torch.Tensor]]:
        """This rank's state: pickled, and the tensors that were left out of that."""
        file = io.BytesIO()
        pickler = _TensorsApart(file)
        pickler.dump(self._content())
        kinds = [(t.dtype, t.shape) for t in pickler.tensors]
        tensors = [t.cpu().contiguous() for t in pickler.tensors]
        return pickle.dumps((kinds, file.getvalue())), tensors

    def _receive_from(
        self,
        donors: list[int],
        packed: tuple[bytes, list[torch.Tensor]] | None,
        is_new: bool,
    ) -> None:
        """Broadcasts the state of the first donor that lives long enough, for the new ranks.

        `packed`: this rank's, if it is a donor.
        """
        error: PeerLost | None = None
        for donor in donors:
            try:
                if donor == self._rank:
                    assert packed is not None
                    _send(*packed)
                else:
                    content = self._receive(donor, is_new)
            except PeerLost as lost:  # the same on all ranks, so all turn to the next
                error = lost
                continue
            if is_new and donor != self._rank:
                self._load(content)
            return
        raise PeerLost(f"all ranks that had the state are lost: {error}", final=False) from error

    def _receive(self, donor: int, is_new: bool) -> dict[str, Any]:
        """The donor's state for the new; others only take part."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.broadcast(size, donor)
        received = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(received, donor)
        kinds, pickled = pickle.loads(received.numpy().tobytes())
        tensors = []
        for dtype, shape in kinds:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            if tensor.numel() > 0:
                dist.broadcast(tensor, donor)
            if is_new:
                tensors.append(tensor)
        if not is_new:
            return {}
        content: dict[str, Any] = _TensorsFrom(io.BytesIO(pickled), tensors).load()
        return content


def _send(pickled: bytes, tensors: list[torch.Tensor]) -> None:
    rank = dist.get_rank()
    sent = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    for tensor in [torch.tensor([sent.numel()], dtype=torch.int64, device="cpu"), sent, *tensors]:
        if tensor.numel() > 0:
            dist.broadcast(tensor, rank)


def _models_in(part: Any) -> list[DistributedDataParallel]:
    modules = part.modules() if isinstance(part, torch.nn.Module) else []
    return [m for m in modules if isinstance(m, DistributedDataParallel)]


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _state_of(part: Any) -> Any:
    if isinstance(part, DistributedDataParallel):
        return part.module.state_dict()
    if isinstance(part, torch.Generator):
        return part.get_state()
    return part.state_dict() if _has_state(part) else part


def _renew_reducer(model: Any) -> None:
    """Makes a model's reducer as new as a newcomer's: both order their buckets in the next step.

    It is what DistributedDataParallel does when it is unpickled.
    """
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model.reducer = model.logger = None  # the old one takes its hooks out of autograd
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
