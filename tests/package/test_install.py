"""How an install finds torch, and a source tree the extension of an install.  Builds nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import setuptools
import torch

from ringreduce import _build_info
from ringreduce.core import load

ROOT = Path(__file__).resolve().parents[2]

# What setup.py finds, and what a Python that it starts finds, as CMake does.
CHECK = """
import runpy, subprocess, sys
import setuptools
setuptools.setup = lambda **_: None
print(runpy.run_path("setup.py")["check_torch"]())
script = "import torch; print(torch.__version__)"
print(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout)
"""

# As pip's: takes away what the environment has, and adds what the build asked for.
ISOLATION = """
import site, sys
before = sys.path[:]
for path in {hidden!r}:
    site.addsitedir(path, known_paths=set())
hidden = sys.path[len(before):]
sys.path[:] = [path for path in before if path not in hidden]
site.addsitedir({added!r})
"""


def environment(folder: Path, borrowed: str) -> tuple[Path, Path]:
    """A new one, which finds the packages of another by a .pth: its Python, and its packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(borrowed)
    return folder / "bin" / "python", packages


def check(python: Path, path: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONNOUSERSITE": "1"}
    variables.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return subprocess.run(
        [python, "-c", CHECK], cwd=ROOT, env=variables, capture_output=True, text=True
    )


def test_an_isolated_build_finds_the_torch_that_pip_hides(tmp_path: Path) -> None:
    theirs = str(Path(torch.__file__).parent.parent)
    python, packages = environment(tmp_path / "environment", theirs)
    overlay, isolation = tmp_path / "overlay", tmp_path / "isolation"
    overlay.mkdir(), isolation.mkdir()
    for path in Path(setuptools.__file__).parent, *Path(theirs).glob("_distutils_hack"):
        (overlay / path.name).symlink_to(path)
    (isolation / "sitecustomize.py").write_text(
        ISOLATION.format(hidden=[str(packages)], added=str(overlay))
    )
    done = check(python, str(isolation))
    assert done.stdout.split() == [torch.__version__] * 2, done.stderr
    # One of uv knows no other environment.
    python, _ = environment(tmp_path / "builds-v0" / "new", "")
    done = check(python, str(overlay))
    assert done.returncode != 0 and "is isolated from it. With uv use" in done.stderr


def copied(folder: Path, *, version: str, with_extension: bool) -> Path:
    """The Python part of ringreduce, as in a source tree or as installed."""
    package = folder / "ringreduce"
    ignored = shutil.ignore_patterns("__pycache__", "_C*.so", "_build_info.py")
    shutil.copytree(ROOT / "ringreduce", package, ignore=ignored)
    shutil.copy2(ROOT / "_ringreduce_autoload.py", folder)
    if not with_extension:
        (folder / "CMakeLists.txt").touch()
        (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
        return folder
    built = Path(_build_info.__file__).parent
    for path in [built / "_build_info.py", *built.glob("_C*.so")]:
        (package / path.name).symlink_to(path)
    info = folder / f"ringreduce-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: ringreduce\nVersion: {version}\n")
    return folder


def test_a_source_tree_takes_the_extension_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copied(tmp_path / "tree", version="7.1", with_extension=False)
    installed = copied(tmp_path / "installed", version="7.1", with_extension=True)
    variables = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True)

    done = run("-c", "import ringreduce._C as c, ringreduce as r; print(c, r)")
    assert f"{installed}/ringreduce/_C" in done.stdout, done.stderr
    assert f"{tree}/ringreduce/__init__.py" in done.stdout

    # One that does not fit is not taken, and the error says what hides what.
    monkeypatch.setattr(sys, "path", [str(installed)])
    assert load._installed(tree) == (installed / "ringreduce", "")
    with (tree / "ringreduce" / "_C.pyi").open("a") as interface:
        interface.write("def later() -> None: ...\n")
    folder, why = load._installed(tree)
    assert folder is None and "its extension has other functions" in why
    (tree / "pyproject.toml").write_text('version = "7.2"\n')
    folder, why = load._installed(tree)
    assert folder is None and f"{tree} hide the ringreduce that is installed in {installed}" in why
    assert "it is version 7.1 and these sources are 7.2" in why
    done = run("-m", "ringreduce.bench")
    assert done.returncode != 0 and "7.2. Start from another folder to use what" in done.stderr
