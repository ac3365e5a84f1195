"""The state of a DDP hook that compresses gradients: settings, residuals, checkpoints."""

import fnmatch
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringreduce.core.backend import (
    backend_of,
    devices_text,
    extension,
    noting_errors,
    ringreduce_group,
)

# Below this many elements a parameter's gradient is not worth coding.
SMALL = 1024
# What can be coded.
CODED = (torch.float32, torch.float16, torch.bfloat16)

Exact = str | Iterable[str] | Callable[[str, torch.nn.Parameter], bool]


def _is_exact_by_default(parameter: torch.nn.Parameter) -> bool:
    """Norms, biases and what is small: few bytes, and sensitive."""
    return parameter.dim() < 2 or parameter.numel() < SMALL


def parameters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP averages, or would.

    Returns:
        By the names that they have without DDP and torch.compile.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        ignored = set(model.parameters_to_ignore)
        model = model.module
    else:
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _choices(parameters: dict[str, torch.nn.Parameter], exact: Exact | None) -> list[bool]:
    """Of each parameter, whether its gradient travels exactly."""
    if callable(exact):
        return [bool(exact(name, parameter)) for name, parameter in parameters.items()]
    patterns = [] if exact is None else [exact] if isinstance(exact, str) else list(exact)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                "exact takes patterns of parameter names, or a function of a name and a "
                f"parameter, not {type(pattern).__name__}"
            )
        if not fnmatch.filter(parameters, pattern):
            raise ValueError(f'no parameter has a name like "{pattern}" (exact)')
    return [
        _is_exact_by_default(parameter)
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        for name, parameter in parameters.items()
    ]


