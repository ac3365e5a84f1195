"""horovodrun: starts the ranks of a job, by the options of Horovod's.

    horovodrun -np 4 python train.py                             # torchrun
    horovodrun -np 4 --min-np 2 python train.py                  # elastic, on this host
    horovodrun -np 8 -H host1:4,host2:4 python train.py          # mpirun, or srun in a Slurm job

`python -m ringreduce.horovod.horovodrun` is the same.  The module has this name because
`ringreduce.horovod.run` is a function, as in Horovod.

Options of Horovod that tune what ringreduce does not have are accepted, and named on stderr as
without effect.  Those without which a job would not be what was asked for are refused.
"""

import argparse
import contextlib
import importlib.metadata
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ringreduce.core.processes import exit_at, how_ended, is_open_mpi
from ringreduce.horovod._launch import is_here
from ringreduce.supervise import Ranks, say

__all__ = ["main"]

_say = partial(say, "horovodrun")

_OUTPUT = Path(__file__).with_name("_output.py")
_DEFAULT_RESTARTS = 3

# Options without effect here, by how many values they take.
_WITHOUT_EFFECT = {
    0: ("--disable-cache", "--hierarchical-allreduce", "--no-hierarchical-allreduce",
        "--hierarchical-allgather", "--no-hierarchical-allgather", "--torus-allreduce",
        "--no-torus-allreduce", "--autotune", "--no-autotune", "--mpi-threads-disable",
        "--no-mpi-threads-disable", "--tcp", "--log-with-timestamp", "--log-without-timestamp",
        "--prefix-output-with-timestamp"),
    1: ("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample",
        "--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise",
        "--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds", "--log-level"),
    2: ("--blacklist-cooldown-range",),
}  # fmt: skip
# Options that are refused, and what to do instead.
_REFUSED = {
    "--config-file": "give its settings as options of horovodrun",
    "--host-discovery-script": "elastic runs are on one host here: leave it out",
    "--slots-per-host": "elastic runs are on one host here: leave it out",
    "--jsrun": "start jsrun yourself, with MASTER_ADDR and MASTER_PORT exported",
    "--binding-args": "pass it to mpirun by --mpi --mpi-args",
}
# The least value of an option.
_LEAST = {
    **dict.fromkeys(("num_proc", "min_np", "max_np", "elastic_timeout", "start_timeout"), 1),
    **dict.fromkeys(("fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "reset_limit"), 0),
    "stall_check_warning_time_seconds": 0,
    "stall_check_shutdown_time_seconds": 0,
}
# What mpirun does not pass on: it belongs to a host, or to another launcher.
_NOT_PASSED = ("HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "_", "USER", "LOGNAME")
_NOT_PASSED_PREFIXES = ("OMPI_", "PMI", "SLURM_", "BASH_FUNC", "PRTE_")


class _WithoutEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.without_effect = [*namespace.without_effect, option]


class _Refused(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option} is not supported by ringreduce: {self.help}")


class _CheckBuild(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        sys.stdout.write(_build_text())
        parser.exit()


def _version() -> str:
    try:
        return importlib.metadata.version("ringreduce")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"


def _build_text() -> str:
    import torch

    from ringreduce.core.backend import extension

    cuda = "X" if extension().cuda_build() else " "
    return (
        f"ringreduce {_version()}, with Horovod's API\n\n"
        f"Frameworks:\n    [X] PyTorch {torch.__version__}\n    [ ] TensorFlow\n    [ ] MXNet\n\n"
        "Controllers:\n    [ ] MPI\n    [X] its own, for which --gloo stands\n\n"
        f"Tensors:\n    [X] CPU\n    [{cuda}] CUDA\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Starts the ranks of a job that uses ringreduce.horovod.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=f"ringreduce {_version()}")
    add("-cb", "--check-build", action=_CheckBuild, nargs=0, help="show what was built")
    add("-np", "--num-proc", type=int, required=True, help="number of ranks")
    add("--verbose", action="store_true", help="print what is started")
    add("--start-timeout", type=int, help="seconds that ranks of an elastic run have to start")
    add("--output-filename", help="folder for the output: rank.N/stdout and rank.N/stderr in it")
    add("--network-interfaces", "--network-interface", action="append", help="such as eth0,eth1")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", help="such as host1:2,host2:4 (default: this host)")
    hosts.add_argument("-hostfile", "--hostfile", help="file with lines such as: host1 slots=2")
    add("-p", "--ssh-port", type=int, help="of mpirun's ssh")
    add("-i", "--ssh-identity-file", help="of mpirun's ssh")
    add("--mpi-args", help="more arguments for mpirun")

    group = parser.add_argument_group("settings of the coordinators")
    group.add_argument("--fusion-threshold-mb", type=int, help="most MiB of a bucket")
    group.add_argument("--cycle-time-ms", type=float, help="between cycles that wait for ranks")
    group.add_argument("--cache-capacity", type=int, help="names whose requests are remembered")
    group.add_argument("--timeline-filename", help="rank 0 writes a Chrome trace to it")
    group.add_argument("--timeline-mark-cycles", action=argparse.BooleanOptionalAction)
    group.add_argument("--no-stall-check", dest="no_stall_check", action="store_true", default=None)
    group.add_argument("--stall-check", dest="no_stall_check", action="store_false")
    group.add_argument("--stall-check-warning-time-seconds", type=int)
    group.add_argument("--stall-check-shutdown-time-seconds", type=int)

    group = parser.add_argument_group("elastic runs")
    group.add_argument(
        "--min-np", "--min-num-proc", type=int, dest="min_np", help="go on with so few"
    )
    group.add_argument("--max-np", "--max-num-proc", type=int, dest="max_np", help="let in no more")
    group.add_argument(
        "--reset-limit",
        type=int,
        help="end the job if a rank is lost after so many were started again (default: after "
        f"{_DEFAULT_RESTARTS} others go on without it)",
    )
    group.add_argument("--elastic-timeout", type=int, help="seconds to wait for --min-np ranks")

    how = parser.add_mutually_exclusive_group()
    how.add_argument("--gloo", "--use-gloo", action="store_true", dest="gloo", help="the default")
    how.add_argument("--mpi", "--use-mpi", action="store_true", dest="mpi", help="start by mpirun")
    parser.set_defaults(without_effect=[])
    for count, options in _WITHOUT_EFFECT.items():
        for option in options:
            add(option, action=_WithoutEffect, nargs=count, help=argparse.SUPPRESS)
    for option, instead in _REFUSED.items():
        add(option, action=_Refused, nargs="?", help=instead)
    add("command", nargs=argparse.REMAINDER, help="the program of each rank, and its arguments")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options.  Exits with an explanation if they make no sense."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.command[:1] == ["--"]:
        given.command = given.command[1:]
    if not given.command:
        parser.error("a command is needed, such as: python train.py")
    for name, least in _LEAST.items():
        if (value := getattr(given, name)) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    least, most = given.min_np or given.num_proc, given.max_np or given.num_proc
    if not least <= given.num_proc <= most:
        parser.error(f"-np {given.num_proc} must be from --min-np {least} to --max-np {most}")
    given.is_elastic = not (given.min_np is given.max_np is given.reset_limit is None)
    try:
        given.places = _places(given)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    given.fail = parser.error
    return given


# ---- hosts


def _hosts(text: str) -> list[tuple[str, int]]:
    """ "a:2,b" as pairs of host and slots."""
    pairs = []
    for part in text.split(","):
        host, colon, slots = part.strip().rpartition(":")
        if not colon:
            host, slots = part.strip(), "1"
        if not host or not slots.isdecimal() or int(slots) < 1:
            raise ValueError(f"{part.strip()!r} in the list of hosts is not such as host1:2")
        pairs.append((host, int(slots)))
    return pairs


def _hostfile(path: str) -> list[tuple[str, int]]:
    pairs = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a text file with lines such as: host1 slots=2 ({error})"
        ) from None
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 else "1"
        readable = line.replace("\t", " ").isprintable()
        if not readable or len(words) > 2 or not slots.isdecimal() or int(slots) < 1:
            raise ValueError(f"{line.strip()!r} in {path} is not such as: host1 slots=2")
        pairs.append((words[0], int(slots)))
    return pairs


def _places(given: argparse.Namespace) -> list[tuple[str, int]]:
    """The hosts that get ranks, and how many each.  Raises ValueError for too few slots."""
    if given.hosts is not None:
        pairs = _hosts(given.hosts)
    elif given.hostfile is not None:
        pairs = _hostfile(given.hostfile)
    else:
        pairs = [("localhost", given.num_proc)]
    left, places = given.num_proc, []
    for host, slots in pairs:
        if left > 0:
            places.append((host, min(slots, left)))
            left -= slots
    if left > 0:
        raise ValueError(
            f"-np {given.num_proc} is more than the {sum(s for _, s in pairs)} slots of the hosts"
        )
    return places


# ---- what the options mean for the ranks


def variables(given: argparse.Namespace) -> dict[str, str]:
    """The environment variables that the options stand for."""
    values: dict[str, object] = {}

    def put(name: str, value: object) -> None:
        if value is not None:
            values[name] = int(value) if isinstance(value, bool) else value

    megabytes = given.fusion_threshold_mb
    put("HOROVOD_FUSION_THRESHOLD", None if megabytes is None else megabytes << 20)
    put("HOROVOD_CYCLE_TIME", given.cycle_time_ms)
    put("HOROVOD_CACHE_CAPACITY", given.cache_capacity)
    put("HOROVOD_TIMELINE", given.timeline_filename)
    if given.timeline_filename:
        put("HOROVOD_TIMELINE_MARK_CYCLES", given.timeline_mark_cycles)
    put("HOROVOD_STALL_CHECK_DISABLE", given.no_stall_check)
    put("HOROVOD_STALL_CHECK_TIME_SECONDS", given.stall_check_warning_time_seconds)
    put("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", given.stall_check_shutdown_time_seconds)
    put("HOROVOD_START_TIMEOUT", given.start_timeout)
    if given.network_interfaces:
        put("RINGREDUCE_IF", ",".join(given.network_interfaces))
    if given.is_elastic:
        put("HOROVOD_ELASTIC", True)
        put("HOROVOD_ELASTIC_MIN_NP", given.min_np or given.num_proc)
        put("HOROVOD_ELASTIC_MAX_NP", given.max_np)
        put("HOROVOD_ELASTIC_TIMEOUT", given.elastic_timeout)
    return {name: str(value) for name, value in values.items()}


def _command(given: argparse.Namespace) -> list[str]:
    """A rank's command."""
    if given.output_filename:
        return [sys.executable, str(_OUTPUT), given.output_filename, *given.command]
    return list(given.command)


# ---- ways to start ranks


def launcher_command(given: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """The command of the launcher that starts the ranks: torchrun, mpirun or srun.

    Exits with an explanation if there is none for these hosts.
    """
    one_host = len(given.places) == 1 and is_here(given.places[0][0])
    if given.mpi:
        mpirun = _find_mpirun(environment)
        if not mpirun:
            given.fail("--mpi needs mpirun, which is not on the PATH")
        return _mpirun_command(given, mpirun, environment)
    if one_host:
        _refuse_mpirun_options(given)
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(given.num_proc), "--no-python"),
            *_command(given),
        ]
    if environment.get("SLURM_JOB_ID") and shutil.which("srun", path=environment.get("PATH")):
        _refuse_mpirun_options(given)
        return ["srun", *_srun_options(given), *_command(given)]
    if mpirun := _find_mpirun(environment):
        return _mpirun_command(given, mpirun, environment)
    given.fail(_how_by_hand(given))
    raise AssertionError  # `fail` exits


def _refuse_mpirun_options(given: argparse.Namespace) -> None:
    for name in ("ssh_port", "ssh_identity_file", "mpi_args"):
        if getattr(given, name) is not None:
            option = f"--{name.replace('_', '-')}"
            given.fail(f"{option} is for mpirun, which these ranks are not started by (--mpi)")


def _find_mpirun(environment: Mapping[str, str]) -> str:
    beside = Path(sys.executable).with_name("mpirun")
    return shutil.which("mpirun", path=environment.get("PATH")) or (
        str(beside) if beside.exists() else ""
    )


def _mpirun_command(
    given: argparse.Namespace, mpirun: str, environment: Mapping[str, str]
) -> list[str]:
    hosts = ",".join(f"{host}:{slots}" for host, slots in given.places)
    more = shlex.split(given.mpi_args or "")
    own = variables(given)
    first = given.places[0][0]
    if not all(is_here(host) for host, _ in given.places) and "MASTER_ADDR" not in environment:
        own["MASTER_ADDR"] = socket.gethostname() if is_here(first) else first
    ssh = [f"-p {given.ssh_port}"] if given.ssh_port else []
    ssh += [f"-i {given.ssh_identity_file}"] if given.ssh_identity_file else []
    if not is_open_mpi(mpirun):
        if ssh:
            given.fail("--ssh-port and --ssh-identity-file are for Open MPI; use ~/.ssh/config")
        set_ = [word for name, value in own.items() for word in ("-genv", name, value)]
        return [mpirun, "-n", str(given.num_proc), "-hosts", hosts, *set_, *more, *_command(given)]
    options = ["-np", str(given.num_proc), "-H", hosts, "--bind-to", "none", "--map-by", "slot"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if ssh:
        options += ["-mca", "plm_rsh_args", " ".join(ssh)]
    passed = [name for name in environment if _is_passed(name) and name not in own]
    for setting in [*sorted(passed), *(f"{name}={value}" for name, value in own.items())]:
        options += ["-x", setting]
    return [mpirun, *options, *more, *_command(given)]


def _is_passed(name: str) -> bool:
    return (
        name.isidentifier()
        and name not in _NOT_PASSED
        and not name.startswith(_NOT_PASSED_PREFIXES)
    )


def _srun_options(given: argparse.Namespace) -> list[str]:
    options = [f"--ntasks={given.num_proc}"]
    if given.hosts is None and given.hostfile is None:
        return options
    counts = {slots for _, slots in given.places}
    if len(counts) == 1:
        names = ",".join(host for host, _ in given.places)
        return [*options, f"--ntasks-per-node={counts.pop()}", f"--nodelist={names}"]
    names = ",".join(host for host, slots in given.places for _ in range(slots))
    return [*options, "--distribution=arbitrary", f"--nodelist={names}"]


def _how_by_hand(given: argparse.Namespace) -> str:
    hosts = ", ".join(host for host, _ in given.places)
    first, counts = given.places[0][0], {slots for _, slots in given.places}
    each = "SLOTS_OF_THAT_HOST" if len(counts) > 1 else str(counts.pop())
    script = given.command[1:] if Path(given.command[0]).name.startswith("python") else None
    program = shlex.join(script) if script else f"--no-python {shlex.join(given.command)}"
    return (
        f"ranks on {hosts} need mpirun on the PATH, or srun in a Slurm job; horovodrun starts none "
        f"by ssh itself. Or run on each host, with K from 0 to {len(given.places) - 1}: torchrun "
        f"--nnodes {len(given.places)} --node-rank K --nproc-per-node {each} "
        f"--master-addr {first} --master-port 29500 {program}"
    )


# ---- elastic runs


def _run_elastic(given: argparse.Namespace) -> int:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if given.mpi or len(given.places) > 1 or not is_here(given.places[0][0]):
        given.fail(
            "elastic runs (--min-np, --max-np, --reset-limit) are on one host, without mpirun"
        )
    _refuse_mpirun_options(given)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A group without a lost rank is for ringreduce.elastic.
    own = {**variables(given), "RINGREDUCE_ON_LOSS": "error"}
    ranks = Ranks(_command(given), given.num_proc, store.port, variables=own, name="horovodrun")
    exit_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with contextlib.closing(ranks):
        return _watch(ranks, given.min_np or given.num_proc, given.reset_limit)


def _watch(ranks: Ranks, least: int, limit: int | None) -> int:
    """The exit status: 0 if `least` ranks ended well.

    `limit`: of restarts, after which a lost rank ends the job.
    """
    finished, is_short, is_over = 0, False, False
    restarts = _DEFAULT_RESTARTS if limit is None else limit
    for codes in ranks.run():
        for rank, code in codes.items():
            how = f"rank {rank} ended with {how_ended(code)}"
            if code == 0:
                finished += 1
            elif finished:
                ranks.say(f"{how}; others have ended well")
            elif restarts == 0 and limit is not None:
                ranks.say(f"{how}; the job ends, since {limit} were started again (--reset-limit)")
                is_over = True
            elif restarts == 0:
                ranks.say(f"{how}; no restarts are left")
                is_short = len(ranks.running) < least
            else:
                restarts -= 1
                ranks.say(f"{how}; it is started again")
                ranks.start_again(rank)
        if is_over:
            return 1
        if ranks.running and is_short and not finished:
            ranks.say(f"{len(ranks.running)} ranks are left, and {least} are needed (--min-np)")
            ranks.end()
        elif ranks.was_made and not ranks.running.keys() - ranks.waiting:
            ranks.end_waiting()
    return 0 if finished >= least else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of an elastic run; for others this process becomes the launcher."""
    given = parse(sys.argv[1:] if argv is None else argv)
    if given.without_effect:
        _say(f"without effect in ringreduce: {', '.join(given.without_effect)}")
    if given.is_elastic:
        return _run_elastic(given)
    environment = {**os.environ, **variables(given)}
    command = launcher_command(given, environment)
    if given.verbose:
        _say(shlex.join(command))
    return _become(command, environment)


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(main())
