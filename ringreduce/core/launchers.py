"""What launchers say in environment variables about the process that they started.

Pure functions of a mapping; `launch.py` uses them on os.environ.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Mapping

Environment = Mapping[str, str]

# Slurm's ids of steps without tasks (pending, extern, batch, interactive) are above the others.
_RESERVED_STEPS = 0xFFFFFFF0


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who a process is, according to one launcher, or completed from several that agree.

    Attributes:
        rank, world_size, local_rank, local_world_size, launcher: as in `launch.Launch`.
        said: the variables that say so, with their values, for messages.
        job: something that all processes of the job share, and no other job has.
        first_host: the name of rank 0's host.
        started: whether a launcher of many processes is at work, and not only somebody's word.
        aside: one more sentence for the log.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    launcher: str = "none"
    said: str = ""
    job: str | None = None
    first_host: str | None = None
    started: bool = False
    aside: str = ""

    def agrees(self, other: "Identity") -> bool:
        return (self.rank, self.world_size) == (other.rank, other.world_size)


def whole(env: Environment, name: str) -> int | None:
    """A variable's value as a whole number; None if it is not set, or empty."""
    text = env.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text} is not a whole number") from None


def identify(
    env: Environment,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_addr: str | None = None,
) -> Identity:
    """Who this process is: from the arguments, else from the first launcher that says it.

    What that leaves open (the local rank, the job) is taken from others that agree with it on rank
    and world size.

    Raises:
        ValueError: variables that are incomplete, contradict each other or make no sense.
    """
    found = [
        identity
        for identity in (
            _arguments(rank, world_size),
            _torchrun(env),
            _open_mpi(env),
            _pmi(env),
            _slurm(env),
        )
        if identity is not None
    ]
    if not found:
        found = [Identity(0, 1, aside=_unused(env))]
    me = found[0]
    for other in found[1:]:
        if me.launcher == "environment":
            _refuse_stale(me, other)
        if me.agrees(other):
            me = _completed(me, other)
    me = _with_locals(me, env, local_rank, master_addr)
    _check(me)
    return me


def job_of(env: Environment, rank: int, world_size: int) -> tuple[str, str]:
    """A launcher and its name of the job whose ranks are those of this group; "" without one.

    Ranks of one job have the same one from a launcher, or none: that a launcher's rank and world
    size are these says that its processes are the group's ranks.
    """
    for read in (_torchrun, _open_mpi, _pmi, _slurm, _kubernetes):
        try:
            me = read(env)
        except ValueError:  # of the variables of another program
            continue
        if me and me.job and (me.rank, me.world_size or world_size) == (rank, world_size):
            # Ranks tell it each other in one line.
            return me.launcher, " ".join(me.job.removeprefix(me.launcher).split())
    return "", ""


def _pair(env: Environment, rank_name: str, size_name: str) -> tuple[int, int, str] | None:
    """Rank, world size, and what was read; None if neither is set."""
    rank, size = whole(env, rank_name), whole(env, size_name)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise ValueError(
            f"{there}={env[there]} is set, but {missing} is not. Set both (a launcher does), "
            f"or unset {there}."
        )
    return rank, size, f"{rank_name}={rank} and {size_name}={size}"


def _arguments(rank: int | None, world_size: int | None) -> Identity | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        given = f"rank={rank}" if world_size is None else f"world_size={world_size}"
        other = "world_size" if world_size is None else "rank"
        raise ValueError(f"{given} was given without {other}: give both, or neither")
    said = f"rank={rank} and world_size={world_size}"
    return Identity(rank, world_size, launcher="arguments", said=said)


def _torchrun(env: Environment) -> Identity | None:
    """torchrun's variables, or the same ones set by hand."""
    pair = _pair(env, "RANK", "WORLD_SIZE")
    if pair is None:
        return None
    run = env.get("TORCHELASTIC_RUN_ID")
    by_torchrun = bool(run)
    return Identity(
        *pair[:2],
        whole(env, "LOCAL_RANK"),
        whole(env, "LOCAL_WORLD_SIZE"),
        launcher="torchrun" if by_torchrun else "environment",
        said=pair[2],
        job=f"torchrun {run}" if run and run != "none" else None,  # its default for all jobs
        started=by_torchrun,
    )


def _started(
    env: Environment,
    launcher: str,
    job: str | None,
    rank: str,
    world_size: str,
    local_rank: str,
    local_world_size: str = "",
) -> Identity | None:
    """A process of a launcher with this name of the job, by the names of its variables."""
    pair = _pair(env, rank, world_size)
    if pair is None:
        return None
    return Identity(
        *pair[:2],
        whole(env, local_rank),
        whole(env, local_world_size),
        launcher=launcher,
        said=pair[2],
        job=f"{launcher} {job}" if job else None,
        started=True,
    )


