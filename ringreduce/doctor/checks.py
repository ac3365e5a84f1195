"""The checks of versions, variables, limits, memory, cores and GPUs: pure functions of facts.

Those in `OF_A_RANK` take one rank's facts, those in `OF_A_HOST` the facts of all ranks of a host,
those in `OF_A_JOB` the facts of all ranks.  Each yields findings.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence

from ringreduce.doctor.facts import Facts
from ringreduce.doctor.report import Finding, Severity, ranks_text

# The minor releases of torch that ringreduce is tested with (docs/torch.md).
TESTED_TORCH = tuple((2, minor) for minor in range(11, 16))

# What a rank may need: torch and the program have descriptors and threads of their own.
_FEW_FILES, _FILES_PER_PEER = 256, 8
_THREADS_PER_RANK = 16
_ENOUGH_MEMORY = 256 << 20  # for a rank's buckets and what the program allocates at its start
_SMALL_SHM = 64 << 20  # Docker's default
_ALIKE = 0.8
_MUCH_STEAL, _MUCH_PRESSURE = 0.1, 0.3

Ranks = Sequence[Facts]


def _finding(
    ranks: Ranks, check: str, severity: Severity, found: str, todo: str, host: bool = True
) -> Finding:
    where = ranks[0].host if host and len({one.host for one in ranks}) == 1 else ""
    return Finding(check, severity, found, todo, tuple(one.rank for one in ranks), where)


# ---- versions and builds


def torch_version(one: Facts) -> Iterator[Finding]:
    parts = one.torch.split("+")[0].split(".")[:2]
    release = tuple(int(part) for part in parts if part.isdecimal())
    if release in TESTED_TORCH:
        return
    oldest, newest = (".".join(map(str, TESTED_TORCH[i])) for i in (0, -1))
    old = release < TESTED_TORCH[0]
    yield _finding(
        [one],
        "torch-version",
        "fault" if old else "note",
        f"torch {one.torch}; ringreduce is tested with {oldest} to {newest}",
        f"pip install 'torch>={oldest}', then build ringreduce again."
        if old
        else "Run ringreduce's tests with it first: make torch-smoke NEWEST=VERSION.",
    )


def build(one: Facts) -> Iterator[Finding]:
    """What was left out of the build, where it may be missed."""
    if one.gpus and not one.cuda_built:
        yield _finding(
            [one],
            "build-cuda",
            "fault",
            f"torch sees {one.gpus} GPUs, but this ringreduce was built without CUDA: "
            f"{one.cuda_missing}",
            "Install an nvcc of torch's CUDA version and build with RINGREDUCE_CUDA=1 "
            "(docs/gpu.md); CPU tensors work as they are.",
        )
    if not one.openssl:
        yield _finding(
            [one],
            "build-tls",
            "note",
            "built without OpenSSL 3, so connections between hosts cannot be encrypted",
            "If RINGREDUCE_TLS=1 is wanted: apt-get install libssl-dev, and build again.",
        )


def same_versions(ranks: Ranks) -> Iterator[Finding]:
    rows: tuple[tuple[str, Severity, str], ...] = (
        ("ringreduce", "fault", "ranks whose wire protocols differ refuse to form a group"),
        ("torch", "fault", "their groups and results may differ"),
        ("python", "note", "objects that one rank pickles another may not read"),
    )
    for name, severity, why in rows:
        whose = _by_value((getattr(one, name), one) for one in ranks)
        if len(whose) > 1:
            usual = max(whose.values(), key=len)
            other = [one for one in ranks if one not in usual]
            yield _finding(
                other,
                f"same-{name}",
                severity,
                f"versions of {name} differ: {_whose(whose)}; {why}",
                f"Install the same {name} on all hosts.",
            )


def _by_value(pairs: Iterable[tuple[str, Facts]]) -> dict[str, list[Facts]]:
    whose: dict[str, list[Facts]] = {}
    for value, one in pairs:
        whose.setdefault(value, []).append(one)
    return whose


def _whose(values: dict[str, list[Facts]]) -> str:
    """ "a on ranks 0, 1; b on rank 2" """
    return "; ".join(
        f"{value or 'nothing'} on {ranks_text([one.rank for one in whose])}"
        for value, whose in values.items()
    )


# ---- variables


def variables(one: Facts) -> Iterator[Finding]:
    for row in one.variables:
        if row["error"]:
            yield _finding(
                [one],
                "variable",
                "fault",
                row["error"],
                f"Correct or unset {row['name']}; values: {row['values']}.",
            )


def unknown_variables(one: Facts) -> Iterator[Finding]:
    known = {row["name"].removeprefix("RINGREDUCE_"): row["name"] for row in one.variables}
    for name in one.unknown_variables:
        end = name.removeprefix("RINGREDUCE_")
        close = difflib.get_close_matches(end, known, 1, _ALIKE)
        yield _finding(
            [one],
            "unknown-variable",
            "fault" if close else "note",
            f"{name} is set, and ringreduce knows no such variable: it has no effect",
            f"Did you mean {known[close[0]]}?"
            if close
            else "python -m ringreduce.config lists all.",
        )


def same_variables(ranks: Ranks) -> Iterator[Finding]:
    rows = {row["name"]: row for one in ranks for row in one.variables}
    for name, row in rows.items():
        if row["holds"] != "the same on all ranks":
            continue
        whose = _by_value(
            (each["value"], one) for one in ranks for each in one.variables if each["name"] == name
        )
        if len(whose) > 1:
            yield _finding(
                ranks,
                "same-variables",
                "fault",
                f"{name} must be the same on all ranks: {_whose(whose)}",
                f"Export {name} on every host, or let the launcher pass it on (mpirun -x, "
                "mpiexec -genv, srun --export).",
                host=False,
            )


# ---- limits and memory


def shared_memory(one: Facts) -> Iterator[Finding]:
    if one.memfd_error:
        yield _finding(
            [one],
            "shared-memory",
            "fault",
            f"memfd_create does not work, which the ranks of a host need: {one.memfd_error}",
            "Allow memfd_create in the seccomp profile and let the cgroup have 1 MiB more; "
            "RINGREDUCE_WIRE=tcp does without shared memory.",
        )
    if one.unix_error:
        yield _finding(
            [one],
            "unix-socket",
            "fault",
            f"no descriptor can be passed over an abstract Unix socket: {one.unix_error}",
            "Allow AF_UNIX in the sandbox (systemd: RestrictAddressFamilies); "
            "RINGREDUCE_WIRE=tcp does without.",
        )
    if one.pidfd_error:
        yield _finding(
            [one],
            "pidfd",
            "note",
            f"pidfd_open does not work: {one.pidfd_error}",
            "Nothing: ringreduce sees the end of a rank by a pipe instead.",
        )


def open_files(one: Facts) -> Iterator[Finding]:
    need = _FEW_FILES + _FILES_PER_PEER * (one.world_size - 1)
    if one.open_files is not None and one.open_files < need:
        yield _finding(
            [one],
            "open-files",
            "fault",
            f"ulimit -n is {one.open_files}; a rank of {one.world_size} may need {need} "
            "descriptors for sockets, shared memory and files",
            f"ulimit -n {max(need, 4096)} before the launcher starts (systemd: LimitNOFILE, "
            "Docker: --ulimit nofile).",
        )


def thread_limit(ranks: Ranks) -> Iterator[Finding]:
    need = sum(_THREADS_PER_RANK + one.threads for one in ranks)
    limits = [one.threads_limit - one.threads_used for one in ranks if one.threads_limit]
    if limits and min(limits) < need:
        yield _finding(
            ranks,
            "threads-limit",
            "fault",
            f"{min(limits)} more threads are allowed (ulimit -u, pids.max of the cgroup); "
            f"{len(ranks)} ranks may need {need}",
            f"ulimit -u {4 * need}, or Docker: --pids-limit {4 * need}.",
        )


def memory(ranks: Ranks) -> Iterator[Finding]:
    free = min(one.memory_free for one in ranks)
    limit = min((one.memory_limit for one in ranks if one.memory_limit), default=None)
    of = f" of the cgroup's {limit >> 20}" if limit else ""
    need = len(ranks) * _ENOUGH_MEMORY
    if free < need:
        staging = len(ranks) * _staging_bytes(ranks[0])
        yield _finding(
            ranks,
            "memory",
            "fault" if free < staging else "slow",
            f"{free >> 20} MiB{of} are free for {len(ranks)} ranks, whose shared memory takes "
            f"{staging >> 20} MiB, and gradients and buckets come on top",
            "Give the cgroup more memory (Docker: --memory, Slurm: --mem, Kubernetes: "
            "limits.memory), or start fewer ranks there.",
        )


def _staging_bytes(one: Facts) -> int:
    """A rank's shared memory: slots of the exchange and of the link (docs/options.md)."""
    set_now = {
        row["name"]: int(row["value"])
        for row in one.variables
        if row["source"] == "environment" and row["value"].isdecimal()
    }
    slot = set_now.get("RINGREDUCE_SLOT_BYTES", 256 << 10)
    return 2 * slot * set_now.get("RINGREDUCE_SLOTS", 4)


