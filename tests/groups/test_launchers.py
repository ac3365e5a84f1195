"""Groups of ranks that real launchers start: torchrun, Open MPI, MPICH, and Slurm's daemons.

`make launchers` runs all of them.  What a launcher's variables say is in test_launch.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launchers
import pytest
import slurm
from hosts import ROOT
from processes import wait_until

PROGRAM = str(ROOT / "tests" / "launched.py")
MPI = pytest.mark.parametrize("kind", ["Open MPI", "MPICH"])

Records = dict[int, dict[str, Any]]  # by rank


def records(folder: Path) -> Records:
    """What the ranks wrote that came to it."""
    found = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return {record["rank"]: record for record in found}


def succeeded(done: subprocess.CompletedProcess[str], folder: Path, size: int) -> Records:
    assert done.returncode == 0, done.stdout + done.stderr
    found = records(folder)
    assert sorted(found) == list(range(size)), done.stdout + done.stderr
    for record in found.values():
        assert record["world_size"] == size
        assert record["sum"] == [2.0**size - 1]
        assert record["LOCAL_RANK"] == str(record["local_rank"])
    return found


def still_running(folder: Path) -> list[str]:
    """Processes that have this folder in their command line, as the ranks of a test do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if str(folder).encode() in words:
            found.append(f"{path.parent.name}: {b' '.join(words).decode()}")
    return found


def lost(folder: Path, victim: int, size: int, all_raise: bool) -> None:
    """Whoever lived to say so names the victim, and nobody is left."""
    assert wait_until(lambda: not still_running(folder), 30.0), still_running(folder)
    found = records(folder)
    assert victim not in found
    for record in found.values():
        assert record["error"] == "PeerLost"
        assert f"rank {victim} " in record["message"] and "is lost" in record["message"]
    if all_raise:
        assert sorted([*found, victim]) == list(range(size))


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Records]:
    """by_gloo(size): the records of a training on gloo."""
    kept: dict[int, Records] = {}

    def train(size: int) -> Records:
        if size not in kept:
            folder = tmp_path_factory.mktemp("gloo")
            command = launchers.torchrun(size, PROGRAM, str(folder), "--train", "--backend", "gloo")
            kept[size] = succeeded(launchers.run(command), folder, size)
            weights = [record["weights"] for record in kept[size].values()]
            assert weights == [weights[0]] * size and len(weights[0]) == 5
        return kept[size]

    return train


def test_torchrun(tmp_path: Path) -> None:
    done = launchers.run(launchers.torchrun(2, PROGRAM, str(tmp_path)))
    for rank, record in succeeded(done, tmp_path, 2).items():
        assert record["launcher"] == "torchrun"
        assert (record["local_rank"], record["local_world_size"]) == (rank, 2)


def test_no_launcher(tmp_path: Path) -> None:
    done = launchers.run([sys.executable, PROGRAM, str(tmp_path)])
    assert succeeded(done, tmp_path, 1)[0]["launcher"] == "none"
    assert "rank 0 of 1" in done.stderr


@MPI
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_mpirun(kind: str, size: int, tmp_path: Path) -> None:
    done = launchers.run(launchers.mpirun(size, PROGRAM, str(tmp_path), kind=kind))
    for rank, record in succeeded(done, tmp_path, size).items():
        assert record["launcher"] == ("PMI" if kind == "MPICH" else kind)
        assert (record["local_rank"], record["local_world_size"]) == (rank, size)


@pytest.mark.slow
@MPI
def test_mpirun_ends_all_when_a_rank_is_killed(kind: str, tmp_path: Path) -> None:
    command = launchers.mpirun(3, PROGRAM, str(tmp_path), "--kill", "1", kind=kind)
    done = launchers.run(command, timeout=120.0)
    assert done.returncode != 0
    lost(tmp_path, 1, 3, all_raise=False)


@pytest.mark.slow
@MPI
def test_mpirun_lets_others_go_on_when_a_rank_is_killed(kind: str, tmp_path: Path) -> None:
    """If it is told to; each of them then raises an error that names the rank."""
    if kind == "Open MPI":
        options = ["--enable-recovery"]
    else:  # it does so for an exit status, which a shell around the rank makes of a signal
        options = ["-disable-auto-cleanup", "sh", "-c", '"$@"; exit $?', "rank"]
    command = launchers.mpirun(3, *options, PROGRAM, str(tmp_path), "--kill", "1", kind=kind)
    launchers.run(command, timeout=120.0)
    lost(tmp_path, 1, 3, all_raise=True)


# Slurm, on two nodes.


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    if reason := slurm.why_not():
        pytest.skip(reason)
    with slurm.Slurm(nodes=2) as made:
        yield made


