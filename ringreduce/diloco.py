"""Outer steps for slow lines: sites train by themselves and meet once in many steps.

    with ringreduce.DiLoCo(model, optimizer, sync_every=30):
        for inputs, targets in loader:
            ...  # forward, backward, optimizer.step(): nothing else changes

The method is DiLoCo (Douillard et al. 2023), and with `fragments` and `overlap` Streaming DiLoCo
(2025).  Each rank has a copy of the global parameters, which is the same on all ranks.  A round:

    pseudo-gradient   the global parameters minus those that the inner steps have made of them
    average           of all ranks', coded, with error feedback; ranks of one host are added up in
                      its memory first, and one sum of each host crosses the line, or the greatest
                      elements of each rank do (sparse.py)
    outer step        the outer optimizer, on the global copy; every rank does the same arithmetic
    parameters        are set to the global copy

Rounds are counted and not negotiated: round k is the k-th on every rank.  So ranks need not agree
on when one begins, also by time, and a rank that is late is waited for in the round's all-reduce.
"""

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

from ringreduce.average import meeting_device, odd_ones, ranks_that_differ, start_average
from ringreduce.compression import number, parameters_of, whole
from ringreduce.core import clock
from ringreduce.core.backend import (
    backend_of,
    extension,
    group_among,
    noting_errors,
    ringreduce_group,
)
from ringreduce.errors import Mismatch
from ringreduce.sparse import SparseAverage, share_of

__all__ = ["DiLoCo"]

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

# A parameter begins at a multiple of a codec's block (csrc/kernels/codec.h), so no two share one.
# They do share blocks of the sparse codec, which are larger.
_BLOCK = 32
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _mesh(p: torch.Tensor) -> Any:
    """The DeviceMesh over whose ranks a parameter is spread (FSDP2), or None."""
    return getattr(p, "device_mesh", None)


def _local(p: torch.Tensor) -> torch.Tensor:
    """This rank's values of a parameter: all of them, or its shard."""
    with torch.no_grad():
        local: torch.Tensor = p.detach() if _mesh(p) is None else p.to_local()  # type: ignore[attr-defined]
        return local


def _sharded_modules(model: torch.nn.Module) -> list[Any]:
    """Those on which `fully_shard` was called."""
    return [m for m in model.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)]


