"""RINGREDUCE_DEFAULT, RINGREDUCE_REPLACE and set_default: groups that are not named ringreduce."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import launchers
import pytest
import torch

import ringreduce

UNNAMED = """
    import json, os, pickle, sys
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    assert "ringreduce" not in sys.modules
    made = {}

    def note(name, group):
        made[name] = [dist.get_backend(group), group._get_backend(torch.device("cpu")).name()]

    def make(name, **options):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
        note(name, dist.group.WORLD)

    make("no name")
    note("its group", dist.new_group())
    note("of many", dist.new_subgroups(group_size=1)[0])
    note("gloo named", dist.new_group(backend="gloo"))
    note("like the default", dist.new_group(backend=dist.get_backend()))
    note("ringreduce named", dist.new_group(backend="ringreduce"))
    note("mesh", init_device_mesh("cpu", (1,)).get_group())
    note("mesh of two", init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")).get_group("a"))
    found = dist.get_default_backend_for_device("cpu")
    made["found"] = found
    note("passed on", dist.new_group(backend=found))
    dist.destroy_process_group()
    make("gloo", backend="gloo")
    note("group of gloo", dist.new_group())
    dist.destroy_process_group()
    make("ringreduce", backend="ringreduce")
    note("group of ringreduce", dist.new_group())
    dist.destroy_process_group()
    make("found and passed on", backend=pickle.loads(pickle.dumps(found)))  # to another process
    dist.destroy_process_group()
    dist.Backend.default_device_backend_map["cpu"] = "gloo"
    make("no name, no default")

    import ringreduce

    ringreduce.set_default("cpu")
    ringreduce.set_default("cpu")
    found = dist.get_default_backend_for_device("cpu")
    dist.destroy_process_group()
    make("after the call", pg_options=dist.ProcessGroupGloo._Options())
    note("passed on after it", dist.new_group(backend=found))
    print(json.dumps(made))
"""
# How libraries read the name of a backend; each of them takes another way for a name it does not
# know.  Some have lists of names, some compare one, some ask for what suits a device.
READ = """
    import collections, datetime, json, os, sys
    import torch, torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed.device_mesh import init_device_mesh

    said = collections.defaultdict(list)

    def read(group):
        backend = dist.get_backend(group)
        return [
            backend,
            backend in ("gloo", "nccl", "mpi"),
            "cpu" if backend == "gloo" else "cuda",
            backend is dist.Backend.GLOO,
            dist.Backend(backend) == dist.Backend.GLOO,
            getattr(dist.Backend, backend.upper(), None),
            dist.Backend.backend_capability.get(backend),
            dist.get_backend_config(group),
            c10d._world.pg_map[group][0],
            group.name(),
            group._get_backend_name(),
            str(c10d._get_pg_default_device(group)),
            str(c10d.BackendConfig(backend)),
        ]

    name = sys.argv[1]
    dist.init_process_group(*([name] if name else []))
    made = {"default": dist.group.WORLD}
    if name:
        made["no name"] = dist.new_group()
        made["upper"] = dist.new_group(backend="GLOO")
        made["devices"] = dist.new_group(backend="cpu:gloo")
        options = dist.ProcessGroupGloo._Options()
        made["options"] = dist.new_group(backend="gloo", pg_options=options)
        foreign = torch._C._distributed_c10d.Backend.Options("other")
        made["foreign options"] = dist.new_group(backend="cpu:gloo", pg_options=foreign)
        made["like the default"] = dist.new_group(backend=dist.get_backend())
        made["subgroup"] = dist.new_subgroups(group_size=1)[0]
        made["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")).get_group("b")
        part = dist.new_group([1], backend="gloo")
        if dist.get_rank() == 1:
            made["part"] = part
        for group in made.values():
            ones = torch.ones(3)
            dist.all_reduce(ones, group=group)
            assert ones.tolist() == [group.size()] * 3
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
        said["of cpu"] = dist.get_default_backend_for_device("cpu")
        said["all"] = sorted(v["backend_config"] for v in c10d._world.pg_config_info)
    for key, group in made.items():
        said[key] = read(group)
    real = {group._get_backend(torch.device("cpu")).name() for group in made.values()}
    replaced = "ringreduce" in sys.modules and {
        sys.modules["ringreduce"].replaces(group) for group in (None, *made.values())
    }
    if dist.get_rank() == 1:
        print(json.dumps([said, sorted(real), replaced and sorted(replaced)]))
    dist.destroy_process_group()
    # With DETAIL torch puts a group of gloo's own beside it, which finds the old one's addresses.
    if replaced and os.environ.get("TORCH_DISTRIBUTED_DEBUG") != "DETAIL":
        dist.init_process_group("gloo")
"""
ONE_RANK_ONLY = """
    import datetime, os, sys, traceback

    if os.environ["RANK"] == "1":
        os.environ["RINGREDUCE_REPLACE"] = "gloo"
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
    except Exception:
        traceback.print_exc(file=sys.stdout)
