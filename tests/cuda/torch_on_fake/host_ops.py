"""torch's operators on CUDA tensors, computed in the host's memory, since the fake runs no kernel
of torch's: `install` replaces them in a process.  It is an entry point, called by `import torch`.

An operator waits for the current stream, copies its tensors to the host, computes there, and puts
a copy of the results into the current stream.  So what has not been ordered before it in the stream
is missing in its result, as on a GPU.  Left as they are: what only allocates, views or records, and
copies that need no kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

KEPT = ("empty", "resize_", "set_", "record_stream", "is_pinned", "_pin_memory", "_local_scalar")

_library = torch.library.Library("aten", "IMPL")
_copy = torch.library.get_kernel("aten::copy_", "CUDA")


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All memory between its first and its last element, in one dimension."""
    if tensor.numel() == 0:
        return tensor.as_strided((0,), (1,))
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((reach + 1,), (1,))


def _copy_dense(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """torch's own copy, which keeps Python's lock while it waits: so all waiting is done before."""
    if not (to.is_cuda and source.is_cuda) and not non_blocking:
        torch.cuda.current_stream((to if to.is_cuda else source).device).synchronize()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return _copy.call_boxed(keys, to, source, non_blocking)


def _copy_span(to: torch.Tensor, source: torch.Tensor) -> None:
    _copy_dense(_span(to), _span(source))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    span = _span(tensor)
    host = torch.empty(span.numel(), dtype=tensor.dtype)
    _copy_span(host, span)
    return host.as_strided(tensor.size(), tensor.stride())


def _to_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    dense = tensor.clone()
    gpu = torch.empty_strided(dense.size(), dense.stride(), dtype=dense.dtype, device=device)
    _copy_span(gpu, dense)
    return gpu


def _on_host(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    on_gpu: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda and id(tensor) not in on_gpu:
            on_gpu[id(tensor)] = tensor, _to_host(tensor)
        return on_gpu[id(tensor)][1] if tensor.is_cuda else tensor

    host_args, host_kwargs = tree_map_only(torch.Tensor, fetch, (args, kwargs))
    if getattr(kwargs.get("device"), "type", None) == "cuda":
        host_kwargs["device"] = torch.device("cpu")
    result = op(*host_args, **host_kwargs)
    written: dict[int, torch.Tensor] = {}
    for argument, value in _arguments(op, args, kwargs):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
                continue
            host = on_gpu[id(tensor)][1]
            if tensor.size() != host.size():
                tensor.resize_(host.size())
            _copy_span(tensor, host)
            written[id(host)] = tensor
    device = next((gpu.device for gpu, _ in on_gpu.values()), kwargs.get("device"))

    def give_back(tensor: torch.Tensor) -> torch.Tensor:
        return written[id(tensor)] if id(tensor) in written else _to_gpu(tensor, device)

    return tree_map_only(torch.Tensor, give_back, result)


def _arguments(op: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    schema = op._schema.arguments
    named = [(argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs]
    return list(zip(schema, args, strict=False)) + named


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    same = self.dtype == src.dtype and self.size() == src.size()
    if same and self.stride() == src.stride() and _is_dense(self):
        return _copy_dense(self, src, non_blocking)
    host = _to_host(self) if self.is_cuda else self
    host.copy_(_to_host(src) if src.is_cuda else src)
    if self.is_cuda:
        _copy_span(self, host)
    return self


@functools.cache
def install() -> None:
    # Ways past the operators that the CPU has too.
    torch.backends.cudnn.enabled = False
    for fused in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was another
        for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            namespace, _, name = full.partition("::")
            if namespace != "aten" or name.startswith(KEPT):
                continue
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            views = [r.alias_info and not r.alias_info.is_write for r in op._schema.returns]
            if not any(views):
                _library.impl(name, functools.partial(_on_host, op), "CUDA")
        _library.impl("copy_", _copy_, "CUDA")
