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
from collections.abc import Callable
from typing import Any

NAME = "ringreduce"
GLOO = "gloo"

_log = logging.getLogger(NAME)
_chooses = False  # torch is wrapped: some groups are made by ringreduce that were not named so
_replaces_gloo = False
_told = False  # rank 0 said that gloo is replaced


class _Default(str):
    """The name that a framework finds as torch's default for CPUs and passes on.

    By its type a group that a framework names so is told from one that a program names ringreduce.
    """


def _create(dist_backend_opts: Any, backend_options: Any) -> Any:
    """torch calls this once for each group with backend="ringreduce", on every rank of it."""
    from ringreduce.core import backend as _backend

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
    default = dist.Backend.default_device_backend_map
    for device in wanted:
        found = default.get(device)
        is_gloo = device == "cpu" and (found == GLOO or isinstance(found, _Default))
        default[device] = _Default(NAME) if is_gloo else NAME


def replaces(group: Any = None) -> str | None:
    """The backend in whose place ringreduce made a group, and whose name torch shows.

    RINGREDUCE_REPLACE, RINGREDUCE_DEFAULT and `set_default` put ringreduce where torch would make a
    group of gloo.  Programs that read the name then find the one that they know: `get_backend`,
    `get_backend_config` and `group.name()` say "gloo".  The group's backend,
    `group._get_backend(device)`, is ringreduce's and says so.

    Args:
        group: None for the default group.

    Returns:
        "gloo"; None for a group that is named ringreduce, and for one of another backend.

    Raises:
        RuntimeError: there is no default group.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if group is None:
        if not dist.is_initialized():
            raise RuntimeError("call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    shown = c10d._world.pg_map.get(group)
    if shown is None:
        return None
    from ringreduce.core import backend as _backend

    of_gloo = [device for device, name in _pairs(str(shown[0])) if name == GLOO]
    own = any(_backend.backend_of(group, *([d] if d else [])) is not None for d in of_gloo)
    return GLOO if own else None


def _replace_gloo() -> None:
    """Makes "gloo" mean ringreduce wherever a program names it, or torch chooses it."""
    global _replaces_gloo
    _wrap_torch()
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
    """Wraps the functions with which torch makes and names groups, none of which is public."""
    global _chooses
    import torch
    import torch.distributed as dist
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.distributed_c10d as c10d

    make: Any = getattr(c10d, "_new_process_group_helper", None)
    if getattr(make, "_ringreduce", False):
        return
    signature = inspect.signature(make) if make else None
    with_tag: Any = getattr(c10d, "_new_group_with_tag", None)
    names = ("name", "_get_backend_name")
    if (
        signature is None
        or not {"group_rank", "backend"} <= set(signature.parameters)
        or with_tag is None
        or "backend" not in inspect.signature(with_tag).parameters
        or not isinstance(dist.Backend.default_device_backend_map, dict)
        or not all(hasattr(dist.ProcessGroup, name) for name in names)
    ):
        raise RuntimeError(
            f"torch {torch.__version__} does not make groups by "
            "_new_process_group_helper(group_rank, backend, ...), as torch 2.11 to 2.15 do.  Name "
            "the backend ringreduce where the group is made"
        )

    @functools.wraps(make)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        shown = _name_backend(call.arguments)
        try:
            made = make(*call.args, **call.kwargs)
        except dist.DistBackendError as error:
            if shown and type(error).__name__ in ("Timeout", "Error"):  # or the store is gone
                _log.error(
                    "the ranks that did not join may wait in another backend: this group is "
                    "ringreduce's by RINGREDUCE_DEFAULT, RINGREDUCE_REPLACE or set_default.  "
                    "Set them for all ranks"
                )
            raise
        group = made[0]
        if shown and group in c10d._world.pg_map:  # and not one that this rank is not in
            c10d._world.pg_map[group] = (shown, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(shown)))
        return made

    new_group._ringreduce = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = new_group
    c10d._new_group_with_tag = _with_backend(with_tag, _of_new_group)
    init = _with_backend(
        c10d.init_process_group, lambda name: None if isinstance(name, _Default) else name
    )
    for module in (dist, c10d, device_mesh):
        module.init_process_group = init  # type: ignore[attr-defined]
    for name in names:
        setattr(dist.ProcessGroup, name, _shown_name(getattr(dist.ProcessGroup, name)))
    _chooses = True


def _with_backend(function: Any, change: Callable[[Any], Any]) -> Any:
    """A function of torch whose argument `backend` is changed before the call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.arguments["backend"] = change(call.arguments.get("backend"))
        return function(*call.args, **call.kwargs)

    return changed


