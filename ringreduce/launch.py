"""One init for every launcher: who this process is, as torchrun, Open MPI, PMI or Slurm say it.

`init` reads the launcher's environment variables, completes torchrun's (RANK, WORLD_SIZE, ...) from
them, and makes the default process group.  `core/launchers.py` knows the variables; what is here is
where the ranks meet.
"""

import dataclasses
import logging
import os
import socket
import zlib
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from ringreduce.core.launchers import Identity, identify, whole

__all__ = ["Launch", "init"]

# Ports for jobs that name none: above most services', below those that systems hand out themselves.
_FIRST_PORT, _PORTS = 20000, 10000
# torchrun's own default, for launchers that tell nothing by which to tell jobs apart.
_DEFAULT_PORT = 29500
# How often a name is looked up whose server does not answer.
_LOOKUPS = 3

_log = logging.getLogger("ringreduce")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What `init` found out about this process.

    Attributes:
        rank: of this process, 0 to world_size - 1.
        world_size: how many processes the group has.
        local_rank: among the processes of this host.  None where nothing tells: RANK and WORLD_SIZE
            (or the arguments) alone, with the master on another host.
        local_world_size: how many of the processes run on this host; None likewise.
        launcher: who said so: "arguments", "torchrun", "environment" (RANK and WORLD_SIZE, but not
            torchrun's), "Open MPI", "PMI" (MPICH, Intel MPI), "Slurm", or "none" (world size 1).
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    launcher: str


def init(
    backend: str = "ringreduce",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    **options: Any,
) -> Launch:
    """Makes the default process group under torchrun, mpirun, srun, or no launcher at all.

    Who this process is comes from the first of these that says it: the arguments; RANK and
    WORLD_SIZE (torchrun's, or set by hand); Open MPI's OMPI_COMM_WORLD_*; PMI_RANK and PMI_SIZE
    (MPICH, Intel MPI); Slurm's variables of a task that srun started.  Without any of them the
    process is a group of its own, of world size 1, and a warning says so.

    The ranks meet at MASTER_ADDR and MASTER_PORT.  Where these are not set, the address is the
    loopback if all ranks run on one host, or the first host of a Slurm step, and the port is made
    from the launcher's job id.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are then set in
    os.environ where they are missing, as torchrun sets them, for the code that follows.

    Args:
        backend: as init_process_group takes it.
        rank: with world_size: who this process is, whatever the environment says.
        world_size: with rank.
        local_rank: of this process on its host, whatever the environment says.
        master_addr: rank 0's host, instead of MASTER_ADDR.
        master_port: a port that is free there, instead of MASTER_PORT.
        options: the rest of init_process_group's arguments: timeout, pg_options, ...  With
            `store` or `init_method` no master is needed.

    Returns:
        Who this process is.

    Raises:
        ValueError: variables that are incomplete, contradict each other or make no sense, or
            nothing says where rank 0 is; names the variables.
        torch.distributed.DistNetworkError: the ranks could not meet at that address and port.
        Exception: whatever else init_process_group raises.
    """
    me = identify(os.environ, rank, world_size, local_rank, master_addr)
    if me.launcher == "none":
        _log.warning(
            "no launcher's variables found (torchrun, Open MPI, PMI, Slurm), so this process is "
            "rank 0 of 1, a group of its own.%s To start more: torchrun --nproc-per-node N SCRIPT",
            me.aside,
        )
    if options.get("init_method") == "env://":  # what it means, we do ourselves
        del options["init_method"]
    if options.get("store") is None and options.get("init_method") is None:
        _meet(me, backend, master_addr, master_port, options)
    elif master_addr is None and master_port is None:
        _complete_environment(me)
        dist.init_process_group(backend, rank=me.rank, world_size=me.world_size, **options)
    else:
        raise ValueError("master_addr and master_port do not go with store or init_method")
    return Launch(me.rank, me.world_size, me.local_rank, me.local_world_size, me.launcher)


def _complete_environment(me: Identity, addr: str | None = None, port: int | None = None) -> None:
    """Sets those of torchrun's variables that are missing, and known; one that is there stays."""
    values = {
        "RANK": me.rank,
        "WORLD_SIZE": me.world_size,
        "LOCAL_RANK": me.local_rank,
        "LOCAL_WORLD_SIZE": me.local_world_size,
        "MASTER_ADDR": addr,
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        if value is not None and not os.environ.get(name):
            os.environ[name] = str(value)


def _meet(
    me: Identity,
    backend: str,
    master_addr: str | None,
    master_port: int | None,
    options: dict[str, Any],
) -> None:
    """Makes the group by way of a store on rank 0's host."""
    addr, port = meeting_place(me, master_addr, master_port)

    given = dict(options)
    try:
        if port is None:
            # One process, which nobody has to find: the system chooses a port.
            given["store"] = store = TCPStore(addr, 0, 1, is_master=True)
            port = store.port
        elif master_addr is not None or master_port is not None:
            # Not the environment's: torch would look there, and under torchrun start no server.
            given["store"] = TCPStore(
                addr,
                port,
                me.world_size,
                is_master=me.rank == 0,
                timeout=options.get("timeout") or default_pg_timeout,
                multi_tenant=True,
            )
        _complete_environment(me, addr, port)
        dist.init_process_group(backend, rank=me.rank, world_size=me.world_size, **given)
    except dist.DistNetworkError as error:
        raise dist.DistNetworkError(
            f"rank {me.rank} of {me.world_size} ({me.launcher}) could not meet the others at "
            f"{addr}:{port}, where rank 0 should listen: {error}\nIf that port is taken, or rank 0 "
            f"is elsewhere, choose for all ranks: {_how_to_export(me)}"
        ) from error
    _log.info("rank %d of %d (%s), met at %s:%s", me.rank, me.world_size, me.launcher, addr, port)


def meeting_place(
    me: Identity, master_addr: str | None = None, master_port: int | None = None
) -> tuple[str, int | None]:
    """Where rank 0's store is: an address, and a port; None for one that the system chooses.

    Raises:
        ValueError: nothing says it, or what says it makes no sense.
    """
    addr = master_addr or os.environ.get("MASTER_ADDR") or _address(me)
    port = master_port if master_port is not None else whole(os.environ, "MASTER_PORT")
    if port is None and me.world_size > 1:
        port = _port(me)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"rank {me.rank}: the master's port must be 1 to 65535, not {port}")
    return addr, port


def _address(me: Identity) -> str:
    """Rank 0's address where MASTER_ADDR is not set."""
    if me.local_world_size == me.world_size:
        return "127.0.0.1"
    if me.first_host is not None:
        _require_resolvable(me, me.first_host)
        return me.first_host
    where = (
        f"{me.local_world_size} of them are on this host"
        if me.local_world_size is not None
        else "nothing says whether all are on one host"
    )
    raise ValueError(
        f"rank {me.rank} of {me.world_size} ({me.launcher}) does not know where rank 0 is: "
        f"MASTER_ADDR is not set, and {where}. Set it for all ranks: {_how_to_export(me)}"
    )


def _require_resolvable(me: Identity, host: str) -> None:
    """Raises ValueError if it does not: torch would look it up again and again in silence."""
    for attempt in range(_LOOKUPS):
        try:
            socket.getaddrinfo(host, None)
            return
        except (socket.gaierror, UnicodeError) as error:
            if getattr(error, "errno", None) == socket.EAI_AGAIN and attempt < _LOOKUPS - 1:
                _log.warning("looking up rank 0's host, %r, again: %s", host, error)
                continue
            raise ValueError(
                f"rank {me.rank} of {me.world_size} ({me.launcher}) cannot find rank 0's host: "
                f"the first node of the step, {host!r}, does not resolve ({error}). Name an "
                f"address of it for all ranks: {_how_to_export(me)}"
            ) from error


def _port(me: Identity) -> int:
    """A port that all ranks of the job come to, and hardly ever those of another job."""
    if me.job is not None:
        return _FIRST_PORT + zlib.crc32(me.job.encode()) % _PORTS
    if me.started:
        return _DEFAULT_PORT
    raise ValueError(
        f"rank {me.rank} of {me.world_size} ({me.launcher}) does not know at which port rank 0 "
        f"listens: MASTER_PORT is not set. Set it for all ranks: {_how_to_export(me)}"
    )


def _how_to_export(me: Identity) -> str:
    """A command that gives all ranks a master."""
    host, port = "HOST_OF_RANK_0", "FREE_PORT"
    if me.launcher == "Open MPI":
        return f"mpirun -x MASTER_ADDR={host} -x MASTER_PORT={port} ..."
    if me.launcher == "PMI":
        return f"mpiexec -genv MASTER_ADDR {host} -genv MASTER_PORT {port} ..."
    if me.launcher == "torchrun":
        return f"torchrun --master-addr {host} --master-port {port} ..."
    return f"export MASTER_ADDR={host} MASTER_PORT={port}"