"""


def say(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    env = {k: v for k, v in launchers.untouched().items() if not k.startswith("RINGREDUCE_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def test_groups_without_a_name_are_made_by_ringreduce() -> None:
    """Their name is gloo where torch itself would take it; a group that is named keeps its name."""
    done = say(UNNAMED, RINGREDUCE_DEFAULT="cpu")
    assert done.returncode == 0, done.stderr
    replaced, own, gloo = ["gloo", "ringreduce"], ["ringreduce"] * 2, ["gloo"] * 2
    assert json.loads(done.stdout) == {
        "no name": replaced,
        "its group": replaced,
        "of many": replaced,
        "gloo named": replaced,
        "like the default": replaced,
        "ringreduce named": own,
        "mesh": replaced,
        "mesh of two": replaced,
        "found": "ringreduce",
        "passed on": replaced,
        "gloo": gloo,
        "group of gloo": gloo,
        "ringreduce": own,
        "group of ringreduce": own,
        "found and passed on": replaced,
        "no name, no default": ["undefined", "gloo"],
        "after the call": replaced,
        "passed on after it": replaced,
    }


@pytest.mark.parametrize("debug", ["OFF", pytest.param("DETAIL", marks=pytest.mark.nightly)])
def test_gloo_is_replaced_under_its_name(tmp_path: Path, debug: str) -> None:
    """A program reads the same names as without ringreduce; rank 0 logs once what it gets."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(READ))
    said = {}
    for replace in ("", "gloo"):
        variables = {"RINGREDUCE_REPLACE": replace, "TORCH_DISTRIBUTED_DEBUG": debug}
        run = launchers.run([*launchers.torchrun(2), str(script), "gloo"], variables)
        assert run.returncode == 0, run.stdout + run.stderr
        read = next(line for line in run.stdout.splitlines() if line.startswith("["))
        said[replace], real, replaces = json.loads(read)
        assert real == (["ringreduce"] if replace else ["gloo"])
        assert replaces == (["gloo"] if replace else False)
        notices = run.stderr.count("groups of the backend gloo are made by ringreduce")
        assert notices == (1 if replace else 0)
    assert len(said["gloo"]) > 10 and said["gloo"] == said[""]


def test_a_group_of_no_name_is_called_gloo_where_gloo_is_replaced(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(READ))
    run = launchers.run([*launchers.torchrun(2), str(script), ""], {"RINGREDUCE_REPLACE": "gloo"})
    assert run.returncode == 0, run.stdout + run.stderr
    read = next(line for line in run.stdout.splitlines() if line.startswith("["))
    said, real, replaces = json.loads(read)
    assert said["default"][0] == "gloo" and [real, replaces] == [["ringreduce"], ["gloo"]]
    assert run.stderr.count("groups of the backend gloo are made by ringreduce") == 1


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        pytest.param(
            *("DEFAULT", "cpu,cuda", "has cuda, which torch"),
            marks=pytest.mark.skipif(torch.cuda._is_compiled(), reason="this torch has CUDA"),
        ),
        ("DEFAULT", " cpu", "' cpu' must be 'cpu', 'cuda' or 'cpu,cuda'"),
        ("REPLACE", "1", "'1' must be 'gloo'"),
    ],
)
def test_groups_are_refused_if_the_variable_cannot_be_read(name: str, text: str, why: str) -> None:
    make = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    program = f"import torch.distributed as dist\nprint('imported')\n{make}"
    done = say(program, **{f"RINGREDUCE_{name}": text})
    assert done.returncode == 1 and done.stdout == "imported\n"
    assert f"ValueError: RINGREDUCE_{name}=" in done.stderr and why in done.stderr


@pytest.mark.parametrize(
    ("holder", "name", "make"),
    [
        (
            "dist.distributed_c10d",
            "_new_process_group_helper",
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        ),
        ("dist.Backend", "default_device_backend_map", "dist.init_device_mesh('cpu', (1,))"),
    ],
)
def test_groups_are_refused_if_torch_makes_them_in_another_way(
    holder: str, name: str, make: str
) -> None:
    program = f"""
        import os
        import torch.distributed as dist
        import _ringreduce_autoload as autoload

        had = {holder}.{name}
        del {holder}.{name}
        os.environ["RINGREDUCE_REPLACE"] = "gloo"
        autoload._read_variables()
        {holder}.{name} = had
        print("read")
        {make}
    """
    done = say(program)
    assert done.returncode == 1 and done.stdout == "read\n", done.stderr
    assert "ValueError: RINGREDUCE_REPLACE=gloo cannot be followed: " in done.stderr
    assert name in done.stderr.splitlines()[-1]


def test_ranks_without_the_variable_are_named(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "train.py")
    with open(script, "w") as file:
        file.write(textwrap.dedent(ONE_RANK_ONLY))
    run = launchers.run([*launchers.torchrun(2), script])
    assert "ringreduce.errors.Timeout: rank 0 of 2 did not join within 10 s" in run.stdout
    assert run.stderr.count("Set them for all ranks") == 1
    assert run.stderr.count("may wait in another backend") == 1


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'cpu,tpu' must be 'cpu', 'cuda' or 'cpu,cuda'"):
        ringreduce.set_default("cpu,tpu")
