"""ringreduce.init in the environments of all launchers, made up: identity, meeting point, errors.

test_launchers.py has the launchers themselves.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import MakeWorld
from launchers import environment
from pool import Pool, Raised, Rank
from processes import free_port

import ringreduce
from ringreduce.core.launchers import first_host, identify, job_of, tasks_here

# The variables that ringreduce.init leaves set.
SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def by_hand(rank: int, size: int, **more: object) -> dict[str, str]:
    return {k: str(v) for k, v in {"RANK": rank, "WORLD_SIZE": size, **more}.items()}


def torchrun(rank: int, size: int) -> dict[str, str]:
    return by_hand(
        rank,
        size,
        LOCAL_RANK=rank,
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=29400,
        TORCHELASTIC_RUN_ID="id",
    )


def open_mpi(rank: int, size: int, local: int, here: int, job: str = "77") -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": here}
    return {"PMIX_NAMESPACE": job} | {f"OMPI_COMM_WORLD_{k}": str(v) for k, v in values.items()}


def hydra(rank: int, size: int, local: int, here: int) -> dict[str, str]:
    values = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": here}
    return {k: str(v) for k, v in values.items()}


def srun(rank: int, size: int, local: int, hosts: str, per_node: str, node: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "31",
        "SLURM_STEP_ID": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_JOB_NODELIST": hosts,
    }


def in_a_shell(step: str) -> dict[str, str]:
    """The shell of a step of one task, in a job of four on one host."""
    own = {"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    return srun(0, 4, 0, "vm", "4", 0) | own


TWO_HOSTS = srun(3, 4, 1, "gpu[07-08]", "2(x2)", 1)
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "31.2"}  # srun --mpi=pmi2 says no more

# Environment, and (rank, world size, local rank, local world size, launcher).
SAID: dict[str, tuple[dict[str, str], tuple[Any, ...]]] = {
    "nothing": ({}, (0, 1, 0, 1, "none")),
    "empty": ({"RANK": "", "WORLD_SIZE": ""}, (0, 1, 0, 1, "none")),
    "torchrun": (torchrun(1, 2), (1, 2, 1, 2, "torchrun")),
    "by hand": (by_hand(1, 2), (1, 2, None, None, "environment")),
    "by hand, loopback": (by_hand(1, 2, MASTER_ADDR="::1"), (1, 2, 1, 2, "environment")),
    "by hand, far": (by_hand(1, 2, MASTER_ADDR="10.0.0.1"), (1, 2, None, None, "environment")),
    "Open MPI": (open_mpi(3, 4, 1, 2), (3, 4, 1, 2, "Open MPI")),
    "PMI": (hydra(2, 3, 0, 1), (2, 3, 0, 1, "PMI")),
    "srun": (srun(2, 3, 2, "vm", "3", 0), (2, 3, 2, 3, "Slurm")),
    "srun, two hosts": (TWO_HOSTS, (3, 4, 1, 2, "Slurm")),
    "srun --mpi=pmi2": (TWO_HOSTS | PMI2, (3, 4, 1, 2, "PMI")),
    "torchrun in a Slurm task": (torchrun(1, 2) | srun(0, 1, 0, "vm", "1", 0), (1, 2, 1, 2)),
    "torchrun in mpirun": (torchrun(1, 2) | open_mpi(1, 4, 0, 1), (1, 2, 1, 2, "torchrun")),
    "mpirun in a Slurm task": (open_mpi(3, 4, 3, 4) | srun(0, 1, 0, "vm", "1", 0), (3, 4, 3, 4)),
    "a wrapper's RANK": (by_hand(3, 4) | open_mpi(3, 4, 1, 2), (3, 4, 1, 2, "environment")),
    "a wrapper's LOCAL_RANK": ({"LOCAL_RANK": "1"} | PMI2, (3, 4, 1, None, "PMI")),
    "several ranks in a task": (by_hand(5, 8) | open_mpi(1, 2, 0, 1), (5, 8, None, None)),
    # The shell of a batch job, or of salloc, is no task of the job.
    "batch script": (
        {"SLURM_JOB_ID": "31", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
        (0, 1, 0, 1, "none"),
    ),
    "salloc": ({"SLURM_JOB_ID": "31", "SLURM_NTASKS": "4"}, (0, 1, 0, 1, "none")),
    "salloc, shell on a node": (in_a_shell("4294967290"), (0, 1, 0, 1, "none")),
    "batch script with a step": (in_a_shell("4294967291"), (0, 1, 0, 1, "none")),
    "external step": (in_a_shell("4294967292"), (0, 1, 0, 1, "none")),
    "pending step": (in_a_shell("4294967293"), (0, 1, 0, 1, "none")),
    "batch script of an old Slurm": (in_a_shell("4294967294"), (0, 1, 0, 1, "none")),
    "torchrun in such a shell": (torchrun(1, 2) | in_a_shell("4294967290"), (1, 2, 1, 2)),
    "mpirun in such a shell": (open_mpi(3, 4, 3, 4) | in_a_shell("4294967290"), (3, 4, 3, 4)),
    "mpiexec in such a shell": (hydra(3, 4, 3, 4) | in_a_shell("4294967290"), (3, 4, 3, 4, "PMI")),
    "by hand in such a shell": (
        by_hand(1, 2) | in_a_shell("4294967290"),
        (1, 2, None, None, "environment"),
    ),
    # A step of the job's variables, which are not the step's (srun --preserve-env), and its shell.
    "srun --preserve-env": (
        srun(1, 2, 1, "vm", "2", 0)
        | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASKS_PER_NODE": "4"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2"},
        (1, 2, 1, 2, "Slurm"),
    ),
    "srun --pty": (in_a_shell("0"), (0, 1, 0, 1, "Slurm")),
    # An indexed Job says no world size: its pods get RANK and WORLD_SIZE, or are alone.
    "a pod": ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}, (0, 1, 0, 1, "none")),
}


@pytest.mark.parametrize("name", SAID)
def test_what_launchers_say(name: str) -> None:
    env, expected = SAID[name]
    me = identify(env)
    found = (me.rank, me.world_size, me.local_rank, me.local_world_size, me.launcher)
    assert found[: len(expected)] == expected


def test_arguments_come_first() -> None:
    env = torchrun(1, 2) | open_mpi(1, 2, 1, 2)
    me = identify(env, rank=0, world_size=3, local_rank=2)
    assert (me.rank, me.world_size, me.local_rank, me.launcher) == (0, 3, 2, "arguments")
    assert identify(env, local_rank=0).local_rank == 0
    # Arguments that a launcher confirms are completed from it; others are not.
    assert identify(open_mpi(3, 4, 1, 2), 3, 4).local_world_size == 2
    assert identify(open_mpi(3, 4, 1, 2), 2, 4).local_world_size is None
    for given in ("rank", "world_size"):
        with pytest.raises(ValueError, match=f"{given}=1 was given without"):
            identify({}, **{given: 1})


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


WRONG: dict[str, tuple[dict[str, str], list[str]]] = {
    "no WORLD_SIZE": ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE is not"]),
    "no RANK": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK is not"]),
    "no size": (
        {"OMPI_COMM_WORLD_RANK": "1"},
        ["OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not"],
    ),
    "no PMI size": ({"PMI_RANK": "1"}, ["PMI_RANK=1", "PMI_SIZE is not"]),
    "no tasks": (without(TWO_HOSTS, "SLURM_NTASKS"), ["SLURM_PROCID=3", "SLURM_NTASKS is not"]),
    "a word": (by_hand(0, 2) | {"RANK": "zero"}, ["RANK=zero is not a whole number"]),
    "rank too high": (by_hand(2, 2), ["RANK=2 and WORLD_SIZE=2", "rank 2 of 2"]),
    "negative": (hydra(-1, 2, 0, 2), ["PMI_RANK=-1", "rank -1 of 2"]),
    "local rank too high": (by_hand(1, 4, LOCAL_RANK=2, LOCAL_WORLD_SIZE=2), ["LOCAL_RANK", "2"]),
    "local size too high": (by_hand(1, 2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=3), ["LOCAL_WORLD_SIZE"]),
    # A forgotten export would make every process of mpirun a world of its own.
    "left over": (
        by_hand(0, 1) | open_mpi(2, 4, 2, 4),
        ["RANK=0 and WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=4", "nset"],
    ),
    "other rank": (by_hand(0, 4) | TWO_HOSTS, ["RANK=0", "SLURM_PROCID=3", "Slurm"]),
    "other local rank": ({"LOCAL_RANK": "0"} | open_mpi(1, 2, 1, 2), ["LOCAL_RANK=0", "says 1"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_variables_that_cannot_be(name: str) -> None:
    env, words = WRONG[name]
    with pytest.raises(ValueError) as raised:
        identify(env)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("vm", "vm"),
        ("a,b,c", "a"),
        ("gpu[07-12,15]", "gpu07"),
        ("gpu[3,5-6],cpu1", "gpu3"),
        ("rack[1-2]node[05-08]-ib,x", "rack1node05-ib"),
    ],
)
def test_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_tasks_on_a_host_of_slurms() -> None:
    counts = [
        tasks_here({"SLURM_TASKS_PER_NODE": "4(x2),3,1", "SLURM_NODEID": str(n)}) for n in range(5)
    ]
    assert counts == [4, 4, 3, 1, None]
    assert tasks_here({"SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "2"}) is None


def test_a_first_host_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unknown(host: str, port: object) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with environment(TWO_HOSTS), pytest.raises(ValueError) as raised:
        ringreduce.init("gloo")
    first = asked[0]
    for word in (f"{first!r}, does not resolve", "rank 3 of 4 (Slurm)", "MASTER_ADDR=HOST_OF"):
        assert word in str(raised.value)
    assert asked == [first]


# From here on groups are made, in ranks of the pool whose environment is made up.


def start(me: Rank, envs: list[dict[str, str]], options: dict[str, Any]) -> tuple[Any, ...]:
    """What init returns, what it left in the environment, and a sum that shows that it works."""
    with environment(envs[me.rank]):
        records: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ringreduce").addHandler(handler)
        try:
            launch = ringreduce.init(me.backend, **options)
        finally:
            logging.getLogger("ringreduce").removeHandler(handler)
        t = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(t)
        assert dist.get_backend() == me.backend
        assert (dist.get_rank(), dist.get_world_size()) == (launch.rank, launch.world_size)
        dist.barrier()
        dist.destroy_process_group()
        left = {name: os.environ.get(name) for name in SET}
        return astuple(launch), left, float(t[0]), records


def left_by(rank: int, size: int) -> dict[str, str]:
    return without(torchrun(rank, size), "TORCHELASTIC_RUN_ID", "MASTER_PORT")


@pytest.mark.parametrize("launcher", ["Open MPI", "PMI", "Slurm"])
def test_a_group_by_a_launchers_variables(pool: Pool, world: MakeWorld, launcher: str) -> None:
    """Everything from the launcher, address and port too; the environment is as after torchrun."""
    job = str(os.getpid())  # so that test runs at the same time choose different ports
    envs = {
        "Open MPI": [open_mpi(rank, 2, rank, 2, job) for rank in range(2)],
        "PMI": [hydra(rank, 2, rank, 2) | {"PMI_JOBID": job} for rank in range(2)],
        "Slurm": [srun(rank, 2, rank, "vm", "2", 0) | {"SLURM_JOB_ID": job} for rank in range(2)],
    }[launcher]
    options = {"init_method": "env://"} if launcher == "PMI" else {}  # which is the default
    results = pool.start(start, world(0), envs, options, ranks=2).results()
    for rank, (launch, left, total, warnings) in enumerate(results):
        assert launch == (rank, 2, rank, 2, launcher)
        assert total == 3.0
        assert warnings == []
        port = left.pop("MASTER_PORT")
        assert 20000 <= int(port) < 30000
        assert left == left_by(rank, 2)


JOBS: dict[str, tuple[dict[str, str], int, int, tuple[str, str]]] = {
    "torchrun": (torchrun(1, 2), 1, 2, ("torchrun", "id")),
    "a name of two lines": (
        torchrun(1, 2) | {"TORCHELASTIC_RUN_ID": "my\njob"},
        1,
        2,
        ("torchrun", "my job"),
    ),
    "torchrun's default": (torchrun(1, 2) | {"TORCHELASTIC_RUN_ID": "none"}, 1, 2, ("", "")),
    "Open MPI": (open_mpi(3, 4, 1, 2), 3, 4, ("Open MPI", "77")),
    "PMI": (PMI2, 3, 4, ("PMI", "31.2")),
    "srun": (TWO_HOSTS, 3, 4, ("Slurm", "31.2")),
    "a shell of salloc": (in_a_shell("4294967290"), 0, 1, ("", "")),
    # A step of one task each: they are not the ranks.
    "srun of a launcher": (srun(0, 1, 0, "vm", "1", 0), 0, 4, ("", "")),
    "a pod": ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}, 1, 4, ("Kubernetes", "train")),
    "a pod of several": ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1"}, 9, 16, ("", "")),
    "by hand": (by_hand(1, 2), 1, 2, ("", "")),
    "nonsense": ({"RANK": "x", "WORLD_SIZE": "2"}, 1, 2, ("", "")),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_job_of_a_groups_ranks(name: str) -> None:
    env, rank, size, job = JOBS[name]
    assert job_of(env, rank, size) == job


def test_what_is_set_stays(pool: Pool, world: MakeWorld) -> None:
    port = str(free_port())
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    envs = [open_mpi(rank, 2, 0, 1) | master for rank in range(2)]  # as on two hosts
    for rank, (launch, left, total, _) in enumerate(
        pool.start(start, world(0), envs, {}, ranks=2).results()
    ):
        assert launch == (rank, 2, 0, 1, "Open MPI")
        assert left == by_hand(rank, 2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, **master)
        assert total == 3.0


def test_a_master_by_argument(pool: Pool, world: MakeWorld) -> None:
    """It wins over the environment's, also where torchrun's agent would serve the store."""
    envs = [torchrun(rank, 2) | {"TORCHELASTIC_USE_AGENT_STORE": "True"} for rank in range(2)]
    options = {"master_port": free_port()}
    for rank, (launch, left, total, _) in enumerate(
        pool.start(start, world(0), envs, options, ranks=2).results()
    ):
        assert launch == (rank, 2, rank, 2, "torchrun")
        assert left["MASTER_PORT"] == "29400"
        assert total == 3.0


def twice(me: Rank, env: dict[str, str]) -> list[tuple[Any, ...]]:
    with environment(env):
        first = start(me, [env], {})
        with environment({name: value for name, value in first[1].items() if value}):
            second = start(me, [dict(os.environ)], {})
    return [first, second]


def test_no_launcher(pool: Pool, world: MakeWorld) -> None:
    """A group of one, and a warning.  What it leaves in the environment makes another group."""
    ((first, second),) = pool.start(twice, world(0), {}, ranks=1).results()
    launch, left, total, warnings = first
    assert launch == (0, 1, 0, 1, "none")
    assert total == 1.0
    assert len(warnings) == 1
    assert "rank 0 of 1" in warnings[0]
    assert int(left.pop("MASTER_PORT")) > 0
    assert left == left_by(0, 1)
    assert (second[0], second[2:]) == ((0, 1, 0, 1, "environment"), (1.0, []))


UNMET: dict[str, tuple[dict[str, str], dict[str, Any], list[str]]] = {
    "Open MPI": (
        open_mpi(0, 4, 0, 2),
        {},
        ["rank 0 of 4", "2 of them are on this host", "mpirun -x MASTER_ADDR="],
    ),
    "PMI": (hydra(0, 4, 0, 2), {}, ["rank 0 of 4", "MASTER_ADDR", "mpiexec -genv MASTER_ADDR "]),
    "no address": (by_hand(0, 2), {}, ["rank 0 of 2", "export MASTER_ADDR="]),
    "no port": (by_hand(0, 2, MASTER_ADDR="::1"), {}, ["MASTER_PORT is not", "export MASTER_ADDR"]),
    "bad port": (by_hand(0, 1, MASTER_PORT=70000), {}, ["rank 0", "70000"]),
    "port, and store": ({}, {"init_method": "file:///x", "master_port": 1}, ["init_method"]),
}


def refused(me: Rank, env: dict[str, str], options: dict[str, Any]) -> str:
    with environment(env):
        before = dict(os.environ)
        with pytest.raises(ValueError) as raised:
            ringreduce.init(me.backend, **options)
        assert dict(os.environ) == before
        return str(raised.value)


@pytest.mark.parametrize("name", UNMET)
def test_nowhere_to_meet(pool: Pool, world: MakeWorld, name: str) -> None:
    env, options, words = UNMET[name]
    (message,) = pool.start(refused, world(0), env, options, ranks=1).results()
    for word in words:
        assert word in message


def test_a_port_that_is_taken(pool: Pool, world: MakeWorld) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = open_mpi(0, 2, 0, 2) | {"MASTER_PORT": str(port)}
        (outcome,) = pool.start(start, world(0), [env], {}, ranks=1).outcomes()
    assert isinstance(outcome, Raised)
    assert outcome.isa("DistNetworkError")
    for word in ("rank 0 of 2 (Open MPI)", f"127.0.0.1:{port}", "mpirun -x MASTER_ADDR="):
        assert word in outcome.message


def test_a_file_to_meet_at(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    """Other arguments of init_process_group are passed on; no master is needed then."""
    envs = [open_mpi(rank, 2, 0, 1) for rank in range(2)]
    options = {"init_method": f"file://{tmp_path}/meeting"}
    for rank, (launch, left, total, _) in enumerate(
        pool.start(start, world(0), envs, options, ranks=2).results()
    ):
        assert launch == (rank, 2, 0, 1, "Open MPI")
        assert (left["MASTER_ADDR"], left["MASTER_PORT"]) == (None, None)
        assert total == 3.0