def _of_new_group(backend: Any) -> Any:
    """The backend that a new group is asked for.

    Without a name it is that of the default group, whose name torch takes, or a program passes on.
    So if ringreduce made the default group in gloo's place, "gloo" means ringreduce.
    """
    import torch.distributed as dist

    named_so = not backend or str(backend).lower() == GLOO
    inherits = named_so and not _replaces_gloo and dist.is_initialized() and replaces()
    return dist.Backend.UNDEFINED if inherits or isinstance(backend, _Default) else backend


def _shown_name(real: Any) -> Any:
    """A method of ProcessGroup that gives the name of its backend, as `replaces` says."""

    @functools.wraps(real)
    def name(group: Any) -> str:
        found = str(real(group))
        plugin = found in ("custom", NAME)  # the former is what torch calls every plugin
        return (replaces(group) if plugin else None) or found

    return name


def _pairs(backend: str) -> list[tuple[str, str]]:
    """("cpu", "gloo"), ("cuda", "nccl") of "cpu:gloo,cuda:nccl"; ("", "gloo") of "gloo"."""
    pairs = [pair.rpartition(":") for pair in backend.lower().split(",")]
    return [(device, name) for device, _, name in pairs]


def _name_backend(arguments: dict[str, Any]) -> str | None:
    """Writes the backend that a group gets into the arguments that torch makes it with.

    Returns the name that torch is to show for it if ringreduce was put there, in place of another
    name or of none.
    """
    global _told
    import torch.distributed as dist

    backend = str(arguments["backend"]).lower()
    pairs = _pairs(backend)
    default = dist.Backend.default_device_backend_map
    shown = None
    if backend == dist.Backend.UNDEFINED:
        device = _device()
        chosen = default.get(device)
        if chosen == NAME or (_replaces_gloo and device == "cpu" and chosen == GLOO):
            # Else torch would call the group's backend "undefined".
            arguments["backend"] = dist.Backend(NAME)
            shown = GLOO if device == "cpu" else NAME
    elif _replaces_gloo and any(name == GLOO for _, name in pairs):
        named = [(device, NAME if name == GLOO else name) for device, name in pairs]
        arguments["backend"] = dist.Backend(",".join(":".join(filter(None, p)) for p in named))
        shown = backend
    if _replaces_gloo and shown and shown != NAME and not _told:
        rank = dist.get_rank() if dist.is_initialized() else arguments["group_rank"]
        if rank == 0:
            _told = True
            # A warning, because Python prints nothing below that unless the program asks for it.
            _log.warning("groups of the backend gloo are made by ringreduce (RINGREDUCE_REPLACE)")
    if NAME in str(arguments["backend"]) and default.get("cuda") == NAME and _device() == "cuda":
        _require_cuda()
    return shown


def _device() -> str:
    """The device of a group that is made without a name."""
    import torch

    found = torch.accelerator.current_accelerator()
    return found.type if found and torch.accelerator.is_available() else "cpu"


def _require_cuda() -> None:
    """Raises RuntimeError if this ringreduce was built without CUDA."""
    from ringreduce.core import backend as _backend

    if not _backend.extension().cuda_build():
        raise RuntimeError(
            "ringreduce is the default for GPUs (RINGREDUCE_DEFAULT or set_default), but this "
            "ringreduce was built without CUDA: `python -m ringreduce.config` says why"
        )
