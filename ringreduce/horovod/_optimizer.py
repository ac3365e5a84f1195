"""DistributedOptimizer: an optimizer whose steps use gradients of all ranks.

Each gradient is submitted by a hook as soon as backward has computed it, so that ranks reduce
gradients while they compute others.  `step` waits for them.
"""

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from ringreduce.horovod import _world
from ringreduce.horovod._compression import Compression, Compressor
from ringreduce.horovod._errors import HorovodInternalError
from ringreduce.horovod._functions import broadcast_object
from ringreduce.horovod._operations import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    reduction,
    sparse_allreduce_async,
    synchronize,
)
from ringreduce.horovod._world import ProcessSet, global_process_set

Parameter = torch.Tensor
Groups = int | Sequence[Sequence[torch.Tensor]] | None


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None
) -> dict[Parameter, str]:
    """The names of the optimizer's parameters.  Raises ValueError where they are not unique."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {
            p: f"noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
    given = list(named_parameters)
    if any(not isinstance(one, tuple) for one in given):
        raise ValueError(
            "named_parameters takes pairs (name, parameter), such as model.named_parameters()"
        )
    names = [name for name, _ in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"named_parameters has names more than once: {', '.join(twice)}")
    by_parameter = {p: name for name, p in given}
    if unnamed := [p for p in own if p not in by_parameter]:
        raise ValueError(
            f"named_parameters leaves out {len(unnamed)} of the optimizer's parameters, of shapes "
            f"{[tuple(p.shape) for p in unnamed[:5]]}"
        )
    return by_parameter


def _passes(given: int) -> int:
    passes = _world.whole(given, "backward_passes_per_step")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes


def _has_others() -> bool:
    """Whether there are other ranks, or may be later."""
    return _world.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"


class _Gradients:
    """The gradients of an optimizer's parameters, on their way through the ranks."""

    def __init__(
        self,
        names: dict[Parameter, str],
        parameters: Callable[[], list[Parameter]],
        compression: type[Compressor],
        passes: int,
        op: int,
        predivide: float,
        groups: Groups,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.passes = passes
        self._names = names
        self._compression = compression
        self._op = op
        self._are_own = op == Adasum  # _AdasumOptimizer reduces steps
        # An average is split over the factors before and after the sum.
        self._factors = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._left: dict[Parameter, int] = {}  # backward passes until a gradient is submitted
        self._waiting: dict[Any, Callable[[], None]] = {}  # by parameter, or number of a group
        self._residuals: dict[Parameter, torch.Tensor] = {}
        self._groups: list[list[Parameter]] = []
        self._group_of: dict[Parameter, int] = {}
        self._arrived: dict[int, int] = {}
        self._all = parameters
        own = weakref.ref(self)

        def hook(p: Parameter) -> None:
            # Parameters keep their hooks, and outlive the optimizer.
            if (gradients := own()) is not None:
                gradients._computed(p)

        self._hook = hook
        self._is_active = bool(process_set.included()) and _has_others()
        if not self._is_active:
            return
        self._adopt()
        if groups is not None:
            self._make_groups(groups)

    def _adopt(self) -> None:
        """Hooks parameters that have been added since, or that are trained only now."""
        for place, p in enumerate(self._all()):
            if not p.requires_grad or p in self._left:
                continue
            self._names.setdefault(p, f"noname.added.{place}")
            self._left[p] = self.passes
            p.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]

    def trained(self) -> list[Parameter]:
        """The parameters whose gradients are reduced."""
        self._adopt()
        return [p for p in self._left if p.requires_grad]

    def _make_groups(self, groups: Groups) -> None:
        """All ranks take rank 0's order of parameters."""
        by_name = {self._names[p]: p for p in self._left}
        order: list[str] = broadcast_object(
            list(by_name), (self._process_set.ranks or [0])[0], process_set=self._process_set
        )
        ordered = [by_name[name] for name in order]
        if isinstance(groups, int):
            count = min(groups, len(ordered))
            step, more = divmod(len(ordered), count)
            sizes = [step + (k < more) for k in range(count)]
            self._groups = [ordered[sum(sizes[:k]) :][: sizes[k]] for k in range(count)]
        else:
            known = set(ordered)
            self._groups = [[p for p in group if p in known] for group in groups or ()]
            listed = {p for group in self._groups for p in group}
            self._groups += [[p] for p in ordered if p not in listed]
            self._groups = [group for group in self._groups if group]
        for number, group in enumerate(self._groups):
            self._arrived[number] = 0
            for p in group:
                self._group_of[p] = number

    def restart(self) -> None:
        """Forgets what is under way."""
        self._waiting.clear()
        self._left = dict.fromkeys(self._left, self.passes)
        self._arrived = dict.fromkeys(self._arrived, 0)

    def are_under_way(self) -> bool:
        """Whether gradients were submitted since the last `synchronize`."""
        return bool(self._waiting)

    # ---- submitting

    def _computed(self, p: Parameter) -> None:
        """The hook: backward has added to the parameter's gradient."""
        if self._left[p] <= 0:
            raise AssertionError(
                f"the gradient of {self._names[p]!r} was computed more than {self.passes} times "
                "before step(); to add up more, set backward_passes_per_step"
            )
        self._left[p] -= 1
        if self._left[p] > 0 or self._are_own:
            return
        number = self._group_of.get(p)
        if number is None:
            self._submit(p)
            return
        self._arrived[number] += 1
        if self._arrived[number] == len(self._groups[number]):
            self._submit_group(number)

    def _gradient(self, p: Parameter) -> torch.Tensor:
        # Of a parameter that this rank did not use other ranks may have a gradient.
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad

    def _submit(self, p: Parameter) -> None:
        gradient = self._gradient(p)
        name = self._names[p]
        if gradient.is_sparse and not self._sparse_as_dense:
            total = sparse_allreduce_async(gradient, name, self._op, self._process_set)
            self._waiting[p] = lambda: self._replace(p, total())
            return
        dense = gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
        codec = getattr(self._compression, "codec", "")
        if codec and dense.dtype == torch.float32 and dense.device.type == "cpu":
            self._submit_coded(p, dense, codec)
            return
        self._send(p, [p], [dense])

    def _submit_coded(self, p: Parameter, dense: torch.Tensor, codec: str) -> None:
        """Adds the error of the last encoding, so that in time nothing is lost."""
        residual = self._residuals.get(p)
        if residual is None:
            residual = self._residuals[p] = torch.zeros_like(dense)
        else:
            dense.add_(residual)
        call = reduction(
            [dense], self._op, self._names[p], self._process_set, codec=codec, errors=[residual]
        )
        handle = call.start(in_place=True)
        self._waiting[p] = lambda: self._replace(p, synchronize(handle))

    def _submit_group(self, number: int) -> None:
        group = self._groups[number]
        gradients = [self._gradient(p) for p in group]
        if any(g.is_sparse for g in gradients) or bool(getattr(self._compression, "codec", "")):
            for p in group:  # what runs only by itself
                self._submit(p)
            return
        self._send(number, group, [g.contiguous() for g in gradients])

    def _send(
        self, key: Parameter | int, group: list[Parameter], gradients: list[torch.Tensor]
    ) -> None:
        compressed = [self._compression.compress(gradient) for gradient in gradients]
        before, after = self._factors
        handle = grouped_allreduce_async_(
            [sent for sent, _ in compressed],
            name=self._names[group[0]],
            op=self._op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self._process_set,
        )

        def finish() -> None:
            for p, output, (_, ctx) in zip(group, synchronize(handle), compressed, strict=True):
                self._replace(p, self._compression.decompress(output, ctx))

        self._waiting[key] = finish

    @staticmethod
    def _replace(p: Parameter, total: torch.Tensor) -> None:
        gradient = p.grad
        if gradient is total or gradient is None:
            return
        if gradient.is_sparse:
            p.grad = total if total.is_sparse else total.to_sparse()
        else:
            gradient.copy_(total)

    # ---- waiting

    @torch.no_grad()
    def synchronize(self) -> None:
        """Submits what is left, and waits for all."""
        if not self._is_active:
            return
        try:
            parameters = self.trained()
            for number in range(len(self._groups)):
                group = self._groups[number]
                if number not in self._waiting and group[0] not in self._waiting:
                    self._submit_group(number)
            for p in parameters:
                if p not in self._waiting and p not in self._group_of:
                    self._submit(p)
            failed: HorovodInternalError | None = None
            for finish in self._waiting.values():  # all, since they write to the gradients
                try:
                    finish()
                except HorovodInternalError as error:
                    failed = failed or error
            if failed is not None:
                raise failed
        finally:
            self.restart()