def shm_size(one: Facts) -> Iterator[Finding]:
    if one.shm_bytes is not None and one.shm_bytes <= _SMALL_SHM:
        yield _finding(
            [one],
            "shm-size",
            "note",
            f"/dev/shm has {one.shm_bytes >> 20} MiB; ringreduce does not use it, the workers of a "
            "DataLoader do",
            "With num_workers > 0: docker run --shm-size 1g, or mount a larger tmpfs.",
        )


def one_user(ranks: Ranks) -> Iterator[Finding]:
    users = sorted({one.uid for one in ranks})
    if len(users) > 1:
        yield _finding(
            ranks,
            "user",
            "fault",
            f"the ranks of this host run as several users: {', '.join(map(str, users))}",
            "Start all ranks of a job as one user.",
        )


# ---- cores


def _usable(ranks: Ranks) -> tuple[set[int], float]:
    """The cores that some rank may use, and how many the cgroup lets them use."""
    union = {core for one in ranks for core in one.affinity}
    quota = min((one.quota for one in ranks if one.quota is not None), default=float("inf"))
    return union, min(quota, len(union))


def cores(ranks: Ranks) -> Iterator[Finding]:
    """Ranks against cores, masks and the quota; then their threads."""
    union, usable = _usable(ranks)
    count, total = len(ranks), ranks[0].cores
    if count > len(union) and len(union) < min(count, total):
        yield _finding(
            ranks,
            "affinity",
            "slow",
            f"{count} ranks are bound to {len(union)} of {total} cores "
            f"({', '.join(map(str, sorted(union)))}), so they wait for each other",
            "Bind each rank to cores of its own: mpirun --bind-to core, srun --cpu-bind=cores "
            "--cpus-per-task=N, or start the launcher without taskset.",
        )
    elif count > len(union):
        yield _finding(
            ranks,
            "cores",
            "slow",
            f"{count} ranks on {len(union)} cores",
            f"Start at most {len(union)} ranks on this host.",
        )
    elif usable < count:
        yield _finding(
            ranks,
            "quota",
            "slow",
            f"the cgroup's quota (cpu.max) is {usable:g} cores for {count} ranks, which are "
            "stopped for the rest of each period",
            f"Give it {count} cores or more (Docker: --cpus, Kubernetes: limits.cpu), or start "
            f"{max(1, int(usable))} ranks.",
        )
    else:
        yield from _overlap(ranks)
        yield from _threads(ranks, usable)


