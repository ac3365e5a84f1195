"""The checks of versions, variables, limits, memory, cores and GPUs: pure functions of facts."""

import difflib
import errno
import os
import re
from collections.abc import Callable, Iterable

from ringreduce.core.words import ranks_text
from ringreduce.tools.doctor.exchange import MOST_RANKS, Gathered
from ringreduce.tools.doctor.facts import Facts
from ringreduce.tools.doctor.judge import Found, Ranks, check
from ringreduce.tools.doctor.report import Finding, counted, fault, note, slow

# The minor releases of torch that ringreduce is tested with (docs/torch.md).
TESTED_TORCH = tuple((2, minor) for minor in range(11, 16))
OLDEST, NEWEST = (".".join(map(str, TESTED_TORCH[i])) for i in (0, -1))

# What a rank may need: torch and the program have descriptors and threads of their own.
_FEW_FILES, _FILES_PER_PEER = 256, 4  # a group takes 3 for each peer on its host
_THREADS_PER_RANK = 16
_ENOUGH_MEMORY = 128 << 20  # for a rank's buckets and what the program allocates at its start
_SMALL_SHM = 64 << 20  # Docker's default
_ALIKE = 0.8
_MUCH_STEAL, _MUCH_PRESSURE = 0.1, 0.3


# ---- versions and builds


@check("rank")
def versions(one: Facts) -> Found:
    release = tuple(int(part) for part in re.findall(r"\d+", one.torch)[:2])
    found = f"torch {one.torch}; ringreduce is tested with {OLDEST} to {NEWEST}"
    if release < TESTED_TORCH[0]:
        todo = f"pip install 'torch>={OLDEST}', then build ringreduce again."
        yield fault("torch-version", found, todo)
    elif release > TESTED_TORCH[-1]:
        todo = "Run ringreduce's tests with it first: make torch-smoke NEWEST=VERSION."
        yield note("torch-version", found, todo)
    if one.gpus and not one.cuda_built:
        yield fault(
            "build-cuda",
            f"{one.gpus} GPUs, and a ringreduce that was built without CUDA: {one.cuda_missing}",
            "Install an nvcc of torch's CUDA version and build with RINGREDUCE_CUDA=1 "
            "(docs/gpu.md); CPU tensors work as they are.",
        )


