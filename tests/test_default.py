"""RINGREDUCE_DEFAULT, RINGREDUCE_REPLACE and set_default: groups that are not named ringreduce."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import launchers
import pytest
import torch

import ringreduce

UNNAMED = """
    import json, os, sys
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    assert "ringreduce" not in sys.modules
    made = {}

    def make(name, **options):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
        made[name] = dist.get_backend()

    make("no name")
    made["its group"] = dist.get_backend(dist.new_group())
    made["gloo named"] = dist.get_backend(dist.new_group(backend="gloo"))
    made["mesh"] = dist.get_backend(init_device_mesh("cpu", (1,)).get_group())
    made["of cpu"] = dist.get_default_backend_for_device("cpu")
    dist.destroy_process_group()
    make("gloo", backend="gloo")
    dist.destroy_process_group()
    dist.Backend.default_device_backend_map["cpu"] = "gloo"
    make("no name, no default")

    import ringreduce

    ringreduce.set_default("cpu")
    dist.destroy_process_group()
    make("after the call", pg_options=dist.ProcessGroupGloo._Options())
    print(json.dumps(made))
"""
GLOO = """
    import json
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    options = dist.ProcessGroupGloo._Options()
    groups = {
        "default": dist.group.WORLD,
        "upper": dist.new_group(backend="GLOO"),
        "options": dist.new_group(backend="gloo", pg_options=options),
        "devices": dist.new_group(backend="cpu:gloo"),
        "no name": dist.new_group(),
        "foreign options": dist.new_group(
            backend="cpu:gloo", pg_options=torch._C._distributed_c10d.Backend.Options("other")
        ),
        "part": dist.new_group([1], backend="gloo"),
    }
    if dist.get_rank() == 1:
        print(json.dumps({name: dist.get_backend(group) for name, group in groups.items()}))
    for group in list(groups.values())[:-1]:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [2, 2, 2]
    dist.destroy_process_group()
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
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def test_groups_without_a_name_are_made_by_ringreduce() -> None:
    done = say(UNNAMED, RINGREDUCE_DEFAULT="cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "no name": "ringreduce",
        "its group": "ringreduce",
        "gloo named": "gloo",
        "mesh": "ringreduce",
        "of cpu": "ringreduce",
        "gloo": "gloo",
        "no name, no default": "undefined",
        "after the call": "ringreduce",
    }


def test_gloo_is_replaced_and_rank_0_says_so_once(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "train.py")
    with open(script, "w") as file:
        file.write(textwrap.dedent(GLOO))
    run = launchers.run([*launchers.torchrun(2), script], {"RINGREDUCE_REPLACE": "gloo"})
    assert run.returncode == 0, run.stdout + run.stderr
    made = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert [made.pop("devices"), made.pop("foreign options")] == ["cpu:ringreduce"] * 2
    assert len(made) == 5 and set(made.values()) == {"ringreduce"}
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
