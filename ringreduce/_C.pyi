# The extension; csrc/torch/bindings.cc says what each function does.
from collections.abc import Callable, Sequence
from typing import Any, type_check_only

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, GradBucket, ProcessGroup, Store, Work

class Options(Backend.Options, metaclass=_Bound):  # ringreduce.Options without Python
    def __init__(
        self,
        algorithm: str | None = None,
        slot_bytes: int | None = None,
        slots: int | None = None,
        on_loss: str | None = None,
        min_ranks: int | None = None,
        stall_seconds: float | None = None,
        order: str | None = None,
        join: bool | str = "auto",
    ) -> None: ...
    @property
    def algorithm(self) -> str | None: ...
    @property
    def slot_bytes(self) -> int | None: ...
    @property
    def slots(self) -> int | None: ...
    @property
    def on_loss(self) -> str | None: ...
    @property
    def min_ranks(self) -> int | None: ...
    @property
    def stall_seconds(self) -> float | None: ...
    @property
    def order(self) -> str | None: ...
    @property
    def join(self) -> bool | str: ...

def create_backend(
    store: Store,
    rank: int,
    size: int,
    timeout: float,  # seconds
    name: str,
    global_ranks: list[int],
    options: Options,
    *,
    gpu_facts: str,  # JSON, for the store
    make_inner: Callable[[Store, int, int], Any],  # of store, rank and world size
    count_ranks: Callable[[int], int],  # of world size
    of_ranks: int = 0,  # of how many these are some; 0: they are all
    connect: str = "now",  # "reconfigure", "join"
    cancel: Cancel | None = None,
    keeps_store: bool = False,
    launcher: str = "",
    job: str = "",
    program: str = "",
) -> Any: ...
def prefix_in_tcp_store(store: Store) -> str | None: ...
def begin_on_store(store: Store) -> None: ...
def store_of(backend: Any) -> Store: ...  # the group's
def check(backend: Any) -> None: ...  # the group's Error, if it has failed
def commit(backend: Any) -> None: ...
def found_inf(backend: Any, device: torch.device) -> Tensor: ...
def is_mapped(backend: Any, tensor: Tensor) -> bool: ...
def is_idle(backend: Any) -> bool: ...
def has_failed(backend: Any) -> bool: ...
def has_raised(backend: Any) -> bool: ...
def lend_buckets(backend: Any) -> None: ...  # DDP's, of a default group
def shutdown_all() -> None: ...
def staging_bytes(backend: Any) -> int: ...
def gpu_bytes(backend: Any) -> int: ...
def routes(backend: Any) -> list[str]: ...
def live_ranks(backend: Any) -> list[int]: ...
def records(backend: Any, since: int) -> bytes: ...  # as record.py reads them
def gpu_records(backend: Any, since: list[int]) -> list[bytes]: ...  # likewise, of each GPU
def messages(backend: Any, since: int) -> bytes: ...  # likewise
def recorder_id(backend: Any) -> int: ...  # as the records of other groups name this one
def totals(  # of the group, then of its GPU operations, by GPU
    backend: Any,
) -> list[tuple[int, dict[str, tuple[int, int, float]], dict[int, float]]]: ...
def lines(backend: Any) -> list[tuple[int, int, float, int]]: ...  # rank, bytes, busy s, resent
def arrivals(  # rank, ns, and its Inherited: rank, us, sequence
    backend: Any, sequence: int, ask: bool
) -> list[tuple[int, int, int, int, int]]: ...
def record_names() -> dict[str, list[str]]: ...  # of the numbers in them
def clock_offset(
    backend: Any,
) -> tuple[int, int]: ...  # ns ahead of the group's, error; -1: unknown
def meeting(backend: Any) -> str: ...  # the same on all ranks of a group, and of no other
def training_step() -> int: ...  # of this process
def count_training_step() -> int: ...  # of this process
def goes_on(backend: Any) -> bool: ...  # after a loss
def is_connected(backend: Any) -> bool: ...
def is_ended(backend: Any) -> bool: ...  # by abort() or shutdown()
def timeout_seconds(backend: Any) -> float: ...
def set_roots_move(backend: Any, move: bool) -> None: ...
def shared_tensor(sizes: Sequence[int], dtype: torch.dtype) -> Tensor: ...

# Of newcomers (elastic.py).
def prepare(backend: Any, place: str, members: list[int], timeout: float) -> None: ...
def enter_prepared(backend: Any) -> None: ...
def drop_prepared(backend: Any) -> None: ...
def register_comm_hook(reducer: Any, backend: Any, group: ProcessGroup) -> None: ...
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
def sparse_bytes(elements: int, share: float) -> int: ...
def sparse_encode(output: Tensor, input: Tensor, share: float, error: Tensor | None) -> None: ...
def sparse_decode_add(sum: Tensor, input: Tensor, share: float) -> bool: ...  # whether it is a code

class PageAllocator(metaclass=_Bound):  # of Backend.mem_allocator
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

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
def choose(
    kind: str,
    bytes: int,
    partial_bytes: int,
    coded_bytes: int,  # 0: without a codec
    world_size: int,
    ranks_on_host: int,
    in_memory: bool,  # all ranks share it
    cost: dict[str, float],  # as of wire_cost; what is left out is the default
    wanted: str = "auto",
    order: str = "ring",
) -> tuple[
    str, str, list[tuple[str, float, float, float, float]]
]: ...  # what runs, why, and of each candidate its seconds, hops, messages, bytes
def coded_bytes(codec: str, elements: int) -> int: ...
def wire_cost(backend: Any) -> dict[str, float]: ...  # the default's, for None
def config() -> list[dict[str, str]]: ...  # a dictionary for each environment variable
def listen_for(
    store_host: str,
) -> tuple[list[tuple[str, str, int, int]], str]: ...  # interface, address, port, fd; why
def instruction_set() -> str: ...
def cuda_build() -> str: ...  # as in _build_info.CUDA
def facts_of(text: str) -> tuple[int | None, int | None, str, bool | None] | None: ...
def set_error_types(
    peer_lost: type, timeout: type, mismatch: type, aborted: type, other: type
) -> None: ...
