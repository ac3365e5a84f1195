"""How a rank process calls a collective: through torch.distributed, by codecs, on torch's
symmetric memory, through MPI, or not at all but scaling its own buffer (the roofline)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ringreduce.tools.bench.collective import Call, Collective, item_size
from ringreduce.tools.bench.reducing import AllReduce
from ringreduce.tools.bench.settings import Unsupported, parse_codec


class Engine(Protocol):
    """What a rank process needs of a contender."""

    rank: int

    def call(self, collective: Collective) -> Call:
        """What is timed, bound to the buffers of `collective`. Raises Unsupported."""

    def barrier(self) -> None:
        """Wait for all ranks of this contender."""

    def about(self) -> dict[str, Any]:
        """What the contender says about itself, for the header and the JSON."""

    def close(self) -> None:
        """Leave the group."""


class TorchEngine:
    """A process group of torch.distributed with the given backend."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank: int = spec["rank"]
        self.backend: str = spec["backend"]
        self.device: str = spec["device"]
        timeout = timedelta(seconds=spec["timeout"])
        store = TCPStore(spec["store_host"], spec["store_port"], None, False, timeout)
        dist.init_process_group(
            self.backend,
            store=PrefixStore(spec["key"], store),
            rank=self.rank,
            world_size=spec["world"],
            timeout=timeout,
            # So that NCCL connects, or says why it cannot, before anything is timed.
            device_id=torch.device(self.device) if self.backend == "nccl" else None,
        )

    def call(self, collective: Collective) -> Call:
        return collective.torch_call()

    def barrier(self) -> None:
        dist.barrier()

    def about(self) -> dict[str, Any]:
        if self.backend != "ringreduce":
            return {}
        library = importlib.import_module("ringreduce")
        own = importlib.import_module("ringreduce.core.backend")
        return {
            # By which wires, and over how many connections, its bytes went.
            "routes": list(own.extension().routes(own.backend_of(own.ringreduce_group(None)))),
            "version": str(library.__version__),
            "isa": str(library.instruction_set()),
            "staging_bytes": int(library.staging_bytes()),
        }

    def close(self) -> None:
        dist.destroy_process_group()


class CodecEngine(TorchEngine):
    """ringreduce's compressed all-reduce, in place, with the codec that the contender's key names.

    No residuals: what it loses is what one call loses.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.codec, self.schedule = parse_codec(spec["key"])
        super().__init__(spec)

    def call(self, collective: Collective) -> Call:
        case = collective.case
        if type(collective) is not AllReduce or case.dtype != "float32":
            raise Unsupported("codecs are for all_reduce of float32 only")
        own = importlib.import_module("ringreduce.core.backend")
        run, tensor = own.extension().compressed_all_reduce, collective.tensor
        backend = own.backend_of(own.ringreduce_group(None))
        options = {"codec": self.codec, "op": case.op, "schedule": self.schedule, "async_op": False}
        collective.codec = self.codec
        return lambda: run(backend, tensor, tensor, **options).wait()


class SharedEngine(TorchEngine):
    """ringreduce on tensors that the ranks of a host share (ringreduce.empty)."""


class OperatorEngine(TorchEngine):
    """ringreduce's operator, without the Python part of torch.distributed."""

    def call(self, collective: Collective) -> Call:
        if type(collective) is not AllReduce:
            raise Unsupported("the operator is for all_reduce only")
        op, tensor = collective.case.op, collective.tensor
        group = dist.group.WORLD
        assert group is not None
        run, name = torch.ops.ringreduce.all_reduce_.default, group.group_name
        return lambda: run(tensor, op, name)


