"""Makes Hugging Face Accelerate and Transformers use ringreduce on CPUs.

    import ringreduce.integrations.accelerate as rr
    rr.enable()

Both keep lists of backends.  Accelerate allows only gloo and mpi on CPUs, so `PartialState`, which
makes the process group of Accelerator and TrainingArguments, is changed where it chooses.
Transformers' command line allows only listed values of --ddp_backend, so the name is appended to
that list.  Scripts that stay as they are take RINGREDUCE_REPLACE=gloo instead (docs/frameworks.md).
"""

import dataclasses
import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch.distributed as dist

__all__ = ["disable", "enable"]

NAME = "ringreduce"
INSTEAD = (
    "Call ringreduce.init() before the program makes its Accelerator or TrainingArguments, and "
    "name no backend there"
)

_log = logging.getLogger("ringreduce")
_enabled = False
_choices: list[list[str]] = []  # those of Transformers that NAME was appended to


def enable() -> None:
    """Makes ringreduce the default on CPUs, and a backend that a program can name.

    Call it on every rank before the first Accelerator or TrainingArguments.  Rank 0 logs that
    ringreduce is used.  Other backends that a program names, and the default on GPUs, stay as they
    are.  Further calls do nothing.

    Raises:
        ImportError: Accelerate is not installed, or it or Transformers cannot be imported.
        RuntimeError: this version of Accelerate chooses its backend in another way.
    """
    global _enabled
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(
            "Accelerate is not installed; install it with `pip install 'ringreduce[accelerate]'`"
        )
    parser = None
    if importlib.util.find_spec("transformers") is not None:
        parser = importlib.import_module("transformers.hf_argparser")
    _change_state(importlib.import_module("accelerate.state"))
    if parser:
        _change_parser(parser)
    _enabled = True


def disable() -> None:
    """Undoes `enable` for process groups and parsers that are made from now on."""
    global _enabled
    _enabled = False
    while _choices:
        _choices.pop().remove(NAME)


def _change_state(module: ModuleType) -> None:
    """Wraps `PartialState._prepare_backend`, which has no public counterpart."""
    state: Any = getattr(module, "PartialState", None)
    prepare = getattr(state, "_prepare_backend", None)
    if getattr(prepare, "_ringreduce", False):
        return
    wanted = ["self", "cpu", "sagemaker_dp", "backend"]
    if prepare is None or list(inspect.signature(prepare).parameters) != wanted:
        raise RuntimeError(
            f"accelerate {sys.modules['accelerate'].__version__} does not choose its backend in "
            f"PartialState._prepare_backend({', '.join(wanted)}), which 1.1.0 and 1.15.0 do. "
            f"{INSTEAD}, or install accelerate 1.15.0"
        )

    @functools.wraps(prepare)
    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        chosen, kind = prepare(self, cpu, sagemaker_dp, backend)
        if not _enabled or backend not in (None, NAME) or kind != module.DistributedType.MULTI_CPU:
            return chosen, kind
        if dist.is_initialized():  # Accelerate keeps a group that exists
            return (NAME if dist.get_backend() == NAME else chosen), kind
        if module.get_cpu_distributed_information().rank == 0:
            # A warning, because Python prints nothing below that unless the program asks for it.
            _log.warning("Accelerate uses the backend ringreduce on CPUs")
        return NAME, kind

    prepare_backend._ringreduce = True  # type: ignore[attr-defined]
    state._prepare_backend = prepare_backend


def _change_parser(module: ModuleType) -> None:
    """Makes `HfArgumentParser` accept the name for every field `ddp_backend` that has choices."""
    parser: Any = module.HfArgumentParser
    make: Callable[..., None] = parser.__init__
    if getattr(make, "_ringreduce", False):
        return

    @functools.wraps(make)
    def init(self: Any, dataclass_types: Any = None, **options: Any) -> None:
        if not isinstance(dataclass_types, Iterable):
            dataclass_types = [] if dataclass_types is None else [dataclass_types]
        dataclass_types = list(dataclass_types)  # it may be an iterator
        for kind in dataclass_types:
            for field in dataclasses.fields(kind):
                choices = field.metadata.get("choices") if field.name == "ddp_backend" else None
                if _enabled and isinstance(choices, list) and NAME not in choices:
                    choices.append(NAME)
                    _choices.append(choices)
        make(self, dataclass_types, **options)

    init._ringreduce = True  # type: ignore[attr-defined]
    parser.__init__ = init