def _open_mpi(env: Environment) -> Identity | None:
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    prefix = "OMPI_COMM_WORLD_"
    names = (f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE")
    return _started(env, "Open MPI", job, *names)


def _pmi(env: Environment) -> Identity | None:
    """MPICH's and Intel MPI's mpiexec, and `srun --mpi=pmi2`, which says no local rank."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _started(env, "PMI", env.get("PMI_JOBID"), *names)


def _slurm(env: Environment) -> Identity | None:
    """A task of srun.

    Not the shell of a job: a batch script has SLURM_PROCID=0 too, but no SLURM_STEP_ID or a
    reserved one, as has the shell that salloc starts on a node (LaunchParameters with
    use_interactive_step).  In such a shell SLURM_NTASKS is that of the job.
    """
    step = whole(env, "SLURM_STEP_ID")
    if step is None or step >= _RESERVED_STEPS:
        return None
    # `srun --preserve-env` lets SLURM_NTASKS be that of the job.
    own = "SLURM_STEP_NUM_TASKS"
    size = own if env.get(own) else "SLURM_NTASKS"
    job = f"{env['SLURM_JOB_ID']}.{step}" if env.get("SLURM_JOB_ID") else None
    me = _started(env, "Slurm", job, "SLURM_PROCID", size, "SLURM_LOCALID")
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return me and dataclasses.replace(
        me, local_world_size=tasks_here(env), first_host=first_host(hosts) if hosts else None
    )


def _kubernetes(env: Environment) -> Identity | None:
    """A pod of an indexed Job, which is named after it; the world size is not known."""
    index = whole(env, "JOB_COMPLETION_INDEX")
    name, dash, end = env.get("HOSTNAME", "").rpartition("-")
    if index is None or not dash or end != str(index):
        return None
    return Identity(index, 0, launcher="Kubernetes", job=f"Kubernetes {name}")


def tasks_here(env: Environment) -> int | None:
    """How many tasks of a Slurm step run on this host: "2(x3),1" means 2, 2, 2 and 1."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    node = whole(env, "SLURM_NODEID")
    if not text or node is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: "a[03-05,9]-x,b" begins with "a03-x"."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    first = match[0] if match else hosts
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _unused(env: Environment) -> str:
    """What a user may have meant who is in a Slurm job but did not use srun."""
    tasks = env.get("SLURM_NTASKS")
    if not tasks or tasks == "1":
        return ""
    return f" SLURM_NTASKS={tasks} does not count, as srun did not start it."


def _refuse_stale(me: Identity, other: Identity) -> None:
    """RANK and WORLD_SIZE by hand must not hide the processes that a launcher started.

    More ranks than the launcher's are all right: each of its processes may have started several.
    """
    smaller = me.world_size < other.world_size
    if smaller or (me.world_size == other.world_size and me.rank != other.rank):
        raise ValueError(
            f"{me.said} contradict {other.said} of {other.launcher}. Unset RANK and WORLD_SIZE if "
            "they are left over from something else; if they are meant, pass them to init as "
            "arguments."
        )


def _completed(me: Identity, other: Identity) -> Identity:
    """`me`, with what it does not know from `other`, which is the same process."""
    if me.local_rank is None and me.local_world_size is None:
        local = (other.local_rank, other.local_world_size)
    else:
        local = (me.local_rank, me.local_world_size)
    return dataclasses.replace(
        me,
        local_rank=local[0],
        local_world_size=local[1],
        job=me.job or other.job,
        first_host=me.first_host or other.first_host,
        started=me.started or other.started,
    )


def _with_locals(
    me: Identity, env: Environment, local_rank: int | None, master_addr: str | None
) -> Identity:
    """`me` with the local rank and local world size, from wherever they can be known."""
    if not env.get("RANK"):  # a wrapper may have set LOCAL_RANK beside a launcher's variables
        me = dataclasses.replace(
            me,
            local_rank=_same(env, "LOCAL_RANK", me.local_rank, me),
            local_world_size=_same(env, "LOCAL_WORLD_SIZE", me.local_world_size, me),
        )
    addr = master_addr or env.get("MASTER_ADDR", "")
    if me.local_world_size is None and (me.world_size == 1 or is_loopback(addr)):
        me = dataclasses.replace(me, local_world_size=me.world_size)
    if me.local_rank is None and me.local_world_size == me.world_size:
        me = dataclasses.replace(me, local_rank=me.rank)
    if local_rank is not None:
        me = dataclasses.replace(me, local_rank=local_rank)
    return me


def _same(env: Environment, name: str, known: int | None, me: Identity) -> int | None:
    """A variable's value, which must be what is known already; what is known if it is not set."""
    value = whole(env, name)
    if value is None or known is None or value == known:
        return known if value is None else value
    raise ValueError(
        f"{name}={value} contradicts {me.launcher}, which says {known} for rank {me.rank} of "
        f"{me.world_size}. Unset {name}."
    )


def is_loopback(addr: str) -> bool:
    """Whether an address can only be this host's own."""
    if addr == "localhost":
        return True
    try:
        return ipaddress.ip_address(addr).is_loopback
    except ValueError:  # a host's name
        return False


def _check(me: Identity) -> None:
    """Raises ValueError for numbers that cannot be."""
    if not 0 <= me.rank < me.world_size:
        raise ValueError(
            f"{me.said} ({me.launcher}): a rank is 0 to the world size less 1, so nobody could be "
            f"rank {me.rank} of {me.world_size}"
        )
    local, size = me.local_rank, me.local_world_size
    if size is not None and not 0 < size <= me.world_size:
        raise ValueError(
            f"rank {me.rank} ({me.launcher}): {size} ranks on this host cannot be, of "
            f"{me.world_size} in all; look at LOCAL_WORLD_SIZE"
        )
    if local is not None and not 0 <= local < (me.world_size if size is None else size):
        raise ValueError(
            f"rank {me.rank} of {me.world_size} ({me.launcher}): its local rank cannot be {local} "
            f"where {me.world_size if size is None else size} ranks are; look at LOCAL_RANK"
        )
