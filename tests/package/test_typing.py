"""The package is typed: stubs match the extension, and a user's strict checker is content."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USER = """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    import ringreduce
    from ringreduce import hooks


    def main(model: DDP, plain: torch.nn.Module, group: dist.ProcessGroup) -> int:
        launch: ringreduce.Launch = ringreduce.init(master_port=29500, group_name="")
        try:
            ringreduce.register_comm_hook(model)
            model.register_comm_hook(None, hooks.allreduce_hook)
            state = ringreduce.register_comm_hook(model, codec="int8", exact=["head.*"])
            state.load_state_dict(state.state_dict())
            model.register_comm_hook(state, hooks.compressed)
            kept: ringreduce.CompressionState = hooks.CompressionState(
                plain, "int4", exact=lambda name, parameter: parameter.numel() < 9
            )
            ringreduce.average_gradients(plain)
            ringreduce.average_gradients(plain, group=group)
        except (ringreduce.PeerLost, ringreduce.Timeout) as error:
            reveal_type(error)
        except ringreduce.Mismatch as error:
            reveal_type(error)
        except (ringreduce.Aborted, ringreduce.Error):
            pass
        reveal_type(ringreduce.__version__)
        held = kept.residual_bytes()
        return launch.rank + held + ringreduce.staging_bytes() + ringreduce.staging_bytes(group)


    def wrong(plain: torch.nn.Linear) -> None:
        ringreduce.average_gradients(3)
        ringreduce.staging_bytes("group")
        ringreduce.init(rank="0")
        ringreduce.CompressionState(plain, 8)
"""


def package() -> Path:
    import ringreduce

    assert ringreduce.__file__ is not None
    return Path(ringreduce.__file__).parent


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mypy")
    env = dict(os.environ)
    # Type checkers do not follow an editable install's import hook; they are told the folder.
    if package().parent.name != "site-packages":
        env["MYPYPATH"] = str(package().parent)
    command = (sys.executable, "-m", *command)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)


def test_markers_are_there() -> None:
    assert (package() / "py.typed").exists()
    assert (package() / "_C.pyi").exists()


@pytest.mark.slow
def test_a_users_strict_checker(tmp_path: Path) -> None:
    """It sees the types, and it sees mistakes."""
    (tmp_path / "user.py").write_text(textwrap.dedent(USER))
    # Torch's types come from the cache of `make lint`, whose options these are.
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    options = ("--strict", "--warn-unreachable", "--python-version=3.10", cache)
    done = run("mypy", *options, "user.py", cwd=tmp_path)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 4, done.stdout + done.stderr
    assert all("[arg-type]" in line for line in errors), errors
    assert "ringreduce.Mismatch" in done.stdout or "ringreduce" in done.stdout
    assert 'Revealed type is "builtins.str"' in done.stdout or '"str"' in done.stdout


@pytest.mark.slow
def test_stubs_match_the_extension(tmp_path: Path) -> None:
    # Names, arguments and defaults are compared, not torch's types, which take a minute to read.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    done = run("mypy.stubtest", "ringreduce._C", "--mypy-config-file=mypy.ini", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


MODULES = (
    "average compression config elastic errors hooks launch memory observe.dump observe.record "
    "observe.straggler observe.timeline step supervise topology"
)


def test_every_public_name_is_documented() -> None:
    """With a docstring, and what it returns; a function without its own has its base's."""
    import ringreduce

    found = [(f"ringreduce.{name}", getattr(ringreduce, name)) for name in ringreduce.__all__]
    for module in MODULES.split():
        owner = importlib.import_module(f"ringreduce.{module}")
        public = getattr(owner, "__all__", vars(owner))
        found += [
            (f"{module}.{name}", value)
            for name, value in vars(owner).items()
            if name in public
            and name[0] != "_"
            and getattr(value, "__module__", "") == owner.__name__
        ]
    for name, value in list(found):
        if inspect.isclass(value):
            found += [(f"{name}.{n}", v) for n, v in vars(value).items() if n[0] != "_"]
    wrong = []
    for name, value in found:
        if not (callable(value) or isinstance(value, property)):
            continue
        text = inspect.getdoc(value) or ""
        returns = getattr(value, "__annotations__", {}).get("return")  # not of a property
        if not text or (returns not in (None, "None") and "Returns" not in text):
            wrong.append(name)
    assert wrong == []
