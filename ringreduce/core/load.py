"""Loads the extension ringreduce._C, or says in words why it cannot.

Without this, an extension that was built for another torch ends in an undefined symbol, or in
memory that both sides lay out differently.
"""

import functools
import importlib.machinery
import importlib.metadata
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import torch


def _rebuild_command() -> str:
    """The command that builds ringreduce again, for this Python and in the way it was installed."""
    tree = Path(__file__).resolve().parents[2]
    if (tree / "CMakeLists.txt").exists():  # an editable install, or run from the source
        arguments = ["-e", str(tree)]
    else:
        from ringreduce._build_info import SOURCE_DIR

        there = (Path(SOURCE_DIR) / "CMakeLists.txt").exists()
        source = SOURCE_DIR if there else "PATH_TO_RINGREDUCE_SOURCE"
        arguments = ["--no-deps", "--force-reinstall", source]
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation"]
    return shlex.join(pip + arguments)


def _release(version: str) -> str:
    """The part of a torch version that must match: "2.13" of "2.13.0+cpu".

    The C++ classes that we derive from (Backend, Work) change in minor releases of torch, not in
    patch releases; what follows the "+" (cpu, cu130) changes none of the libraries that we link.
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def _find_build() -> str:
    """In a source tree, adds the folder with its extension to the package's path.

    That is the build folder of this Python and torch, which setup.py names.  Environments with
    different versions thus share a tree, and none imports the build of another.  Without one it is
    what is installed and hidden by the tree, as where a program is run from there.

    Returns:
        Why an installed extension is not used, or "".
    """
    tree = Path(__file__).parents[2]
    if not (tree / "CMakeLists.txt").exists():
        return ""
    folder = tree / "build" / f"{sys.implementation.cache_tag}-torch{torch.__version__}"
    why_not = ""
    if not (folder / "_build_info.py").exists():
        installed, why_not = _installed(tree)
        folder = installed or folder
    sys.modules["ringreduce"].__path__.append(str(folder))
    return why_not


def _installed(tree: Path) -> tuple[Path | None, str]:
    """The folder of an installed ringreduce whose extension goes with the sources in `tree`.

    Returns:
        The folder, or None; and why there is none if ringreduce is installed, or "".
    """
    found = re.search(r'^version = "(.+)"$', (tree / "pyproject.toml").read_text(), re.MULTILINE)
    version = found[1] if found else ""
    why_not = ""
    for one in importlib.metadata.distributions(name="ringreduce"):
        folder = Path(str(one.locate_file("ringreduce")))
        if folder.resolve() == tree / "ringreduce" or not (folder / "_build_info.py").exists():
            continue  # an editable install has no files of its own
        if one.version != version:
            differs = f"it is version {one.version} and these sources are {version}"
        elif (folder / "_C.pyi").read_bytes() != (tree / "ringreduce" / "_C.pyi").read_bytes():
            differs = "its extension has other functions than these sources call"
        else:
            return folder, ""
        why_not = (
            f"The sources in {tree} hide the ringreduce that is installed in {folder.parent}, and "
            f"cannot use its extension: {differs}. Start from another folder to use what is "
            "installed, or build the sources. "
        )
    return None, why_not


@functools.cache
def load() -> ModuleType:
    """Returns the module ringreduce._C; the second call costs nothing.

    Raises:
        ImportError: it was not built, or for another Python or another minor release of torch; the
            message holds the command that builds it again.
    """
    why_not = _find_build()
    try:
        from ringreduce import _build_info as built
    except ImportError:  # never built, so this is the source tree: an install always has it
        raise ImportError(
            f"ringreduce's C++ extension has not been built for torch {torch.__version__}. "
            f"{why_not}Build it with: {_rebuild_command()}"
        ) from None

    rebuild = f"Rebuild it with: {_rebuild_command()}"
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if built.EXTENSION_SUFFIX not in suffixes:
        raise ImportError(
            f"ringreduce was built for another Python (*{built.EXTENSION_SUFFIX}) than this one "
            f"(*{suffixes[0]}). {rebuild}"
        )
    if _release(built.TORCH_VERSION) != _release(torch.__version__):
        raise ImportError(
            f"ringreduce was built for torch {built.TORCH_VERSION}, but torch {torch.__version__} "
            f"is installed. {rebuild}"
        )
    if torch.compiled_with_cxx11_abi() != built.CXX11_ABI:
        raise ImportError(
            f"ringreduce and this torch {torch.__version__} were built with different C++ string "
            f"ABIs (_GLIBCXX_USE_CXX11_ABI={int(built.CXX11_ABI)} and "
            f"{int(torch.compiled_with_cxx11_abi())}). {rebuild}"
        )
    try:
        return importlib.import_module("ringreduce._C")
    except ModuleNotFoundError as error:
        if error.name != "ringreduce._C":
            raise
        raise ImportError(f"ringreduce's C++ extension has not been built. {rebuild}") from None
    except ImportError as error:
        if "undefined symbol" in str(error) or "not found (required by" in str(error):
            raise ImportError(
                f"ringreduce's C++ extension, built for torch {built.TORCH_VERSION}, does not load "
                f"into torch {torch.__version__} ({error}). {rebuild}"
            ) from error
        # Not of the build: no memory (ulimit -v), no permission, a missing library.
        raise ImportError(f"ringreduce's C++ extension does not load: {error}") from error
