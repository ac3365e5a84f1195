"""Tells torch.distributed of the backend "ringreduce"; `import torch` calls it by entry point.

A module beside the package and not in it: whatever goes wrong during `import torch` breaks torch
for its user, so nothing of ringreduce is imported before somebody makes a group with it.  With
RINGREDUCE_ACCELERATE=1 it is imported after Accelerate, if that is imported at all.
"""

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _create(dist_backend_opts: Any, backend_options: Any) -> Any:
    """torch calls this once for each group with backend="ringreduce", on every rank of it."""
    from ringreduce import _backend

    return _backend.create(dist_backend_opts, backend_options)


def register() -> None:
    """Makes init_process_group("ringreduce") and new_group(backend="ringreduce") known to torch.

    Calls after the first do nothing.  Never raises: a torch without torch.distributed is left
    alone, and any other reason goes to the log.
    """
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or hasattr(dist.Backend, "RINGREDUCE"):
            return
        # Code that is not about GPUs takes the last device of a backend for its tensors.  Whether
        # ringreduce itself knows GPUs, and whether there is one, is found out when a group is made.
        devices = ["cpu", "cuda"] if torch.cuda._is_compiled() else ["cpu"]
        dist.Backend.register_backend("ringreduce", _create, extended_api=True, devices=devices)
        _read_variable()
    except Exception as error:
        logging.getLogger("ringreduce").warning(
            'the backend "ringreduce" could not be registered with torch.distributed: %s: %s',
            type(error).__name__,
            error,
        )


def _read_variable() -> None:
    text = os.environ.get("RINGREDUCE_ACCELERATE", "")
    if text == "1":
        when_imported("accelerate.state", _enable_accelerate)
    elif text not in ("", "0"):
        logging.getLogger("ringreduce").warning(
            "RINGREDUCE_ACCELERATE=%s is neither 0 nor 1; correct or unset it", text
        )


def _enable_accelerate(module: ModuleType) -> None:
    from ringreduce.integrations import accelerate

    accelerate.enable()


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls functions with modules after they have been imported."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.calls:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _call(self.calls[name], module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_hook = _ImportHook()


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Calls `call` with a module: now if it has been imported, else after each import of it.

    An exception of `call` goes to the log, so that it does not break an import.
    """
    if name in sys.modules:
        _call(call, sys.modules[name])
    _hook.calls[name] = call
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)


def _call(call: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        call(module)
    except Exception as error:
        logging.getLogger("ringreduce").warning(
            "%s will not use ringreduce: %s", module.__name__.partition(".")[0], error
        )
