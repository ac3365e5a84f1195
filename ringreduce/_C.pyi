# The extension; csrc/torch/bindings.cc says what each function does.
from collections.abc import Callable, Sequence
from typing import Any, type_check_only

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, ProcessGroup, Store, Work

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
    on_loss: str | None = None,
    min_ranks: int | None = None,
    stall_seconds: float | None = None,
    order: str | None = None,
    *,
    gpu_facts: str,  # JSON, for the store
    make_inner: Callable[[Store, int, int], Any],  # of store, rank and world size
    count_ranks: Callable[[int], int],  # of world size
    of_ranks: int = 0,  # of how many these are some; 0: they are all
    connect: str = "now",  # "reconfigure", "join"
    cancel: Cancel | None = None,
) -> Any: ...
def store_of(backend: Any) -> Store: ...  # the group's
def check(backend: Any) -> None: ...  # the group's Error, if it has failed
def commit(backend: Any) -> None: ...
def found_inf(backend: Any, device: torch.device) -> Tensor: ...
def is_idle(backend: Any) -> bool: ...
def has_failed(backend: Any) -> bool: ...
def has_raised(backend: Any) -> bool: ...
def shutdown_all() -> None: ...
def staging_bytes(backend: Any) -> int: ...
def gpu_bytes(backend: Any) -> int: ...
def routes(backend: Any) -> list[str]: ...
def live_ranks(backend: Any) -> list[int]: ...
def register_comm_hook(reducer: Any, backend: Any, group: ProcessGroup) -> Callable[[], None]: ...
def average_bucket(backend: Any, bucket: GradBucket, group: ProcessGroup) -> Work: ...
def compressed_all_reduce(
    backend: Any,
    input: Tensor,
    output: Tensor,
    *,
    codec: str,
    op: str = "sum",
    schedule: str = "auto",
    stochastic: bool = False,
    seed: int = 0,
    error: Tensor | None = None,
    async_op: bool = True,
) -> Work: ...

@type_check_only
class _Bound(type): ...  # the metaclass of what pybind11 binds

class Cancel(metaclass=_Bound):  # of an attempt to make a group
    def __init__(self, what: str) -> None: ...
    def end(self) -> None: ...  # from any thread
    def check(self) -> None: ...  # Aborted, if it was ended

class HookState(metaclass=_Bound):  # parameters are known by their place in the list
    def __init__(
        self,
        parameters: Sequence[Tensor],
        exact: Sequence[bool],
        names: Sequence[int],  # hashes
        codec: str,
        feedback: bool,
        start_after: int,
        schedule: str,
        stochastic: bool,
        seed: int,
    ) -> None: ...
    def agree(self, backend: Any) -> None: ...
    def register(self, reducer: Any, backend: Any, group: ProcessGroup) -> None: ...
    def average_bucket(self, backend: Any, bucket: GradBucket, group: ProcessGroup) -> Work: ...
    def residual(self, parameter: int) -> Tensor | None: ...
    def set_residual(self, parameter: int, values: Tensor | None) -> None: ...
    def scale_residuals(self, factor: float) -> None: ...
    def residual_bytes(self) -> int: ...
    def steps(self) -> int: ...
    def set_steps(self, steps: int) -> None: ...
    def choice(self) -> str: ...
    def why(self) -> str: ...

def topology(
    backend: Any,
) -> tuple[list[list[int]], list[str], str, list[int], list[int], list[list[float]]]: ...
def best_ring(rates: list[list[float]]) -> list[int]: ...  # ValueError
def explain(
    bytes: int,
    partial_bytes: int,
    world_size: int,
    ranks_on_host: int,
    sockets: bool,  # ranks of one host, too, go over them
    wanted: str,
    cost: dict[str, float],  # as of wire_cost; what is left out is the default
    order: str = "ring",
) -> tuple[str, str, list[tuple[str, float, float, float]]]: ...
def wire_cost(backend: Any) -> dict[str, float]: ...  # the default's, for None
def config() -> list[dict[str, str]]: ...  # a dictionary for each environment variable
def instruction_set() -> str: ...
def cuda_build() -> str: ...  # as in _build_info.CUDA
def set_error_types(
    peer_lost: type, timeout: type, mismatch: type, aborted: type, other: type
) -> None: ...