def _residuals_in(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The residuals of a state dict, or ValueError if they can be nobody's."""
    residuals = state_dict["residuals"]
    if not isinstance(residuals, Mapping):
        raise ValueError(f"the state's residuals are a {type(residuals).__name__}, not by name")
    for name, value in residuals.items():
        if (
            not isinstance(value, torch.Tensor)
            or value.layout != torch.strided
            or value.is_meta
            or not value.is_floating_point()
        ):
            raise ValueError(f"the state's residual of {name} is no dense tensor of numbers")
        if not value.isfinite().all():
            raise ValueError(f"the state's residual of {name} has an infinity or a NaN in it")
    return dict(residuals)


def whole(value: object, name: str, least: int = 0, below: int = 1 << 64) -> int:
    """Checks an argument that is a whole number.

    Args:
        value: what was given.
        name: the argument's.
        least: the smallest that can be.
        below: the smallest that is too large.

    Returns:
        The value.

    Raises:
        TypeError, ValueError: it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if not least <= value < below:
        end = "" if value < least else f" and below {below}"
        raise ValueError(f"{name} must be at least {least}{end}, not {value}")
    return value


def number(value: object, name: str) -> float:
    """Checks an argument that is a number.

    Args:
        value: what was given.
        name: the argument's.

    Returns:
        The value.

    Raises:
        TypeError: it is none.
        ValueError: it is too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is a number that a float holds, not {value}") from None


def _laid_out(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 as DDP lays out the parameter's gradient in its bucket; the same, as it lies there.

    That is with the parameter's own strides if these leave no gaps (channels_last), else in order.
    """
    values = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
    if values.stride() != parameter.stride():
        values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    return values, values.as_strided((values.numel(),), (1,))


def _loss_scale(scale: object) -> float:
    found = number(scale, "a loss scale")
    if not 0 < found < float("inf"):
        raise ValueError(f"a loss scale is a number above 0, not {found}")
    return found


class CompressionState:
    """What a compressing hook keeps from step to step; the same settings on all ranks.

    `ringreduce.register_comm_hook(ddp_model, codec="int8")` makes one and returns it. By hand:
    `ddp_model.register_comm_hook(state, ringreduce.hooks.compressed)`.

    The gradients of float32, float16 and bfloat16 parameters are coded, the latter two as float32
    and rounded once at the end; those of other types, and sparse ones, travel exactly.  Which ones
    travel exactly besides is chosen when the state is made.  Gradients of a GPU are coded in the
    host's memory, where the residuals are too; pinned memory for the buckets under way is taken
    besides.

    Args:
        model: the model, or its DistributedDataParallel.
        codec: "bfloat16", "float16", "int8", "int4", or "auto": exact or int8, whichever makes
            steps shorter, which some steps of each find out.
        error_feedback: what coding loses of a gradient is added to the next one.  Costs the memory
            that `residual_bytes` tells: two float32 for each coded element.
        start_after: this many steps are exact before the first coded one.
        exact: parameters whose gradients are never coded, besides those of fewer than two
            dimensions and those of fewer than 1,024 elements: patterns of names such as "head.*".
            Or a function of name and parameter that decides alone.
        schedule: "owner" (each slice is added up by one rank, and coded once more), "ring" (coded
            again at each hop) or "auto".
        stochastic: rounds up or down at random, so that the mean is right.
        seed: of these random numbers.
        process_group: for `hooks.compressed`: the ranks to average over; None for those of the
            DistributedDataParallel, or else the default group.  If it is not ringreduce's, a
            ringreduce group over the same ranks is made.

    Raises:
        TypeError, ValueError: no such codec or schedule, a pattern that no name matches, a number
            out of range, a model without parameters to average, or with some on a device that
            this build does not know.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        codec: str = "int8",
        error_feedback: bool = True,
        start_after: int = 0,
        exact: Exact | None = None,
        schedule: str = "auto",
        stochastic: bool = False,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"a CompressionState is made of a model, not {type(model).__name__}")
        for name, text in (("codec", codec), ("schedule", schedule)):
            if not isinstance(text, str):
                raise TypeError(f"{name} is a name, not {text!r}")
        parameters = parameters_of(model)
        if not parameters:
            raise ValueError("the model has no parameters whose gradients are averaged")
        for name, parameter in parameters.items():
            kind = parameter.device.type
            if kind != "cpu" and not (kind == "cuda" and extension().cuda_build()):
                raise ValueError(
                    f"this ringreduce averages gradients on {devices_text()}, and {name} is on "
                    f"{parameter.device}"
                )
        if process_group is None and isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        self.process_group = process_group
        self.codec = codec
        self._feedback = bool(error_feedback)
        self._parameters = parameters
        self._exact = [
            chosen or parameter.dtype not in CODED
            for chosen, parameter in zip(
                _choices(parameters, exact), parameters.values(), strict=True
            )
        ]
        self._loss_scale = 1.0
        self._settings = {
            "codec": codec,
            "feedback": self._feedback,
            "start_after": whole(start_after, "start_after"),
            "schedule": schedule,
            "stochastic": bool(stochastic),
            "seed": whole(seed, "seed"),
        }
        self._state = extension().HookState(
            parameters=list(parameters.values()),
            exact=self._exact,
            names=[zlib.crc32(name.encode()) for name in parameters],
            **self._settings,
        )

    @property
    def steps(self) -> int:
        """Backward passes that have been averaged so far."""
        count: int = self._state.steps()
        return count

    @property
    def choice(self) -> str:
        """The codec in use; with "auto" also "exact", or "measuring" while that is found out."""
        name: str = self._state.choice()
        return name

    @property
    def why(self) -> str:
        """What `choice` rests on, in words."""
        text: str = self._state.why()
        return text

    def exact_parameters(self) -> list[str]:
        """Which parameters' gradients are never coded.

        Returns:
            Their names in the model, without DDP's "module.".
        """
        return [name for name, exact in zip(self._parameters, self._exact, strict=True) if exact]

    def residual_bytes(self) -> int:
        """The memory that error feedback holds on this rank.

        Returns:
            Bytes; 0 before the first coded step.
        """
        size: int = self._state.residual_bytes()
        return size

    def residual(self, name: str) -> torch.Tensor | None:
        """What coding has lost of a parameter's gradient so far.

        Args:
            name: the parameter's name in the model, without DDP's "module.".

        Returns:
            A copy: a float32 tensor of the parameter's shape, on its device.  None if there is
            none.

        Raises:
            KeyError: the model has no such parameter, or its gradients are not averaged.
        """
        names = list(self._parameters)
        if name not in names:
            raise KeyError(name)
        flat: torch.Tensor | None = self._state.residual(names.index(name))
        if flat is None:
            return None
        values, memory = _laid_out(self._parameters[name])
        memory.copy_(flat)
        return values

    def _set_residual(self, number: int, values: torch.Tensor | None) -> None:
        memory = None
        if values is not None:
            laid_out, memory = _laid_out(list(self._parameters.values())[number])
            laid_out.copy_(values)
        self._state.set_residual(number, memory)

    def set_loss_scale(self, scale: float) -> None:
        """Tells by what the loss is multiplied: `state.set_loss_scale(scaler.get_scale())`.

        Call it on all ranks before each backward if a GradScaler is used.  Residuals are in units
        of scaled gradients, so when the scale changes they are multiplied by as much.

        Args:
            scale: a finite number above 0.

        Raises:
            TypeError, ValueError: it is not.
        """
        scale = _loss_scale(scale)
        if scale != self._loss_scale:
            self._state.scale_residuals(scale / self._loss_scale)
            self._loss_scale = scale

    def average_residuals(self) -> None:
        """Gives all ranks the mean of their residuals.  Collective, between steps.

        The average of gradients loses nothing by it, and one rank's `state_dict` then serves all
        ranks, however many there will be.

        Raises:
            PeerLost, Timeout, Mismatch, Aborted: see `ringreduce.errors`.
        """
        group = ringreduce_group(self.process_group, call=True)
        for number, (name, parameter) in enumerate(self._parameters.items()):
            if self._exact[number]:
                continue
            residual = self.residual(name)
            if residual is None:
                residual = torch.zeros(
                    parameter.shape, dtype=torch.float32, device=parameter.device
                )
            with noting_errors(group):
                dist.all_reduce(residual, op=dist.ReduceOp.AVG, group=group)
            self._set_residual(number, residual)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and counts, for torch.save.  Another rank's are others.

        With it, and with as many ranks and the same settings, training goes on bit for bit as it
        would have, whatever DDP's buckets are (but with stochastic rounding only if they are the
        same).  "auto" measures anew when it is loaded.

        Returns:
            version, steps (averaged backward passes), loss_scale, and residuals: float32 tensors,
            as `residual` gives them, by the names of parameters.
        """
        residuals = {name: self.residual(name) for name in self._parameters}
        return {
            "version": 1,
            "steps": self.steps,
            "loss_scale": self._loss_scale,
            "residuals": {name: value for name, value in residuals.items() if value is not None},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` has told, of this run or of one with another world size.

        Residuals of parameters that are exact here are left out, all of them without
        error_feedback, and parameters without one start at 0.  All ranks must load a state of as
        many steps.

        Args:
            state_dict: of `state_dict`; its tensors may be on any device.

        Raises:
            ValueError: not such a state, or one of a model with other parameters; nothing has
                changed then.
        """
        if not isinstance(state_dict, Mapping) or state_dict.get("version") != 1:
            raise ValueError("this is no state_dict of a CompressionState that is known here")
        missing = [key for key in ("steps", "loss_scale", "residuals") if key not in state_dict]
        if missing:
            raise ValueError(f"this state_dict of a CompressionState has no {' or '.join(missing)}")
        residuals = _residuals_in(state_dict)
        for name, value in residuals.items():
            if name not in self._parameters:
                raise ValueError(f"the state has a residual of {name}, which the model has not")
            if value.shape != self._parameters[name].shape:
                raise ValueError(
                    f"the state has a residual of {name} of shape {tuple(value.shape)}, and the "
                    f"parameter has {tuple(self._parameters[name].shape)}"
                )
        try:
            steps = whole(state_dict["steps"], "steps")
            scale = _loss_scale(state_dict["loss_scale"])
        except TypeError as error:
            raise ValueError(f"this is no state_dict of a CompressionState: {error}") from error
        for number, name in enumerate(self._parameters):
            if not self._exact[number]:
                self._set_residual(number, residuals.get(name) if self._feedback else None)
        self._loss_scale = scale
        self._state.set_steps(steps)

    def _require_parameters_of(self, model: DistributedDataParallel) -> None:
        """Raises ValueError if the state was made for another model's parameters."""
        own = {id(parameter) for parameter in self._parameters.values()}
        strange = [
            name for name, parameter in parameters_of(model).items() if id(parameter) not in own
        ]
        if strange:
            shown = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
            raise ValueError(
                f"this CompressionState was made of another model: of this one it does not have "
                f"{shown} ({len(strange)} in all); make a state of this model, and load the "
                "other's state_dict if it is to go on"
            )

    def _agree(self, group: dist.ProcessGroup) -> None:
        """Raises Mismatch, on all ranks, unless all have the same settings.  Collective."""
        backend = backend_of(group)
        # A rank that joins a running group (ringreduce.elastic) has none yet; it agrees with the
        # others in its first step.
        if extension().is_connected(backend) or not extension().goes_on(backend):
            self._state.agree(backend)

    def _take_counts(self, steps: int, loss_scale: float) -> None:
        """Goes on with another rank's counts, and with the residuals of this one."""
        self.set_loss_scale(loss_scale)
        self._state.set_steps(steps)
