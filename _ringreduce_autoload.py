"""Tells torch.distributed of the backend "ringreduce"; `import torch` calls it by entry point.

Reads RINGREDUCE_DEFAULT and RINGREDUCE_REPLACE too, because a framework names the backend, or names
none, long before a program imports ringreduce.

A module beside the package and not in it: whatever goes wrong during `import torch` breaks torch
for its user, so nothing of ringreduce is imported before somebody makes a group with it.
"""

import functools
import inspect
import logging
import os
from typing import Any

NAME = "ringreduce"

_log = logging.getLogger(NAME)
_chooses = False  # torch is wrapped: some groups are made by ringreduce that were not named so
_replaces_gloo = False
_told = False  # rank 0 said that gloo is replaced


def _create(dist_backend_opts: Any, backend_options: Any) -> Any:
    """torch calls this once for each group with backend="ringreduce", on every rank of it."""
    from ringreduce import _backend

    if _chooses and not isinstance(backend_options, _backend.extension().Options):
        backend_options = None  # of the backend that is replaced, or of one beside it
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
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        _read_variables()
    except Exception as error:
        _log.warning(
            'the backend "ringreduce" could not be registered with torch.distributed: %s: %s',
            type(error).__name__,
            error,
        )


def set_default(devices: str) -> None:
    """Makes ringreduce the backend of groups that are made without a name, from now on.

    These are init_process_group() and what calls it so: DeviceMesh, Lightning, torchtitan.  Call it
    on every rank before the first group; RINGREDUCE_DEFAULT in the environment does the same.

    Args:
        devices: "cpu" for machines without GPUs, "cuda" for those with, "cpu,cuda" for all.  On
            others such a group is torch's own choice.

    Raises:
        ValueError: another device, or "cuda" and a torch without it.
        RuntimeError: this torch makes groups in another way.
    """
    import torch
    import torch.distributed as dist

    wanted = str(devices).split(",")
    if not set(wanted) <= {"cpu", "cuda"}:
        raise ValueError(f"{devices!r} must be 'cpu', 'cuda' or 'cpu,cuda'")
    if "cuda" in wanted and not torch.cuda._is_compiled():
        raise ValueError(f"{devices!r} has cuda, which torch {torch.__version__} was built without")
    _wrap_torch()
    for device in wanted:
        dist.Backend.default_device_backend_map[device] = NAME


def _replace_gloo() -> None:
    """Makes "gloo" mean ringreduce wherever a program names it, or torch chooses it."""
    global _replaces_gloo
    set_default("cpu")
    _replaces_gloo = True


def _read_variables() -> None:
    """Does what the variables say.  If that cannot be done, init_process_group raises."""
    default = os.environ.get("RINGREDUCE_DEFAULT", "")
    replace = os.environ.get("RINGREDUCE_REPLACE", "")
    problems = []
    try:
        if default:
            set_default(default)
    except ValueError as error:
        problems.append(f"RINGREDUCE_DEFAULT={error}")
    except Exception as error:  # another torch may lack whatever it needs
        problems.append(f"RINGREDUCE_DEFAULT={default} cannot be followed: {error}")
    try:
        if replace == "gloo":
            _replace_gloo()
        elif replace:
            problems.append(f"RINGREDUCE_REPLACE={replace!r} must be 'gloo'")
    except Exception as error:
        problems.append(f"RINGREDUCE_REPLACE={replace} cannot be followed: {error}")
    if problems:
        _refuse_groups(".  ".join(problems) + ".  Correct or unset it for all ranks")


def _refuse_groups(reason: str) -> None:
    """Puts a function that raises in the place of init_process_group.

    To go on with gloo would be the silence that the variables are there to end.
    """
    import torch.distributed as dist
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.distributed_c10d as c10d

    @functools.wraps(dist.init_process_group)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        raise ValueError(reason)

    for module in (dist, c10d, device_mesh):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _wrap_torch() -> None:
    """Wraps the function with which torch makes every group; it has no public counterpart."""
    global _chooses
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    make: Any = getattr(c10d, "_new_process_group_helper", None)
    if getattr(make, "_ringreduce", False):
        return
    signature = inspect.signature(make) if make else None
    if signature is None or not {"group_rank", "backend"} <= set(signature.parameters):
        raise RuntimeError(
            f"torch {torch.__version__} does not make groups by "
            "_new_process_group_helper(group_rank, backend, ...), as torch 2.11 to 2.15 do.  Name "
            "the backend ringreduce where the group is made"
        )

    @functools.wraps(make)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        put = _name_backend(call.arguments)
        try:
            return make(*call.args, **call.kwargs)
        except dist.DistBackendError as error:
            if put and type(error).__name__ in ("Timeout", "Error"):  # or the store is gone
                _log.error(
                    "the ranks that did not join may wait in another backend: this group is "
                    "ringreduce's by RINGREDUCE_DEFAULT, RINGREDUCE_REPLACE or set_default.  "
                    "Set them for all ranks"
                )
            raise

    new_group._ringreduce = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = new_group
    _chooses = True


def _name_backend(arguments: dict[str, Any]) -> bool:
    """Writes the backend that a group gets into the arguments that torch makes it with.

    Returns whether ringreduce was put there, in place of another name or of none.
    """
    global _told
    import torch.distributed as dist

    backend = str(arguments["backend"]).lower()
    put = False
    pairs = [pair.rpartition(":") for pair in backend.split(",")]
    default = dist.Backend.default_device_backend_map
    if backend == dist.Backend.UNDEFINED:
        if default.get(_device()) == NAME:
            # Else torch would call the group's backend "undefined".
            arguments["backend"] = dist.Backend(NAME)
            put = True
    elif _replaces_gloo and any(name == "gloo" for *_, name in pairs):
        named = [device + colon + (NAME if n == "gloo" else n) for device, colon, n in pairs]
        arguments["backend"] = dist.Backend(",".join(named))
        put = True
        rank = dist.get_rank() if dist.is_initialized() else arguments["group_rank"]
        if rank == 0 and not _told:
            _told = True
            # A warning, because Python prints nothing below that unless the program asks for it.
            _log.warning("groups of the backend gloo are made by ringreduce (RINGREDUCE_REPLACE)")
    if NAME in str(arguments["backend"]) and default.get("cuda") == NAME and _device() == "cuda":
        _require_cuda()
    return put


def _device() -> str:
    """The device of a group that is made without a name."""
    import torch

    found = torch.accelerator.current_accelerator()
    return found.type if found and torch.accelerator.is_available() else "cpu"


def _require_cuda() -> None:
    """Raises RuntimeError if this ringreduce was built without CUDA."""
    from ringreduce import _backend

    if not _backend.extension().cuda_build():
        raise RuntimeError(
            "ringreduce is the default for GPUs (RINGREDUCE_DEFAULT or set_default), but this "
            "ringreduce was built without CUDA: `python -m ringreduce.config` says why"
        )