class RooflineEngine(TorchEngine):
    """No collective: every rank scales its own buffer in place, all at the same time.

    It moves as many bytes as the collective has to (its `traffic`), half of them read and half
    written, since a line that is scaled is not fetched in vain. The buffer is as large as what
    the collective touches, so that caches hold as much of it; calls go round in it. It is scaled
    as float32 whatever the dtype, since the roofline is memory's and not that of some conversion.
    """

    def call(self, collective: Collective) -> Call:
        case = collective.case
        traffic = collective.traffic(case.world)
        elements = case.count * item_size(case.dtype) / 4
        touched = max(1, int(elements * traffic.touched))
        scaled = min(touched, max(1, int(elements * (traffic.read + traffic.written) / 2)))
        buffer = torch.ones(touched, dtype=torch.float32, device=self.device)
        if scaled == touched:
            return lambda: buffer.mul_(1.0)
        at = 0

        def scale() -> None:
            nonlocal at
            end = at + scaled
            buffer[at:end].mul_(1.0)
            if end > touched:
                buffer[: end - touched].mul_(1.0)
            at = end % touched

        return scale


class SymmetricEngine(TorchEngine):
    """torch's own kernels on symmetric memory; the process group only lets the ranks meet.

    One-shot writes to another tensor, two-shot works in place.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
            raise Unsupported("this torch has no symmetric memory")
        self.memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self.kernels: Any = torch.ops.symm_mem
        self.one_shot: bool = spec["key"] == "symm_one_shot"
        super().__init__(spec)

    def call(self, collective: Collective) -> Call:
        case = collective.case
        if type(collective) is not AllReduce or case.op != "sum":
            raise Unsupported(
                "torch's symmetric memory has these kernels for all_reduce's sum only"
            )
        if case.dtype not in ("float32", "bfloat16"):
            raise Unsupported(f"torch's symmetric memory has no all-reduce of {case.dtype}")
        shared = self.memory.empty(
            case.count, dtype=getattr(torch, case.dtype), device=torch.device(self.device)
        )
        group = dist.group.WORLD
        assert group is not None
        self.memory.rendezvous(shared, group)
        collective.tensor = collective.output = shared
        name = group.group_name
        if not self.one_shot:
            two_shot = self.kernels.two_shot_all_reduce_
            return lambda: two_shot(shared, "sum", name)
        output = collective.output = torch.empty_like(shared)
        one_shot = self.kernels.one_shot_all_reduce_out
        return lambda: one_shot(shared, "sum", name, output)


class MpiEngine:
    """MPI_COMM_WORLD through mpi4py, on NumPy views of the buffers."""

    def __init__(self, spec: dict[str, Any]) -> None:
        # mpi4py is optional, so that it is imported by name and not seen by type checkers.
        self.mpi: Any = importlib.import_module("mpi4py.MPI")
        self.comm: Any = self.mpi.COMM_WORLD
        self.rank = int(self.comm.Get_rank())
        size = int(self.comm.Get_size())
        if size != spec["world"]:
            raise Unsupported(
                f"mpi4py found {size} rank(s) and not {spec['world']}: mpirun belongs to "
                "another MPI than the one mpi4py is linked to"
            )

    def call(self, collective: Collective) -> Call:
        if collective.case.dtype in ("float16", "bfloat16"):
            raise Unsupported(f"MPI has no {collective.case.dtype}")
        return collective.mpi_call(self.mpi, self.comm)

    def barrier(self) -> None:
        self.comm.Barrier()

    def about(self) -> dict[str, Any]:
        return {"version": str(self.mpi.Get_library_version()).split(",")[0].strip("\0\n ")}

    def close(self) -> None:
        self.mpi.Finalize()


def make_engine(spec: dict[str, Any]) -> Engine:
    """The engine of `spec["kind"]`, its group set up; waits for the other ranks."""
    engines: dict[str, Callable[[dict[str, Any]], Engine]] = {
        "torch": TorchEngine,
        "codec": CodecEngine,
        "shared": SharedEngine,
        "operator": OperatorEngine,
        "roofline": RooflineEngine,
        "symm_mem": SymmetricEngine,
        "mpi": MpiEngine,
    }
    return engines[spec["kind"]](spec)
