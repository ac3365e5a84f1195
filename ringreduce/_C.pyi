# The extension; csrc/torch/bindings.cc says what each function does.
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket, Store
from torch.futures import Future

def create_backend(
    store: Store,
    rank: int,
    size: int,
    timeout: float,  # seconds
    name: str,
    global_ranks: list[int],
    algorithm: str | None = None,
    slot_bytes: int | None = None,
    slots: int | None = None,
    stall_seconds: float | None = None,
) -> Any: ...
def has_failed(backend: Any) -> bool: ...
def shutdown_all() -> None: ...
def staging_bytes(backend: Any) -> int: ...
def register_comm_hook(reducer: Any, backend: Any) -> None: ...
def average_bucket(backend: Any, bucket: GradBucket, future: Future[Tensor]) -> None: ...
def instruction_set() -> str: ...
def set_error_types(
    peer_lost: type, timeout: type, mismatch: type, aborted: type, other: type
) -> None: ...
