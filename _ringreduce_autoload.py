"""Tells torch.distributed of the backend "ringreduce"; `import torch` calls it by entry point.

A module beside the package and not in it: whatever goes wrong during `import torch` breaks torch
for its user, so nothing of ringreduce is imported before somebody makes a group with it.
"""

import logging
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
        import torch.distributed as dist

        if not dist.is_available() or hasattr(dist.Backend, "RINGREDUCE"):
            return
        dist.Backend.register_backend(
            "ringreduce", _create, extended_api=True, devices=["cpu", "cuda"]
        )
    except Exception as error:
        logging.getLogger("ringreduce").warning(
            'the backend "ringreduce" could not be registered with torch.distributed: %s: %s',
            type(error).__name__,
            error,
        )
