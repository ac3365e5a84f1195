"""`ringreduce.horovod.run`: runs a function in several processes, and returns what it returned."""

import contextlib
import os
import pickle
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringreduce.core.launchers import is_loopback
from ringreduce.core.processes import how_ended
from ringreduce.supervise import Ranks

try:  # which also takes lambdas and functions of __main__
    import cloudpickle as pickler  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:
    pickler = pickle

_OUTPUT = Path(__file__).with_name("_output.py")


def dumps(value: Any) -> bytes:
    """A pickle of the value."""
    data: bytes = pickler.dumps(value)
    return data


def is_here(host: str) -> bool:
    """Whether this host has the name or address."""
    return is_loopback(host) or host in (socket.gethostname(), socket.getfqdn())


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Runs a function in `num_proc` processes of this host, which may call `hvd.init()`.

    Args:
        func: what pickle takes; where cloudpickle is installed also a lambda, or a function of
            `__main__`.
        args, kwargs: its arguments.
        num_proc, np: how many processes.
        output_filename: folder for their output: rank.N/stdout and rank.N/stderr in it.
        verbose: print which processes are started.
        use_gloo, start_timeout: as in Horovod; they change nothing.
        hosts: names of this host, as "localhost:2".
        network_interface, network_interfaces: for RINGREDUCE_IF.
        executable: Python's, if not that of this process.

    The others are there as Horovod has them, and have to be None or False: all ranks run on this
    host, and none is started again.  `horovodrun` can do that.

    Returns:
        The results by rank.

    Raises:
        ValueError: arguments that are not supported, or make no sense; names them.
        RuntimeError: a process failed; has its rank and traceback.  The others are ended.
    """
    unsupported = {
        "min_num_proc": min_num_proc,
        "max_num_proc": max_num_proc,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "hosts": [h for h in (hosts or "").split(",") if h and not is_here(h.rsplit(":", 1)[0])],
        "hostfile": hostfile,
        "host_discovery_script": host_discovery_script,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "disable_cache": disable_cache,
        "use_mpi": use_mpi,
        "mpi_args": mpi_args,
        "min_np": min_np,
        "max_np": max_np,
    }
    for name, value in unsupported.items():
        if value:
            raise ValueError(
                f"{name}={value!r} is not supported by ringreduce.horovod.run, which starts all "
                "ranks on this host, once; use horovodrun"
            )
    if np is not None:
        warnings.warn("np is deprecated, use num_proc", DeprecationWarning, stacklevel=2)
        num_proc = np
    if num_proc < 1:
        raise ValueError(f"num_proc must be at least 1, not {num_proc}")
    interfaces = [*(network_interfaces or ()), *([network_interface] if network_interface else ())]
    more = {"RINGREDUCE_ON_LOSS": "error"}
    if interfaces:
        more["RINGREDUCE_IF"] = ",".join(interfaces)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [executable or sys.executable, "-m", "ringreduce.horovod._worker"]
    if output_filename:
        command = [command[0], str(_OUTPUT), os.path.abspath(output_filename), *command]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "call").open("wb") as file:
            pickle.dump(sys.path, file)
            try:
                file.write(dumps((func, tuple(args), dict(kwargs or {}))))
            except Exception as error:
                hint = "" if pickler is not pickle else "; installing cloudpickle may help"
                raise ValueError(
                    f"func or its arguments cannot be pickled: {error}{hint}"
                ) from error
        program = "ringreduce.horovod.run" if verbose else ""
        workers = Ranks([*command, name], num_proc, store.port, variables=more, name=program)
        with contextlib.closing(workers):
            return _results(workers, folder)


def _results(workers: Ranks, folder: Path) -> list[Any]:
    """Starts the processes, and waits for them."""
    for codes in workers.run():
        if not any(codes.values()):
            continue
        # Another may have ended before, and its error be the cause.
        codes |= workers.ended()
        failed = {rank: code for rank, code in codes.items() if code != 0}
        raise RuntimeError(_why({rank: _outcome(folder, rank) for rank in workers.all}, failed))
    outcomes = [_outcome(folder, rank) for rank in workers.all]
    if lost := [rank for rank in workers.all if "value" not in outcomes[rank]]:
        raise RuntimeError(f"ranks {lost} ended without a result")
    return [outcome["value"] for outcome in outcomes]


def _outcome(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"result.{rank}"
    if not path.exists():
        return {}
    outcome: dict[str, Any] = pickle.loads(path.read_bytes())
    return outcome


def _why(outcomes: Mapping[int, dict[str, Any]], failed: Mapping[int, int]) -> str:
    """What went wrong first.

    `failed`: exit statuses of those that have ended.
    """
    for rank, code in failed.items():
        if "error" not in outcomes[rank]:  # others may have failed, but only for its loss
            return f"rank {rank} of {len(outcomes)} ended with {how_ended(code)}"
    told = {rank: outcome for rank, outcome in outcomes.items() if "error" in outcome}
    first = min(told, key=lambda rank: told[rank]["when"])
    return f"rank {first} of {len(outcomes)} failed:\n{told[first]['error']}"