class _DistributedOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer adds to the class of an optimizer."""

    _gradients: _Gradients
    _synchronized: bool
    _should_synchronize: bool

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes add to a gradient before it is reduced."""
        return self._gradients.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes it, from the next step on."""
        self._gradients.passes = _passes(passes)
        self._gradients.restart()

    def synchronize(self) -> None:
        """Waits until all gradients are those of all ranks, as for clipping before `step`.

        Raises:
            HorovodInternalError: a rank was lost, or ranks have other parameters; names them.
        """
        self._gradients.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block `step` takes the gradients as they are, after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Waits for the gradients, unless in `skip_synchronize`, and takes a step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced once more",
                    stacklevel=2,
                )
            if closure is None or self._gradients.are_under_way():
                self.synchronize()
        self._synchronized = False
        if closure is None or not self._should_synchronize:
            return super().step(closure)

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._gradients.synchronize()
            return loss

        return super().step(reduced)

    # The class below has the hooks that torch puts around a step.
    step.hooked = True  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an optimizer of hvd.DistributedOptimizer cannot be pickled or copied; save its "
            "state_dict()"
        )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's; refused while gradients are being reduced."""
        if self._gradients.are_under_way():
            raise AssertionError(
                "zero_grad() while gradients are being reduced; call step() or synchronize() first"
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, state_dict: Any) -> None:
        """As the optimizer's; what is being reduced is forgotten."""
        self._gradients.restart()
        self._synchronized = False
        groups = self.param_groups
        super().load_state_dict(state_dict)
        # A scheduler that was made before this optimizer has these very groups.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups


class _AdasumOptimizer(_DistributedOptimizer):
    """Takes a step of each rank's own, and then adds up the ranks' steps by Adasum."""

    def synchronize(self) -> None:
        """Nothing: `step` does it all."""

    def skip_synchronize(self) -> Any:
        """Raises AssertionError."""
        raise AssertionError("an Adasum optimizer reduces its steps, so there is nothing to skip")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step of this rank, and the combination of all ranks' changes."""
        gradients = self._gradients
        before = {p: p.detach().clone() for p in gradients.trained()}
        loss = super(_DistributedOptimizer, self).step(closure)
        handles = []
        if not _has_others():
            return loss
        for p, start in before.items():
            change, ctx = gradients._compression.compress(p.detach() - start)
            name = gradients._names[p]
            handles.append((p, start, ctx, allreduce_async_(change, name=name, op=Adasum)))
        for p, start, ctx, handle in handles:
            p.copy_(start + gradients._compression.decompress(synchronize(handle), ctx))
        gradients.restart()
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class and state, whose steps use the gradients of all ranks.

    Args:
        optimizer: the optimizer to extend.  Use what is returned in its place.
        named_parameters: `model.named_parameters()`.  Names match gradients between ranks; without
            them places in the optimizer's parameter groups do.
        compression: how gradients travel.
        backward_passes_per_step: backward passes that add to a gradient before it is reduced.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average: the gradients are divided by it before the sum,
            and by the number of ranks over it afterwards.
        num_groups: deprecated: use `groups`.
        groups: how many groups of gradients to reduce together, or lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks whose gradients are reduced; on others nothing changes.

    Raises:
        ValueError, NotImplementedError: arguments that cannot be, or not together.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError("DistributedOptimizer takes hvd.Average, hvd.Sum or hvd.Adasum")
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups <= 0:
        raise ValueError(f"groups is a positive number or lists of parameters, not {groups}")
    if groups is not None and not isinstance(groups, int):
        listed = [p for group in groups for p in group]
        if not all(isinstance(p, torch.Tensor) for p in listed):
            raise ValueError("groups has something that is no tensor")
        if len({id(p) for p in listed}) != len(listed):
            raise ValueError("groups has a parameter twice")
    passes = _passes(backward_passes_per_step)
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum takes all ranks, not a process set")

    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is one of hvd.DistributedOptimizer already")
    base = type(optimizer)
    is_adasum = op == Adasum and _has_others()
    added = _AdasumOptimizer if is_adasum else _DistributedOptimizer
    cls = type(base.__name__, (added, base), {"__module__": __name__})
    wrapped = cast(Any, object.__new__(cls))
    wrapped.__dict__.update(optimizer.__dict__)
    # A scheduler that was made before puts its own step there, of the old object.
    wrapped.__dict__.pop("step", None)
    wrapped._synchronized = False
    wrapped._should_synchronize = True
    own: Callable[[], Any] = weakref.ref(wrapped)
    wrapped._gradients = _Gradients(
        _named(optimizer, named_parameters),
        lambda: [p for group in own().param_groups for p in group["params"]],
        compression,
        passes,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )
    return wrapped
