"""The checks of versions, variables, limits, memory, cores and GPUs: pure functions of facts."""

import difflib
import re
from collections.abc import Iterable

from ringreduce.doctor.exchange import Gathered
from ringreduce.doctor.facts import Facts
from ringreduce.doctor.judge import Ranks, Said, check
from ringreduce.doctor.report import ranks_text

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


def _torch(one: Facts) -> tuple[tuple[int, ...], str]:
    """Its minor release, and what to say of it."""
    release = tuple(int(part) for part in re.findall(r"\d+", one.torch)[:2])
    return release, f"torch {one.torch}; ringreduce is tested with {OLDEST} to {NEWEST}"


@check("rank", "fault", "torch-version")
def old_torch(one: Facts) -> Said:
    release, said = _torch(one)
    if release < TESTED_TORCH[0]:
        yield said, f"pip install 'torch>={OLDEST}', then build ringreduce again."


@check("rank", "note", "torch-version")
def new_torch(one: Facts) -> Said:
    release, said = _torch(one)
    if release > TESTED_TORCH[-1]:
        yield said, "Run ringreduce's tests with it first: make torch-smoke NEWEST=VERSION."


@check("rank", "fault", "build-cuda")
def build_cuda(one: Facts) -> Said:
    if one.gpus and not one.cuda_built:
        yield (
            f"torch sees {one.gpus} GPUs, but this ringreduce was built without CUDA: "
            f"{one.cuda_missing}",
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


def _same_version(gathered: Gathered, name: str, why: str) -> Said:
    whose = _by_value((getattr(one, name), one) for one in gathered.facts)
    if len(whose) > 1:
        usual = max(whose.values(), key=len)
        yield (
            f"versions of {name} differ: {_whose(whose)}; {why}",
            f"Install the same {name} on all hosts.",
            [rank for ranks in whose.values() if ranks is not usual for rank in ranks],
        )


@check("job", "fault", "same-ringreduce")
def same_ringreduce(gathered: Gathered) -> Said:
    return _same_version(gathered, "ringreduce", "ranks of two versions may refuse to form a group")


@check("job", "fault", "same-torch")
def same_torch(gathered: Gathered) -> Said:
    return _same_version(gathered, "torch", "their groups and results may differ")


@check("job", "note", "same-python")
def same_python(gathered: Gathered) -> Said:
    return _same_version(gathered, "python", "an object that a rank pickles may be unreadable")


# ---- variables


@check("rank", "fault", "variable")
def variables(one: Facts) -> Said:
    for row in one.variables:
        if row["error"]:
            yield row["error"], f"Correct or unset {row['name']}; values: {row['values']}."


def _unknown(one: Facts) -> Iterable[tuple[str, list[str]]]:
    """Each unknown variable, and known ones that are much like it."""
    known = {row["name"].removeprefix("RINGREDUCE_"): row["name"] for row in one.variables}
    for name in one.unknown_variables:
        close = difflib.get_close_matches(name.removeprefix("RINGREDUCE_"), known, 1, _ALIKE)
        yield name, [known[end] for end in close]


@check("rank", "fault", "unknown-variable")
def misspelt_variable(one: Facts) -> Said:
    for name, close in _unknown(one):
        if close:
            yield f"ringreduce knows no variable {name}: no effect", f"Did you mean {close[0]}?"


@check("rank", "note", "unknown-variable")
def unknown_variable(one: Facts) -> Said:
    names = [name for name, close in _unknown(one) if not close]
    if names:
        found = f"ringreduce knows no variable {', '.join(names)}: no effect"
        yield found, "python -m ringreduce.config lists all."


@check("job", "fault", "same-variables")
def same_variables(gathered: Gathered) -> Said:
    rows = [(row, one) for one in gathered.facts for row in one.variables]
    for name in dict.fromkeys(r["name"] for r, _ in rows if r["holds"] == "the same on all ranks"):
        whose = _by_value((row["value"], one) for row, one in rows if row["name"] == name)
        if len(whose) > 1:
            yield (
                f"{name} must be the same on all ranks: {_whose(whose)}",
                f"Export {name} on every host, or let the launcher pass it on (mpirun -x, "
                "mpiexec -genv, srun --export).",
            )


# ---- limits and memory


@check("rank", "fault", "shared-memory")
def shared_memory(one: Facts) -> Said:
    if one.memfd_error:
        yield (
            f"memfd_create does not work, which the ranks of a host need: {one.memfd_error}",
            "Allow memfd_create in the seccomp profile and let the cgroup have 1 MiB more; "
            "RINGREDUCE_WIRE=tcp does without shared memory.",
        )


@check("rank", "fault", "unix-socket")
def unix_socket(one: Facts) -> Said:
    if one.unix_error:
        yield (
            f"no descriptor can be passed over an abstract Unix socket: {one.unix_error}",
            "Allow AF_UNIX in the sandbox (systemd: RestrictAddressFamilies); "
            "RINGREDUCE_WIRE=tcp does without.",
        )


@check("rank", "fault", "open-files")
def open_files(one: Facts) -> Said:
    need = _FEW_FILES + _FILES_PER_PEER * (one.world_size - 1)
    if one.open_files is not None and one.open_files < need:
        yield (
            f"ulimit -n is {one.open_files}; a rank of {one.world_size} may need {need} "
            "descriptors for sockets, shared memory and files",
            f"ulimit -n {max(need, 4096)} before the launcher starts (systemd: LimitNOFILE, "
            "Docker: --ulimit nofile).",
        )


@check("host", "fault", "threads-limit")
def threads_limit(ranks: Ranks) -> Said:
    need = sum(_THREADS_PER_RANK + one.threads for one in ranks)
    left = min((one.threads_left for one in ranks if one.threads_left is not None), default=need)
    if left < need:
        yield (
            f"{left} more threads are allowed (ulimit -u, pids.max of the cgroup); "
            f"{len(ranks)} ranks may need {need}",
            f"ulimit -u {4 * need}, or Docker: --pids-limit {4 * need}.",
        )


@check("host", "fault", "memory")
def memory(ranks: Ranks) -> Said:
    free = min(one.memory_free for one in ranks)
    limit = min((one.memory_limit for one in ranks if one.memory_limit), default=None)
    if free < len(ranks) * _ENOUGH_MEMORY:
        of = f" of the cgroup's {limit >> 20}" if limit else ""
        yield (
            f"{free >> 20} MiB{of} are free for the gradients and buckets of {len(ranks)} ranks, "
            "which are killed when they need more",
            "Give the cgroup more memory (Docker: --memory, Slurm: --mem, Kubernetes: "
            "limits.memory), or start fewer ranks there.",
        )


@check("rank", "note", "shm-size")
def shm_size(one: Facts) -> Said:
    if one.shm_bytes is not None and one.shm_bytes <= _SMALL_SHM:
        yield (
            f"/dev/shm has {one.shm_bytes >> 20} MiB; ringreduce does not use it, the workers of a "
            "DataLoader do",
            "With num_workers > 0: docker run --shm-size 1g, or mount a larger tmpfs.",
        )


@check("host", "fault", "user")
def one_user(ranks: Ranks) -> Said:
    users = sorted({one.uid for one in ranks})
    if len(users) > 1:
        found = f"the ranks of this host run as several users: {', '.join(map(str, users))}"
        yield found, "Start all ranks of a job as one user."


# ---- cores


def _union(ranks: Ranks) -> tuple[int, ...]:
    """The cores that some rank may use."""
    return tuple(sorted({core for one in ranks for core in one.affinity}))


def _usable(ranks: Ranks) -> float:
    """How many of them the cgroup lets the ranks use."""
    return min((one.quota for one in ranks if one.quota is not None), default=len(_union(ranks)))


@check("host", "slow", "affinity")
def affinity(ranks: Ranks) -> Said:
    union = _union(ranks)
    crowded = {}
    for mask in (union, *(tuple(one.affinity) for one in ranks)):
        within = [one.rank for one in ranks if set(one.affinity) <= set(mask)]
        if len(mask) < len(within) and len(mask) < ranks[0].cores:
            crowded[mask] = within
    for mask, within in crowded.items():
        if mask == union or union not in crowded:
            yield (
                f"{len(within)} ranks are bound to {len(mask)} of {ranks[0].cores} cores "
                f"({', '.join(map(str, mask))}), so they wait for each other",
                "Bind each rank to cores of its own: mpirun --bind-to core, srun "
                "--cpu-bind=cores --cpus-per-task=N, or start the launcher without taskset.",
                within,
            )


@check("host", "slow", "cores")
def cores(ranks: Ranks) -> Said:
    count = len(_union(ranks))
    if count == ranks[0].cores < len(ranks):
        yield f"{len(ranks)} ranks on {count} cores", f"Start at most {count} ranks on this host."


@check("host", "slow", "quota")
def quota(ranks: Ranks) -> Said:
    usable = _usable(ranks)
    if usable < len(ranks) <= len(_union(ranks)):
        yield (
            f"the cgroup's quota (cpu.max) is {usable:g} cores for {len(ranks)} ranks, which are "
            "stopped for the rest of each period",
            f"Give it {len(ranks)} cores or more (Docker: --cpus, Kubernetes: limits.cpu), or "
            f"start {max(1, int(usable))} ranks.",
        )


@check("host", "slow", "threads")
def threads(ranks: Ranks) -> Said:
    """Where there are cores enough for the ranks."""
    usable = min(_usable(ranks), len(_union(ranks)))
    total = sum(one.threads for one in ranks)
    if len(ranks) <= usable < total:
        given = ranks[0].environment.get("OMP_NUM_THREADS")
        said = f"OMP_NUM_THREADS is {given}" if given else "OMP_NUM_THREADS is not set"
        yield (
            f"{len(ranks)} ranks with {total} threads in all on {usable:g} cores ({said})",
            f"export OMP_NUM_THREADS={int(usable) // len(ranks)} before the launcher starts.",
        )


@check("host", "note", "numa")
def numa(ranks: Ranks) -> Said:
    nodes = [set(node) for node in ranks[0].nodes]
    across = [o.rank for o in ranks if sum(bool(node & set(o.affinity)) for node in nodes) > 1]
    if len(ranks) > 1 and across:
        yield (
            f"{len(across)} ranks may run on any of {len(nodes)} NUMA nodes, so their memory may "
            "be on another one",
            "Bind each to a node: torchrun --numa-binding node (GPUs), mpirun --map-by numa "
            "--bind-to numa, srun --cpu-bind=ldoms.",
            across,
        )


@check("host", "note", "steal")
def steal(ranks: Ranks) -> Said:
    share = max(one.steal for one in ranks)
    if share > _MUCH_STEAL:
        yield (
            f"the hypervisor took {share:.0%} of the time of this machine's cores",
            "Other virtual machines share its cores: expect late ranks, or take dedicated cores.",
        )


@check("host", "note", "pressure")
def pressure(ranks: Ranks) -> Said:
    share = max(one.pressure for one in ranks)
    if share > _MUCH_PRESSURE:
        yield (
            f"in the last minute some thread waited for a core for {share:.0%} of the time "
            "(/proc/pressure/cpu)",
            "Look what else runs there (top): ranks of an earlier job, perhaps.",
        )


# ---- GPUs


@check("rank", "fault", "gpu-driver")
def gpu_driver(one: Facts) -> Said:
    hidden = one.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if one.torch_cuda and one.gpu_driver and not one.gpus and not hidden:
        yield (
            f"there is an NVIDIA driver, but torch for CUDA {one.torch_cuda} sees no GPU",
            "nvidia-smi tells the driver's CUDA version, which must not be older; in a container "
            "look at --gpus.",
        )


@check("host", "slow", "gpu-shared")
def gpu_shared(ranks: Ranks) -> Said:
    seen = ranks[0].gpus
    for sharing in _by_value((one.gpu, one) for one in ranks if one.gpu).values():
        if len(sharing) > 1:
            yield (
                f"{len(sharing)} ranks would use one of {seen} GPUs",
                f"Start {seen} ranks on this host, or look at CUDA_VISIBLE_DEVICES.",
                sharing,
            )


@check("host", "note", "gpu-peers")
def gpu_peers(ranks: Ranks) -> Said:
    without = ranks[0].no_peer_access
    if without:
        pairs = ", ".join(f"{a}-{b}" for a, b in without if a < b) or "in one direction"
        yield (
            f"GPUs have no access to each other's memory: {pairs}; data goes through host memory",
            "nvidia-smi topo -m shows how they are connected; a virtual machine or the IOMMU (ACS) "
            "may forbid it.",
        )
