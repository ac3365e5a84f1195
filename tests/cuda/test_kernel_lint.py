"""The lint of the GPU kernels' code fails if there is code that it did not read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernel_lint

USAGE = " arch = sm_90\n Function carryKernel:\n  REG:60 STACK:0\n"
SASS = "\tcode for sm_90\n\t\tFunction : carryKernel\n\t/*0000*/    EXIT ;   /* 0x0 */\n"
PTX = ".target sm_90\n.visible .entry carryKernel(\n)\n{\n\tret;\n}\n"


@pytest.mark.parametrize(
    ("sass", "says"),
    [
        ("", "1 functions have registers but no SASS"),
        (SASS.replace("Function :", "Function"), "1 functions have registers but no SASS"),
        (SASS.replace("sm_90", "sm_80"), "nothing is said of the registers"),
        (SASS.replace("/*0000*/", "0000:"), "no instruction of carryKernel"),
    ],
)
def test_machine_code_that_is_not_read_is_an_error(sass: str, says: str) -> None:
    assert [k.family for k in kernel_lint.read_sass(SASS, USAGE)] == ["carry"]
    with pytest.raises(ValueError, match=says):
        list(kernel_lint.read_sass(sass, USAGE))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"-sass": "", "-res-usage": ""}, "no SASS is read in kernels.cu.o"),
        ({"-ptx": ""}, "no PTX is read in kernels.cu.o"),
        (
            {"-ptx": PTX + PTX.replace("carry", "copyIn").replace(".target sm_90\n", "")},
            "kernels.cu.o has no SASS of copyInKernel for sm_90",
        ),
    ],
)
def test_each_object_has_its_kernels_in_both_forms(
    tmp_path: Path, change: dict[str, str], says: str
) -> None:
    build = stand_in(tmp_path, {})
    assert [k.form for k in kernel_lint.read_build(build, tmp_path)] == ["PTX", "SASS"]
    stand_in(tmp_path, change)
    with pytest.raises(ValueError, match=says):
        kernel_lint.read_build(build, tmp_path)


def test_what_cuobjdump_says_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = stand_in(tmp_path, {})
    (tmp_path / "-sass").unlink()
    monkeypatch.setattr(sys, "argv", ["kernel_lint.py", "--tools", str(tmp_path), str(build)])
    assert kernel_lint.main() == 2
    error = capsys.readouterr().err
    assert "-sass: No such file" in error and "it calls nvdisasm" in error


def test_a_family_that_is_not_read_is_named() -> None:
    kernels = [*kernel_lint.read_ptx(PTX), *kernel_lint.read_sass(SASS, USAGE)]
    limits = kernel_lint.read_limits(kernel_lint.HERE / "kernel_limits.txt")
    assert not list(kernel_lint.unread(kernels, {"carry": limits["carry"]}))
    missing = list(kernel_lint.unread(kernels, limits))
    assert len(missing) == 2 and all("twoshot" in one and "carry" not in one for one in missing)
    assert kernel_lint.try_seeds(kernels, verbose=False) == [
        "PTX for sm_90 has no two-shot kernel to put mistakes into",
        "SASS for sm_90 has no two-shot kernel to put mistakes into",
    ]


def stand_in(folder: Path, change: dict[str, str]) -> Path:
    """A build folder with one object, and a cuobjdump that tells of it by its files."""
    for option, text in ({"-ptx": PTX, "-sass": SASS, "-res-usage": USAGE} | change).items():
        (folder / option).write_text(text)
    tool = folder / "cuobjdump"
    tool.write_text(f'#!/bin/sh\ncd {folder} && exec cat -- "$1"\n')
    tool.chmod(0o755)
    at = folder / "build/CMakeFiles/ringreduce_cuda.dir/kernels.cu.o"
    at.parent.mkdir(parents=True, exist_ok=True)
    at.touch()
    return folder / "build"