def _by_value(pairs: Iterable[tuple[str, Facts]]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    whose: dict[str, list[int]] = {}
    for value, one in pairs:
        whose.setdefault(value, []).append(one.rank)
    return whose


def _whose(values: dict[str, list[int]]) -> str:
    """ "a on ranks 0, 1; b on rank 2" """
    return "; ".join(f"{value or 'nothing'} on {ranks_text(r)}" for value, r in values.items())


@check("job")
def same_versions(gathered: Gathered) -> Found:
    for name, kind, why in (
        ("ringreduce", fault, "ranks of two versions may refuse to form a group"),
        ("torch", fault, "their groups and results may differ"),
        ("python", note, "objects that one rank pickles another may not read"),
    ):
        whose = _by_value((getattr(one, name), one) for one in gathered.facts)
        if len(whose) > 1:
            usual = max(whose.values(), key=len)
            yield kind(
                f"same-{name}",
                f"versions of {name} differ: {_whose(whose)}; {why}",
                f"Install the same {name} on all hosts.",
                [rank for ranks in whose.values() if ranks is not usual for rank in ranks],
            )


# ---- variables


@check("rank")
def variables(one: Facts) -> Found:
    for row in one.variables:
        if row["error"]:
            todo = f"Correct or unset {row['name']}; values: {row['values']}."
            yield fault("variable", row["error"], todo)
    known = {row["name"].removeprefix("RINGREDUCE_"): row["name"] for row in one.variables}
    for name in one.unknown_variables:
        found = f"ringreduce knows no variable {name}: no effect"
        close = difflib.get_close_matches(name.removeprefix("RINGREDUCE_"), known, 1, _ALIKE)
        if close:
            yield fault("unknown-variable", found, f"Did you mean {known[close[0]]}?")
        else:
            yield note("unknown-variable", found, "python -m ringreduce.config lists all.")


@check("job")
def same_variables(gathered: Gathered) -> Found:
    rows = [(row, one) for one in gathered.facts for row in one.variables]
    for name in dict.fromkeys(r["name"] for r, _ in rows if r["holds"] == "the same on all ranks"):
        whose = _by_value((row["value"], one) for row, one in rows if row["name"] == name)
        if len(whose) > 1:
            yield fault(
                "same-variables",
                f"{name} must be the same on all ranks: {_whose(whose)}",
                "Export it on every host, or by mpirun -x, mpiexec -genv, srun --export.",
            )


# ---- limits and memory


def _weight(one: Facts) -> Callable[..., Finding]:
    """A fault of what a group needs; a note if the group of all ranks does without it."""
    return note if one.all_error == "" else fault


def _too_large(text: str | None) -> bool:
    """An error of ulimit -f, which counts shared memory as a file."""
    return os.strerror(errno.EFBIG) in (text or "")


@check("rank")
def limits(one: Facts) -> Found:
    said = [one.memfd_error, one.alone_error, one.all_error, *one.folders.values()]
    large = next(filter(_too_large, said), "") or ""
    if large and one.file_size is not None:
        yield _weight(one)(
            "file-size",
            f"ulimit -f is {one.file_size >> 10} KiB, and shared memory counts as a file: {large}",
            "ulimit -f unlimited before the launcher starts (systemd: LimitFSIZE, Docker: "
            "--ulimit fsize).",
        )
    elif one.memfd_error:
        yield _weight(one)(
            "shared-memory",
            f"no shared memory can be made, which the ranks of a host need: {one.memfd_error}",
            "Allow memfd_create, ftruncate, fcntl and mmap in the seccomp profile; with several "
            "ranks RINGREDUCE_WIRE=tcp does without.",
        )
    if one.unix_error:
        yield _weight(one)(
            "unix-socket",
            f"the ranks of a host cannot meet by Unix sockets: {one.unix_error}",
            "Allow AF_UNIX (systemd: RestrictAddressFamilies) and socketpair (seccomp); with "
            "several ranks RINGREDUCE_WIRE=tcp does without.",
        )
    if one.loopback_error:
        yield _weight(one)(
            "loopback",
            "the loopback interface carries nothing, and this host reaches its own addresses by "
            f"no other: {one.loopback_error}",
            "ip link set dev lo up; a container needs a network namespace where it is up.",
        )
    if not one.proc:
        kind = fault if one.all_error else note
        yield kind(
            "proc",
            "there is no /proc: hosts without it are taken for one, and cgroups are not seen",
            "mount -t proc proc /proc; or give each host a RINGREDUCE_HOSTID of its own.",
        )
    need = _FEW_FILES + _FILES_PER_PEER * (one.world_size - 1)
    if one.world_size > MOST_RANKS:
        yield fault(
            "world-size",
            f"the world size is {one.world_size} ({one.launcher}); a job has {MOST_RANKS} ranks at "
            "most",
            "Correct WORLD_SIZE, or the launcher's number of processes.",
        )
    elif one.open_files is not None and one.open_files < need:
        yield fault(
            "open-files",
            f"ulimit -n is {one.open_files}; a rank of {one.world_size} may need {need}",
            f"ulimit -n {max(need, 4096)} before the launcher starts (systemd: LimitNOFILE, "
            "Docker: --ulimit nofile).",
        )
    for name, error in one.folders.items():
        if error and not (_too_large(error) and one.file_size is not None):
            yield fault(
                "folder",
                f"no file can be made where {name} says ({one.environment.get(name, '/tmp')}): "
                f"{error}",
                f"Let it name a folder that user {one.uid} may write to, or unset it."
                if name in one.environment
                else "Set TMPDIR to a folder that can be written to.",
            )
    if one.shm_bytes is not None and one.shm_bytes <= _SMALL_SHM:
        yield note(
            "shm-size",
            f"/dev/shm has {one.shm_bytes >> 20} MiB, for the workers of a DataLoader",
            "With num_workers > 0: docker run --shm-size 1g, or mount a larger tmpfs.",
        )


@check("host")
def limits_of_host(ranks: Ranks) -> Found:
    need = sum(_THREADS_PER_RANK + one.threads for one in ranks)
    left = min((one.threads_left for one in ranks if one.threads_left is not None), default=need)
    if left < need:
        yield fault(
            "threads-limit",
            f"{left} more threads are allowed; {counted(len(ranks), 'rank')} may need {need}",
            f"ulimit -u {4 * need}, or the cgroup's pids.max (Docker: --pids-limit {4 * need}).",
        )
    free = min(one.memory_free for one in ranks)
    limit = min((one.memory_limit for one in ranks if one.memory_limit), default=0)
    if free < len(ranks) * _ENOUGH_MEMORY:
        of = f" of the cgroup's {limit >> 20}" if limit else ""
        yield fault(
            "memory",
            f"{free >> 20} MiB{of} are free for the buckets of {counted(len(ranks), 'rank')}",
            "Start fewer ranks there, or give the cgroup more (Docker: --memory, Slurm: --mem, "
            "Kubernetes: limits.memory).",
        )
    users = sorted({one.uid for one in ranks})
    if len(users) > 1:
        found = f"the ranks of this host run as several users: {', '.join(map(str, users))}"
        yield fault("user", found, "Start all ranks of a job as one user.")


# ---- cores


def _union(ranks: Ranks) -> tuple[int, ...]:
    """The cores that some rank may use."""
    return tuple(sorted({core for one in ranks for core in one.affinity}))


@check("rank")
def unknown_affinity(one: Facts) -> Found:
    if one.affinity_error:
        yield slow(
            "affinity",
            f"a rank cannot ask for its cores, and takes them for one: {one.affinity_error}",
            "Allow sched_getaffinity in the seccomp profile.",
        )


@check("host")
def affinity(ranks: Ranks) -> Found:
    union = _union(ranks)
    crowded = {}
    for mask in (union, *(tuple(one.affinity) for one in ranks)):
        within = [one.rank for one in ranks if set(one.affinity) <= set(mask)]
        if len(mask) < len(within) and len(mask) < ranks[0].cores:
            crowded[mask] = within
    for mask, within in crowded.items():
        if mask == union or union not in crowded:
            yield slow(
                "affinity",
                f"{len(within)} ranks are bound to {len(mask)} of {ranks[0].cores} cores "
                f"({', '.join(map(str, mask))}), so they wait for each other",
                "Bind each rank to cores of its own: mpirun --bind-to core, srun "
                "--cpu-bind=cores --cpus-per-task=N, no taskset before the launcher.",
                within,
            )


@check("host")
def cores(ranks: Ranks) -> Found:
    """Where masks leave cores enough: these, the quota, and threads against ranks."""
    count, there = len(ranks), len(_union(ranks))
    usable = min([there, *(one.quota for one in ranks if one.quota is not None)])
    total = sum(one.threads for one in ranks)
    if count > there == ranks[0].cores:
        todo = f"Start at most {counted(there, 'rank')} on this host."
        yield slow("cores", f"{counted(count, 'rank')} on {counted(there, 'core')}", todo)
    elif usable < count <= there:
        yield slow(
            "quota",
            f"the cgroup's quota (cpu.max) is {usable:g} cores for {counted(count, 'rank')}",
            f"Give it {count} cores or more (Docker: --cpus, Kubernetes: limits.cpu).",
        )
    elif count <= usable < total:
        given = ranks[0].environment.get("OMP_NUM_THREADS")
        said = f"OMP_NUM_THREADS is {given}" if given else "OMP_NUM_THREADS is not set"
        yield slow(
            "threads",
            f"{counted(count, 'rank')} with {total} threads on {usable:g} cores ({said})",
            f"export OMP_NUM_THREADS={int(usable) // count} before the launcher starts.",
        )


@check("host")
def numa(ranks: Ranks) -> Found:
    nodes = [set(node) for node in ranks[0].nodes]
    across = [o.rank for o in ranks if sum(bool(node & set(o.affinity)) for node in nodes) > 1]
    if len(ranks) > 1 and across:
        yield note(
            "numa",
            f"{len(across)} ranks may move between {len(nodes)} NUMA nodes, away from their memory",
            "Bind each to a node: torchrun --numa-binding node (GPUs), mpirun --map-by numa "
            "--bind-to numa, srun --cpu-bind=ldoms.",
            across,
        )


@check("host")
def disturbance(ranks: Ranks) -> Found:
    stolen, waited = (max(getattr(o, name) for o in ranks) for name in ("steal", "pressure"))
    if stolen > _MUCH_STEAL:
        yield note(
            "steal",
            f"the hypervisor took {stolen:.0%} of the time of this machine's cores",
            "Other virtual machines share its cores: expect late ranks, or take dedicated cores.",
        )
    if waited > _MUCH_PRESSURE:
        yield note(
            "pressure",
            f"in the last minute, threads waited for a core {waited:.0%} of the time",
            "Look what else runs there (top): ranks of an earlier job, perhaps.",
        )


# ---- GPUs


@check("rank")
def gpu_driver(one: Facts) -> Found:
    hidden = one.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if one.torch_cuda and one.gpu_driver and not one.gpus and not hidden:
        yield fault(
            "gpu-driver",
            f"there is an NVIDIA driver, but torch for CUDA {one.torch_cuda} sees no GPU",
            "nvidia-smi tells the driver's CUDA version, which must not be older; Docker: --gpus.",
        )


@check("host")
def gpus(ranks: Ranks) -> Found:
    seen = ranks[0].gpus
    for sharing in _by_value((one.gpu, one) for one in ranks if one.gpu).values():
        if len(sharing) > 1:
            yield slow(
                "gpu-shared",
                f"{len(sharing)} ranks would use one of {seen} GPUs",
                f"Start {seen} ranks on this host, or look at CUDA_VISIBLE_DEVICES.",
                sharing,
            )
    without = ranks[0].no_peer_access
    if without:
        pairs = ", ".join(f"{a}-{b}" for a, b in without if a < b) or "in one direction"
        yield note(
            "gpu-peers",
            f"GPUs have no access to each other's memory: {pairs}; data goes through host memory",
            "nvidia-smi topo -m shows how they are connected; a VM or the IOMMU may forbid it.",
        )