def _overlap(ranks: Ranks) -> Iterator[Finding]:
    """Ranks that share a mask with too few cores, while others are free."""
    masks: dict[tuple[int, ...], list[Facts]] = {}
    for one in ranks:
        masks.setdefault(tuple(one.affinity), []).append(one)
    for mask, whose in masks.items():
        if len(whose) > len(mask):
            yield _finding(
                whose,
                "affinity",
                "slow",
                f"{len(whose)} ranks are bound to the same {len(mask)} cores "
                f"({', '.join(map(str, mask))}) of {ranks[0].cores}",
                "Bind each rank to cores of its own: mpirun --bind-to core, srun --cpu-bind=cores.",
            )


def _threads(ranks: Ranks, usable: float) -> Iterator[Finding]:
    threads = sum(one.threads for one in ranks)
    most = max(1, int(usable) // len(ranks))
    if threads > usable and max(one.threads for one in ranks) > 1:
        given = ranks[0].environment.get("OMP_NUM_THREADS")
        said = f"OMP_NUM_THREADS is {given}" if given else "OMP_NUM_THREADS is not set"
        yield _finding(
            ranks,
            "threads",
            "slow",
            f"{len(ranks)} ranks with {threads} threads in all on {usable:g} cores ({said})",
            f"export OMP_NUM_THREADS={most} before the launcher starts.",
        )


def numa(ranks: Ranks) -> Iterator[Finding]:
    nodes = ranks[0].nodes
    across = [
        one for one in ranks if sum(bool(set(one.affinity) & set(node)) for node in nodes) > 1
    ]
    if len(ranks) > 1 and across:
        yield _finding(
            across,
            "numa",
            "note",
            f"{len(across)} ranks may run on any of {len(nodes)} NUMA nodes, so their memory may "
            "be on another one",
            "Bind each to a node: torchrun --numa-binding node (GPUs), mpirun --map-by numa "
            "--bind-to numa, srun --cpu-bind=ldoms.",
        )


def disturbance(ranks: Ranks) -> Iterator[Finding]:
    steal = max(one.steal for one in ranks)
    if steal > _MUCH_STEAL:
        yield _finding(
            ranks,
            "steal",
            "note",
            f"the hypervisor took {steal:.0%} of the time of this machine's cores",
            "Other virtual machines share its cores: expect late ranks, or take dedicated cores.",
        )
    pressure = max(one.pressure for one in ranks)
    if pressure > _MUCH_PRESSURE:
        groups = ", and sched_autogroup shares cores by session" if ranks[0].autogroup else ""
        yield _finding(
            ranks,
            "pressure",
            "note",
            f"in the last 10 s some thread waited for a core for {pressure:.0%} of the time "
            f"(/proc/pressure/cpu){groups}",
            "Look what else runs there (top).",
        )


# ---- GPUs


def gpu_driver(one: Facts) -> Iterator[Finding]:
    hidden = one.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if one.torch_cuda and one.gpu_driver and not one.gpus and not hidden:
        yield _finding(
            [one],
            "gpu-driver",
            "fault",
            f"there is an NVIDIA driver, but torch for CUDA {one.torch_cuda} sees no GPU",
            "nvidia-smi tells the driver's CUDA version, which must not be older; in a container "
            "look at --gpus.",
        )


def gpus(ranks: Ranks) -> Iterator[Finding]:
    for sharing in _by_value((one.gpu, one) for one in ranks if one.gpu).values():
        if len(sharing) > 1:
            yield _finding(
                sharing,
                "gpu-shared",
                "slow",
                f"{len(sharing)} ranks would use one of {sharing[0].gpus} GPUs",
                f"Start {sharing[0].gpus} ranks on this host, or look at CUDA_VISIBLE_DEVICES.",
            )
    without = ranks[0].no_peer_access
    if without:
        pairs = ", ".join(f"{a}-{b}" for a, b in without if a < b) or "in one direction"
        yield _finding(
            ranks,
            "gpu-peers",
            "slow",
            f"GPUs have no access to each other's memory: {pairs}",
            "nvidia-smi topo -m; a virtual machine or the IOMMU (ACS) may forbid it. Data goes "
            "through host memory.",
        )


OF_A_RANK: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    torch_version,
    build,
    variables,
    unknown_variables,
    shared_memory,
    open_files,
    shm_size,
    gpu_driver,
)
OF_A_HOST: tuple[Callable[[Ranks], Iterator[Finding]], ...] = (
    one_user,
    thread_limit,
    memory,
    cores,
    numa,
    disturbance,
    gpus,
)
OF_A_JOB: tuple[Callable[[Ranks], Iterator[Finding]], ...] = (same_versions, same_variables)