def _shared_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that sites share, by the names that they have without DDP."""
    for module in _sharded_modules(model):
        module.reshard()  # after an evaluation the outermost one has whole parameters
    found = parameters_of(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "DiLoCo takes models of torch.distributed.fsdp.fully_shard, and not those of "
            "FullyShardedDataParallel, whose flat parameters it does not know"
        )
    if not found:
        raise ValueError("the model has no parameters that require a gradient")
    for name, p in found.items():
        if torch.nn.parameter.is_lazy(p):
            raise ValueError(f"DiLoCo takes parameters that have a shape, and {name} has none yet")
        local = _local(p)
        if type(local) is not torch.Tensor or local.layout != torch.strided or local.is_meta:
            raise ValueError(
                f"DiLoCo takes dense parameters in memory, and {name} is a "
                f"{type(local).__name__} on {local.device}"
            )
        if p.dtype not in _DTYPES:
            raise ValueError(
                "DiLoCo takes parameters of float32, float64, float16 and bfloat16, and "
                f"{name} is of {p.dtype}"
            )
    return found


@dataclass
class _Shared:
    """This rank's part of a parameter, and its global values: a piece of its message."""

    name: str
    parameter: torch.nn.Parameter
    begin: int  # in the message
    master: torch.nn.Parameter  # a view of the message's values

    @property
    def local(self) -> torch.Tensor:
        return _local(self.parameter)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor that is laid out as the message."""
        return flat[self.begin : self.begin + self.master.numel()].view(self.master.shape)


class _Message:
    """The parameters of a fragment that travel as one tensor, since they have one wide dtype."""

    def __init__(self, dtype: torch.dtype, parameters: dict[str, torch.nn.Parameter]) -> None:
        begins, end = [], 0
        for p in parameters.values():
            begins.append(end)
            end += -(-_local(p).numel() // _BLOCK) * _BLOCK
        self.values = torch.zeros(end, dtype=dtype, device="cpu")
        self.residual: torch.Tensor | None = None  # what coding has lost so far
        self.parts: list[_Shared] = []
        for begin, (name, p) in zip(begins, parameters.items(), strict=True):
            local = _local(p)
            place = self.values[begin : begin + local.numel()].view(local.shape)
            self.parts.append(_Shared(name, p, begin, torch.nn.Parameter(place)))
            place.copy_(local)

    def pseudo_gradient(self) -> torch.Tensor:
        """What the inner steps have moved, away from the global values as the dtype has them."""
        moved = torch.zeros_like(self.values)
        for part in self.parts:
            start = part.master.detach().to(part.parameter.dtype)
            now = part.local.to("cpu", moved.dtype)
            part.of(moved).copy_(start).sub_(now)
        return moved


def _split(parameters: dict[str, torch.nn.Parameter], fragments: int) -> list[list[_Message]]:
    """Fragments of neighbours, about as large as each other, and the messages of each."""
    rest, left = list(parameters.items()), sum(p.numel() for p in parameters.values())
    found = []
    for after in reversed(range(fragments)):  # so many fragments come after this one
        wanted, taken = left / (after + 1), rest[:1]
        size = taken[0][1].numel()
        while len(rest) - len(taken) > after:
            more = rest[len(taken)][1].numel()
            if after and size + more / 2 > wanted:
                break
            taken.append(rest[len(taken)])
            size += more
        rest, left = rest[len(taken) :], left - size
        by_dtype: dict[torch.dtype, dict[str, torch.nn.Parameter]] = {}
        for name, p in taken:
            wide = torch.float64 if p.dtype == torch.float64 else torch.float32
            by_dtype.setdefault(wide, {})[name] = p
        found.append([_Message(dtype, some) for dtype, some in by_dtype.items()])
    return found


class _Site:
    """The ranks that train as one: those of a DistributedDataParallel, or of FSDP2's mesh."""

    def __init__(self, model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
        if not dist.is_initialized():
            raise RuntimeError("call torch.distributed.init_process_group first")
        self._sharded_modules = _sharded_modules(model)
        self._groups: list[dist.ProcessGroup] = []  # what one of these has, all ranks have in turns
        self.ranks = [dist.get_rank()]
        # Which of the parts of all parameters this rank has.  Replicas have the same.
        self.shard = 0
        self.first: int | None = None  # the rank of the first site that has it
        (one, p), *others = parameters.items()
        mesh = _mesh(p)
        for name, other in others:
            if _mesh(other) != mesh:
                raise ValueError(
                    f"all parameters must be sharded over one DeviceMesh, and {one} and {name} are "
                    "not: call fully_shard on the whole model"
                )
        self.is_sharded = mesh is not None
        # DDP may be inside: of torch.compile, or of a module that holds one.
        replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        found = {tuple(dist.get_process_group_ranks(m.process_group)) for m in replicas}
        if len(found) > 1:
            raise ValueError(
                f"the model's DistributedDataParallel modules have different ranks: {sorted(found)}"
            )
        if replicas:
            self._groups = [replicas[0].process_group]
            self.ranks = dist.get_process_group_ranks(replicas[0].process_group)
        elif mesh is not None:
            self._groups = mesh.get_all_groups()
            self.ranks = mesh.mesh.flatten().tolist()
            for dim, at in enumerate(mesh.get_coordinate()):
                if p.placements[dim].is_shard():  # type: ignore[attr-defined]
                    self.shard = self.shard * mesh.size(dim) + at

    def group(self) -> dist.ProcessGroup | None:
        """All ranks that have this rank's part; None for the default group.  Collective."""
        if not self.is_sharded:
            return None
        whole = ringreduce_group(None)
        if extension().goes_on(backend_of(whole)):
            raise ValueError(
                'a sharded model cannot be in a group with on_loss="continue": a site that loses a '
                "rank ends"
            )
        found: list[Any] = [None] * dist.get_world_size()
        with noting_errors(whole):
            dist.all_gather_object(found, self.ranks, group=whole)
        sites = sorted({tuple(ranks) for ranks in found})
        if len({len(site) for site in sites}) > 1:
            raise ValueError(
                f"sites must shard parameters over equally many ranks, and theirs are {sites}"
            )
        place = self.ranks.index(dist.get_rank())
        self.first = sites[0][place]
        return group_among(sorted(site[place] for site in sites))

    def refuse(self, group: dist.ProcessGroup | None) -> None:
        """Raises ValueError if rounds of the group's ranks would have nothing to do, or do harm."""
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if len(ranks) > 1 and set(ranks) <= set(self.ranks):
            raise ValueError(
                f"all of groups' ranks {ranks} train as one in each step (the model's "
                "DistributedDataParallel or mesh has them all), so rounds have nothing to do: make "
                "it over the ranks of a site (process_group=, mesh=), or leave it out"
            )
        if group and self.is_sharded and len(set(ranks) & set(self.ranks)) > 1:
            raise ValueError(
                f"groups' ranks {ranks} have several of the ranks {self.ranks}, among which the "
                'model is sharded: take one of each site (groups="host" makes such groups)'
            )

    def combined(self, mine: int, op: Any) -> int:
        """A number of all ranks of the site, by a reduction; the same on all of these."""
        for group in self._groups:
            if group.size() > 1:
                one = torch.tensor([mine], dtype=torch.int64, device=meeting_device(group))
                dist.all_reduce(one, op=op, group=group)
                mine = int(one.item())
        return mine

    def reshard(self) -> None:
        """Drops whole parameters that FSDP2 has gathered from shards, which have changed since."""
        for module in self._sharded_modules:
            module.reshard()


def _refuse_outer(outer: torch.optim.Optimizer) -> None:
    """Raises ValueError if an outer optimizer cannot make a step with a dense gradient alone."""
    if isinstance(outer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ValueError(
            f"outer_optimizer cannot be {type(outer).__name__}, which needs a closure, or sparse "
            "gradients"
        )


@dataclass
class _Flight:
    """An average of a fragment that has begun, or arrived, and is not applied yet."""

    fragment: int
    due: int  # the inner step after which it is applied
    sums: list[torch.Tensor]  # of each message; the averages once they have arrived
    errors: list[torch.Tensor | None] = field(default_factory=list)
    weight: torch.Tensor | None = None  # likewise an average
    works: list[dist.Work | SparseAverage] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    proofs: torch.Tensor | None = None  # of each rank; -1: of one that is lost


class DiLoCo:
    """Averages what ranks have learned once in many steps, and applies it by an outer optimizer.

        with ringreduce.DiLoCo(model, optimizer, sync_every=30) as diloco:
            while diloco.step < steps:
                ...  # forward, backward, optimizer.step()
            diloco.sync()  # all ranks end with the same parameters

    Make it on all ranks, which then agree on the arguments; ranks whose parameters differ from
    those of the first rank receive them.  In the `with`, each `optimizer.step()` counts.

    Ranks that train as one, a site, are those of the model's DistributedDataParallel, or those over
    which `fully_shard` has spread it; else each rank is a site.  Sites weigh by their number of
    ranks.  Ranks of a site stay equal to the bit, since an average has the same bits on all ranks.
    A rank of a sharded model averages its shard with those that have the same one.

    Args:
        model: a module, or its DistributedDataParallel over a part of the ranks, or one that
            `fully_shard` has spread over the mesh of a site.  Parameters that require a gradient
            are shared, of float32, float64 (never coded), float16 or bfloat16 (with a global copy
            in float32), on any device; the copies are in CPU memory.  Buffers stay each rank's own.
        optimizer: the inner one, of the model's parameters.
        sync_every: inner steps from one round to the next.
        outer_optimizer: None for SGD with lr=0.7 and Nesterov momentum 0.9; or what makes one of
            a list of parameters (a class of torch.optim, a function); or an optimizer of the
            model's parameters that has not stepped, which then gets the global copies instead.
        codec: how pseudo-gradients travel: "int4", "int8", "bfloat16", "float16", or None for
            exactly.  "topk:0.02+int2": only the greatest 2 % of the elements do, with 2 bits each
            beside their places, from each rank to all (SparseLoCo).
        error_feedback: what coding loses of a pseudo-gradient is added to the next one; a number
            above 0 and up to 1: that much of it.
        fragments: the parameters are cut in so many, each with rounds of its own; these are spread
            over `sync_every` steps.
        overlap: a round's average is applied this many inner steps after it began, and travels
            meanwhile.
        fragment_update_alpha: how much of the local parameters is kept in a round: 0 for none.
        groups: "host" for all ranks of the default group, where ranks of a host are added up in
            its memory (of a sharded model: all that have the same shard; making the DiLoCo is then
            collective for the default group); or the process group whose ranks are averaged.  If
            it is not ringreduce's, a ringreduce group over the same ranks is made.
        sync_seconds: rounds by time, in place of `sync_every`.  A rank weighs by the tokens that
            `count` has been told since the last round, or else by its inner steps.

    Raises:
        TypeError, ValueError: an argument that cannot be; the error names it.
        Mismatch: ranks gave different arguments or models.
        RuntimeError: there is no default group.
        Timeout, PeerLost, Error: see `ringreduce.errors`.  So does `optimizer.step()` in which a
            round fails; the global copy is as before then.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sync_every: int = 30,
        outer_optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        codec: str | None = "int4",
        error_feedback: bool | float = True,
        fragments: int = 1,
        overlap: int = 0,
        fragment_update_alpha: float = 0.0,
        groups: str | dist.ProcessGroup = "host",
        sync_seconds: float | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a torch.nn.Module, not a {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a torch optimizer, not a {type(optimizer).__name__}")
        while not hasattr(optimizer, "_optimizer_step_post_hooks"):
            inner = getattr(optimizer, "optimizer", None)  # of a wrapper, such as Accelerate's
            if not isinstance(inner, torch.optim.Optimizer):
                raise TypeError(
                    f"a {type(optimizer).__name__} has no hooks of torch optimizers: give the one "
                    "that it wraps"
                )
            optimizer = inner
        parameters = _shared_parameters(model)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own.isdisjoint(map(id, parameters.values())):
            raise ValueError("optimizer steps none of the model's parameters")
        self._every = whole(sync_every, "sync_every", 1)
        self._seconds = None if sync_seconds is None else number(sync_seconds, "sync_seconds")
        if self._seconds is not None and not 0 < self._seconds < float("inf"):
            raise ValueError(f"sync_seconds must be above 0, not {sync_seconds}")
        by_steps = self._every if self._seconds is None else None
        whole(fragments, "fragments", 1, min(len(parameters), by_steps or len(parameters)) + 1)
        self._overlap = whole(overlap, "overlap", below=by_steps or 1 << 64)
        self._alpha = number(fragment_update_alpha, "fragment_update_alpha")
        if not 0 <= self._alpha <= 1:
            raise ValueError(f"fragment_update_alpha must be from 0 to 1, not {self._alpha}")
        self._share: float | None = None  # of the elements, of a sparse codec
        if codec is not None:
            if not isinstance(codec, str):
                raise TypeError(f"codec is a name or None, not {codec!r}")
            self._share = share_of(codec)
            if self._share is None:
                try:
                    extension().coded_bytes(codec, 1)
                except ValueError as unknown:
                    raise ValueError(f'{unknown}; DiLoCo also takes "topk:SHARE+int2"') from None
            else:
                codec = f"topk:{self._share}+int2"  # as the others would write it
            if codec == "float16" and self._seconds is not None:
                raise ValueError(
                    'codec="float16" cannot be had with sync_seconds: weights by tokens may go '
                    'beyond its range; take "bfloat16"'
                )
        self._codec, self._feedback = codec, float(error_feedback is True)
        if not isinstance(error_feedback, bool):
            self._feedback = number(error_feedback, "error_feedback")
            if not 0 < self._feedback <= 1:
                raise ValueError(
                    "error_feedback is True, False or a number above 0 and up to 1, not "
                    f"{error_feedback}"
                )
        if isinstance(groups, str) and groups != "host":
            raise ValueError(f'groups is "host" or a process group, not {groups!r}')
        if not isinstance(groups, (str, dist.ProcessGroup)):
            raise TypeError(f'groups is "host" or a process group that has this rank: {groups!r}')
        self._site = _Site(model, parameters)
        self._group = None if isinstance(groups, str) else groups
        self._site.refuse(self._group)

        self._model, self._optimizer = model, optimizer
        self._fragments = _split(parameters, fragments)
        self.outer_optimizer = self._outer(outer_optimizer)
        self._flights: list[_Flight] = []
        self._step = self._rounds = self._tokens = 0
        self._counts = False  # tokens
        self._marks = [(0, 0)] * fragments  # the steps and tokens when a fragment's round began
        self._since = clock.now()
        self._hook: Any = None
        if self._group is None:
            self._group = self._site.group()
        self._agree()

    def _parts(self, fragment: int | None = None) -> Iterator[tuple[_Message, _Shared]]:
        some = self._fragments if fragment is None else [self._fragments[fragment]]
        for messages in some:
            for message in messages:
                for part in message.parts:
                    yield message, part

    def _outer(self, given: torch.optim.Optimizer | MakeOptimizer | None) -> torch.optim.Optimizer:
        """The outer optimizer, on the global copies."""
        masters = [part.master for _, part in self._parts()]
        if given is None:
            return torch.optim.SGD(masters, lr=0.7, momentum=0.9, nesterov=True)
        if given is self._optimizer:
            raise ValueError(
                "outer_optimizer is the optimizer of the inner steps: make another one"
            )
        if not isinstance(given, torch.optim.Optimizer):
            if not callable(given):
                raise TypeError(
                    "outer_optimizer is an optimizer, or makes one of a list of parameters, not "
                    f"{given!r}"
                )
            made = given(masters)
            if not isinstance(made, torch.optim.Optimizer):
                raise TypeError(f"outer_optimizer made a {type(made).__name__}, no optimizer")
            held = [id(p) for group in made.param_groups for p in group["params"]]
            if sorted(held) != sorted(map(id, masters)):
                raise ValueError(
                    "outer_optimizer must make an optimizer of all parameters of the list that it "
                    "receives, and of no others"
                )
            _refuse_outer(made)
            return made
        _refuse_outer(given)
        copies = {id(part.parameter): part.master for _, part in self._parts()}
        held = [id(p) for group in given.param_groups for p in group["params"]]
        if sorted(held) != sorted(copies) or given.state:
            raise ValueError(
                "outer_optimizer must be a new optimizer of the very parameters of the model that "
                "require a gradient, or make one of a list of parameters"
            )
        for group in given.param_groups:
            group["params"] = [copies[id(p)] for p in group["params"]]
        return given

    def _agree(self) -> None:
        """Raises Mismatch, on all ranks alike, unless all have the same arguments.  Collective."""
        group = ringreduce_group(self._group)
        backend = backend_of(group, "cpu")
        if backend is None:
            raise ValueError("groups must be a group that takes CPU tensors")
        # A rank that joins a running group receives the state of the others (ringreduce.elastic).
        if extension().goes_on(backend) and not extension().is_connected(backend):
            return
        # The text of other objects may have their addresses.
        plain = (bool, int, float, str, tuple, type(None))
        outer = [
            {k: v if isinstance(v, plain) else type(v).__name__ for k, v in each.items()}
            for each in self.outer_optimizer.param_groups
        ]
        arguments = {
            "sync_every": self._every, "sync_seconds": self._seconds, "overlap": self._overlap,
            "fragments": len(self._fragments), "fragment_update_alpha": self._alpha,
            "codec": self._codec, "error_feedback": self._feedback,
            "outer_optimizer": (type(self.outer_optimizer).__name__, outer),
        }  # fmt: skip
        shapes = [
            (part.name, tuple(part.parameter.shape), part.parameter.dtype)
            for _, part in self._parts()
        ]
        elements = sum(part.parameter.numel() for _, part in self._parts())
        # All ranks, also those with other shards, compare what they must have alike.
        whole = group if self._site.first is None else ringreduce_group(None)
        for what, compared, mine, among in (
            ("arguments", arguments, arguments, whole),
            ("parameters", shapes, f"{len(shapes)} of {elements} elements", whole),
            ("shards", self._site.shard, self._site.shard, group),
        ):
            if odd := ranks_that_differ(zlib.crc32(repr(compared).encode()), among):
                raise Mismatch(
                    f"DiLoCo: of {dist.get_world_size(among)} ranks, {odd} have other {what} than "
                    f"the others; rank {dist.get_rank()} has {mine}"
                )
        bits = 0
        for messages in self._fragments:
            for message in messages:
                bits = zlib.crc32(message.values.numpy().data, bits)
        if ranks_that_differ(bits, group):
            first = self._site.first
            self.sync_from(dist.get_process_group_ranks(group)[0] if first is None else first)

    # ---- what a program sees

    @property
    def step(self) -> int:
        """Inner steps so far; of loops that end by it each rank makes as many."""
        return self._step

    @property
    def rounds(self) -> int:
        """Rounds that have begun so far, those of each fragment counted."""
        return self._rounds

    def count(self, tokens: int) -> None:
        """Tells what this rank has learned from: with `sync_seconds` it weighs by that.

        Call it before `optimizer.step()`, on all ranks or none.

        Args:
            tokens: tokens, samples or whatever all ranks count, of the batch.

        Raises:
            RuntimeError: there is no `sync_seconds`, so all ranks weigh alike.
            TypeError, ValueError: not a whole number from 0 on.
        """
        if self._seconds is None:
            raise RuntimeError("ranks weigh by tokens only in rounds by time (sync_seconds)")
        self._tokens += whole(tokens, "tokens")
        self._counts = True

    def __enter__(self) -> "DiLoCo":
        if self._hook is not None:
            raise RuntimeError("this DiLoCo is entered already")
        self._since = clock.now()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Applies the rounds under way.  If an exception ended the block they stay under way: other
        ranks apply them, so the next step, `sync` or `state_dict` does."""
        self._hook.remove()
        self._hook = None
        if kind is None:
            self._land(lambda flight: True)

    def sync(self) -> None:
        """A round of all fragments, now; collective.  All ranks have the same parameters then.

        Rounds under way are applied first.  `fragment_update_alpha` is 0 in this round.

        Raises:
            PeerLost, Timeout, Mismatch, Aborted: see `ringreduce.errors`.
        """
        self._land(lambda flight: True)
        for fragment in range(len(self._fragments)):
            self._begin(fragment)
        self._land(lambda flight: True, alpha=0.0)
        self._since = clock.now()

    def sync_from(self, rank: int, group: dist.ProcessGroup | None = None) -> None:
        """Gives all ranks the state of one; collective.

        For ranks of a new group, after a failure or with new processes: they receive the global
        copy, the outer optimizer's state, the counts and the rounds under way, and begin at the
        global parameters.  A process that joins by `ringreduce.elastic` receives them there.

        Args:
            rank: whose, in the default group.
            group: the ranks that are averaged from now on; None for the same as before.

        Raises:
            ValueError: `rank` is not in the group.
            PeerLost, Timeout, Mismatch, Aborted: see `ringreduce.errors`.
        """
        whole(rank, "rank")
        found = ringreduce_group(self._group if group is None else group)
        ranks = dist.get_process_group_ranks(found)
        if rank not in ranks:
            raise ValueError(f"rank {rank} has no state for ranks {ranks}: it is none of them")
        mine = dist.get_rank() == rank
        sent: list[Any] = [None]
        if mine:
            # After a failure those of the group before are dropped.
            with contextlib.suppress(dist.DistBackendError):
                for flight in list(self._flights):
                    self._await(flight)
            sent = [self.state_dict()]
            sent[0].pop("residuals")  # each rank has its own
            # pickle writes all of a storage for each view of it.
            sent[0]["parameters"] = {k: v.clone() for k, v in sent[0]["parameters"].items()}
        with noting_errors(found):
            dist.broadcast_object_list(sent, src=rank, group=found, device=torch.device("cpu"))
        if not mine:
            self.load_state_dict({**sent[0], "residuals": {}, "rank": None})
        if group is not None:
            self._group = group

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for torch.save; it waits for the rounds under way.

        With the model's and the inner optimizer's, and as many ranks, training goes on bit for bit
        as it would have.  Each rank needs its own for that; with another rank's its residuals are
        lost.  As those of torch, it refers to tensors that the next step changes.

        Returns:
            version, rank, shard, step, rounds, tokens, marks, the global values (`parameters`) and
            `residuals` by the names of parameters, the state of `outer_optimizer`, its class
            (`outer`), and `pending`: averages that are not applied yet.
        """
        for flight in list(self._flights):
            self._await(flight)
        return {
            "version": 1,
            "rank": dist.get_rank(),
            "shard": self._site.shard,
            "step": self._step,
            "rounds": self._rounds,
            "tokens": self._tokens if self._counts else None,
            "marks": list(self._marks),
            "parameters": {part.name: part.master.detach() for _, part in self._parts()},
            "residuals": {
                part.name: part.of(message.residual)
                for message, part in self._parts()
                if message.residual is not None
            },
            "outer": type(self.outer_optimizer).__name__,
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "pending": [(f.fragment, f.due, list(f.sums)) for f in self._flights],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` has told.

        If that was another rank, this one begins at the global parameters, since what the other
        has learned since its last round counts for the other: load the model before.

        Args:
            state_dict: of `state_dict`.

        Raises:
            ValueError: not such a state, or one of other parameters or fragments; nothing has
                changed then.
        """
        self._refuse(state_dict)
        values, parts = state_dict["parameters"], list(self._parts())
        self.outer_optimizer.load_state_dict(copy.deepcopy(state_dict["outer_optimizer"]))
        self._step, self._rounds = state_dict["step"], state_dict["rounds"]
        own = state_dict["rank"] == dist.get_rank()
        residuals = state_dict["residuals"] if own and self._codec and self._feedback else {}
        with torch.no_grad():
            for message, part in parts:
                part.master.copy_(values[part.name])
                if part is message.parts[0]:
                    message.residual = torch.zeros_like(message.values) if residuals else None
                if message.residual is not None and part.name in residuals:
                    part.of(message.residual).copy_(residuals[part.name])
                if not own:
                    part.local.copy_(part.master)
        self._site.reshard()
        self._counts = state_dict["tokens"] is not None
        if own:
            self._tokens = state_dict["tokens"] or 0
            self._marks = [tuple(mark) for mark in state_dict["marks"]]
        else:
            self._marks = [(self._step, self._tokens)] * len(self._fragments)
        self._flights = [
            _Flight(fragment, due, [average.clone() for average in sums])
            for fragment, due, sums in state_dict["pending"]
        ]
        self._since = clock.now()

    def _refuse(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless it is a state that this DiLoCo can go on from."""
        if not isinstance(state, Mapping) or state.get("version") != 1:
            raise ValueError("this is no state_dict of a DiLoCo that is known here")
        keys = {"rank", "step", "rounds", "tokens", "marks", "parameters", "residuals",
                "outer_optimizer", "pending"}  # fmt: skip
        if missing := sorted(keys - state.keys()):
            raise ValueError(f"the state has no {', '.join(missing)}: it is damaged")
        if state.get("shard", 0) != self._site.shard:
            raise ValueError(
                f"the state is of shard {state.get('shard', 0)} of the model, and this rank has "
                f"shard {self._site.shard}: load one of a rank with the same shard"
            )
        outer = type(self.outer_optimizer).__name__
        if state.get("outer", outer) != outer:
            raise ValueError(
                f"the state is of the outer optimizer {state['outer']}, and this DiLoCo has {outer}"
            )

        def kind(value: torch.Tensor) -> str:
            return f"shape {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"

        mine = {part.name: kind(part.master) for _, part in self._parts()}
        theirs = {name: kind(value) for name, value in state["parameters"].items()}
        lost = {name: kind(value) for name, value in state["residuals"].items()}
        for what, found in (("", theirs), ("the residual of ", mine | lost)):
            if odd := sorted(n for n in mine | found if mine.get(n) != found.get(n)):
                raise ValueError(
                    f"the state does not fit the model: {what}{odd[0]} has "
                    f"{found.get(odd[0], 'no values')} in the state and "
                    f"{mine.get(odd[0], 'no values')} in the model"
                )
        if len(state["marks"]) != len(self._fragments):
            raise ValueError(
                f"the state has {len(state['marks'])} fragments, and this DiLoCo "
                f"{len(self._fragments)}"
            )
        for fragment, _, sums in state["pending"]:
            fits = 0 <= fragment < len(self._fragments) and [
                kind(message.values) for message in self._fragments[fragment]
            ] == [kind(average) for average in sums]
            if not fits:
                raise ValueError("a round that is under way in the state does not fit the model")

    # ---- rounds

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        """Follows each step of the inner optimizer."""
        self._step += 1
        self._land(lambda flight: flight.due <= self._step)
        for fragment in self._due():
            # From when it was due: a slow site would begin later each time.
            interval = (self._seconds or 0.0) / len(self._fragments)
            self._since = max(self._since + interval, clock.now() - interval)
            self._begin(fragment)
            self._land(lambda flight: flight.due <= self._step)

    def _due(self) -> list[int]:
        """The fragments whose rounds begin now."""
        count = len(self._fragments)
        if self._seconds is None:
            phase = self._step % self._every
            return [
                f for f in range(count) if self._every * (f + 1) // count % self._every == phase
            ]
        over = clock.now() - self._since >= self._seconds / count
        # All ranks of a site must begin at one step, and their clocks are not one.
        return [self._rounds % count] if self._site.combined(over, dist.ReduceOp.MAX) else []

    @torch.no_grad()
    def _begin(self, fragment: int) -> None:
        """Starts a round of a fragment."""
        self._refuse_new_parameters()
        self._land(lambda flight: flight.fragment == fragment)
        group = ringreduce_group(self._group, call=True)
        flight = _Flight(fragment, self._step + self._overlap, [], group=group)
        steps, tokens = self._marks[fragment]
        weight = self._step - steps
        if self._counts:
            weight = self._tokens - tokens
            if len(set(self._site.ranks) & set(dist.get_process_group_ranks(group))) == 1:
                weight = self._site.combined(weight, dist.ReduceOp.SUM)  # it stands for the site
        name = f"ringreduce.DiLoCo begins round {self._rounds}"
        with record_function(name), self._dropping_rounds(group):
            if self._seconds is not None:
                weight = max(1, weight)  # a rank without tokens has moved nothing
                flight.weight = torch.tensor([weight], dtype=torch.float64, device="cpu")
                flight.works.append(start_average(flight.weight, group))
            for message in self._fragments[fragment]:
                moved = message.pseudo_gradient()
                if flight.weight is not None:
                    moved *= weight
                error = None
                if self._codec is None or moved.dtype != torch.float32:
                    flight.works.append(start_average(moved, group))
                else:
                    error = torch.empty_like(moved) if self._feedback else None
                    if message.residual is not None:
                        kept = message.residual
                        if self._feedback != 1:
                            kept = torch.mul(kept, self._feedback, out=error)
                        moved += kept
                    flight.works.append(self._start_coded(moved, error, group))
                flight.sums.append(moved)
                flight.errors.append(error)
            # Last, so that no average is later for it.
            size = dist.get_world_size(group)
            flight.proofs = torch.full((size,), -1, dtype=torch.int64, device="cpu")
            flight.proofs[dist.get_rank(group)] = self._proof(fragment)
            flight.works.append(
                dist.all_reduce(flight.proofs, dist.ReduceOp.MAX, group=group, async_op=True)
            )
        self._flights.append(flight)
        self._marks[fragment] = self._step, self._tokens
        self._rounds += 1

    def _proof(self, fragment: int) -> int:
        """A number that differs if a rank is in another round, or has other global values."""
        sums = [int(m.values.view(torch.int32).sum()) for m in self._fragments[fragment]]
        return zlib.crc32(repr((self._rounds, fragment, self._counts, sums)).encode())

    def _refuse_new_parameters(self) -> None:
        """Raises RuntimeError if inner steps change a parameter of the model that is not shared."""
        shared = {id(part.parameter) for _, part in self._parts()}
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if not (new := stepped - shared):
            return
        for name, p in parameters_of(self._model).items():
            if id(p) in new:
                raise RuntimeError(
                    f"{name} was not trained when the DiLoCo was made, so ranks do not share it: "
                    "make a new DiLoCo once it is"
                )

    def _start_coded(
        self, moved: torch.Tensor, error: torch.Tensor | None, group: dist.ProcessGroup
    ) -> dist.Work | SparseAverage:
        if self._share is not None:
            return SparseAverage(moved, error, self._share, group)
        work: dist.Work = extension().compressed_all_reduce(
            backend_of(group), moved, moved, codec=self._codec, op="avg", error=error
        )
        return work

    @contextlib.contextmanager
    def _dropping_rounds(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Around calls of rounds: after an error none of those under way is applied."""
        try:
            with noting_errors(group):
                yield
        except BaseException:
            self._flights.clear()
            raise

    def _await(self, flight: _Flight) -> None:
        """Waits for a round's averages.  Keeps what coding has lost, in units of what was sent."""
        if not flight.works:
            return
        assert flight.group is not None
        with self._dropping_rounds(flight.group):
            for work in flight.works:
                work.wait()
            assert flight.proofs is not None
            pairs = zip(
                dist.get_process_group_ranks(flight.group), flight.proofs.tolist(), strict=True
            )
            if odd := odd_ones({rank: proof for rank, proof in pairs if proof >= 0}):
                raise Mismatch(
                    f"DiLoCo: of {len(flight.proofs)} ranks, {odd} are in another round than the "
                    "others, or have other global parameters, or do not count tokens as they do; "
                    "the round was not applied.  sync_from gives all ranks the state of one"
                )
        flight.works = []
        for average, error, message in zip(
            flight.sums, flight.errors, self._fragments[flight.fragment], strict=True
        ):
            if flight.weight is not None:
                average /= flight.weight.item()
            message.residual = error

    @torch.no_grad()
    def _land(self, which: Callable[[_Flight], bool], alpha: float | None = None) -> None:
        """Applies those rounds, in the order in which they began.  Meanwhile the clock of rounds by
        time stands still, or rounds that take long would leave no time for steps."""
        began = clock.now()
        for flight in list(filter(which, self._flights)):
            self._await(flight)
            self._flights.remove(flight)
            with record_function(f"ringreduce.DiLoCo applies fragment {flight.fragment}"):
                self._apply(flight, self._alpha if alpha is None else alpha)
        self._since += clock.now() - began

    def _apply(self, flight: _Flight, keep: float) -> None:
        for average, message in zip(flight.sums, self._fragments[flight.fragment], strict=True):
            for part in message.parts:
                part.master.grad = part.of(average)
        self.outer_optimizer.step()
        for _, part in self._parts(flight.fragment):
            part.master.grad = None
            mixed = part.master.detach()
            if keep:
                mixed = part.local.to("cpu", mixed.dtype) * keep + mixed * (1 - keep)
            part.local.copy_(mixed)
        self._site.reshard()