def environment() -> dict[str, str]:
    """Of a user who submits a job; `python` and `torchrun` are those of this environment."""
    env = launchers.untouched()
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    return env


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        (["-n4"], "1112"),  # Slurm fills the first node
        (["--ntasks-per-node=2"], "1122"),
        (["--ntasks-per-node=2", "--mpi=pmi2", "--distribution=cyclic"], "1212"),
    ],
    ids=["uneven", "even", "pmi2-cyclic"],
)
def test_srun(
    cluster: slurm.Slurm,
    by_gloo: Callable[[int], Records],
    options: list[str],
    nodes: str,
    tmp_path: Path,
) -> None:
    command = ["srun", "-N2", *options, sys.executable, PROGRAM, str(tmp_path), "--train"]
    done = cluster.run(*command, env=environment())
    for rank, record in succeeded(done, tmp_path, len(nodes)).items():
        assert record["launcher"] == ("PMI" if "--mpi=pmi2" in options else "Slurm")
        assert record["host"] == f"n{nodes[rank]}"
        assert record["local_rank"] == nodes[:rank].count(nodes[rank])
        assert record["local_world_size"] == nodes.count(nodes[rank])
        assert record["weights"] == by_gloo(4)[rank]["weights"]


@pytest.mark.slow
def test_srun_when_a_rank_is_killed(cluster: slurm.Slurm, tmp_path: Path) -> None:
    command = ["srun", "-N2", "-n4", "--kill-on-bad-exit=0", sys.executable, PROGRAM, str(tmp_path)]
    done = cluster.run(*command, "--kill", "2", env=environment())
    assert done.returncode != 0
    lost(tmp_path, 2, 4, all_raise=True)


MPI_JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
HOST0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec {command}
"""


@pytest.mark.slow
@MPI
def test_mpirun_on_two_nodes(cluster: slurm.Slurm, kind: str, tmp_path: Path) -> None:
    """mpirun starts a daemon on each node of its job by srun; ranks are told where rank 0 is."""
    options = {
        "Open MPI": "-x MASTER_ADDR=$HOST0 -x MASTER_PORT=29500",
        "MPICH": "-genv MASTER_ADDR $HOST0 -genv MASTER_PORT 29500",
    }[kind].split()
    command = launchers.mpirun(4, *options, PROGRAM, str(tmp_path), kind=kind)
    (tmp_path / "job.sh").write_text(MPI_JOB.format(command=" ".join(command)))
    done = cluster.batch("job.sh", env=environment(), cwd=tmp_path)
    for rank, record in succeeded(done, tmp_path, 4).items():
        assert record["launcher"] == ("PMI" if kind == "MPICH" else kind)
        assert record["host"] == f"n{rank // 2 + 1}"
        assert (record["local_rank"], record["local_world_size"]) == (rank % 2, 2)


def scripts() -> dict[str, str]:
    """The batch scripts of docs/hosts.md: ranks by srun, and by torchrun on each node."""
    text = (ROOT / "docs" / "hosts.md").read_text()
    section = text.partition("\n## Slurm\n")[2].partition("\n## ")[0]
    plain, torchrun = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    plain, torchrun = (re.sub("(?m)^    ", "", block).strip() + "\n" for block in (plain, torchrun))
    return {"srun": plain, "torchrun": "#!/bin/bash\n#SBATCH --nodes=2\n" + torchrun}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["srun", "torchrun"])
def test_sbatch_of_the_docs(
    cluster: slurm.Slurm, by_gloo: Callable[[int], Records], how: str, tmp_path: Path
) -> None:
    """With two ranks on a node and not four, of one core and not eight."""
    folder = tmp_path / "records"
    folder.mkdir()
    shutil.copy(PROGRAM, tmp_path / "train.py")
    script = scripts()[how].replace("--ntasks-per-node=4", "--ntasks-per-node=2")
    script = script.replace("--cpus-per-task=8", "--cpus-per-task=1")
    script = script.replace("--nproc-per-node=4", "--nproc-per-node=2")
    script = script.replace("python train.py", f"python train.py --train {folder}")
    script = script.replace("29500 train.py", f"29500 train.py --train {folder}")
    (tmp_path / "job.sh").write_text(script)
    done = cluster.batch("job.sh", env=environment(), cwd=tmp_path)
    for rank, record in succeeded(done, folder, 4).items():
        assert record["launcher"] == ("Slurm" if how == "srun" else "torchrun")
        assert record["host"] == f"n{rank // 2 + 1}"
        assert record["weights"] == by_gloo(4)[rank]["weights"]


@pytest.mark.slow
def test_sbatch_of_a_job_that_survives(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """examples/survive.sbatch with another program in place of its own: rank 0 is killed."""
    program = tmp_path / "examples" / "train_elastic.py"
    program.parent.mkdir()
    shutil.copy(PROGRAM, program)
    script = str(ROOT / "examples" / "survive.sbatch")
    arguments = ["--ntasks=3", script, str(tmp_path), "--kill", "0", "--go-on"]
    done = cluster.batch(*arguments, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 ended with exit status 137 in its life 1 of 4" in done.stdout
    found = records(tmp_path)
    assert sorted(found) == [0, 1, 2], done.stdout
    assert [found[rank]["began"] for rank in range(3)] == [found[0]["steps"] - 5, 0, 0]
    for record in found.values():
        assert (record["steps"], record["weights"]) == (found[0]["steps"], found[0]["weights"])
    assert not still_running(tmp_path)
