"""The build of the code for GPUs: when it is built, what is said where it is not, and the report of
its kernels.  Needs neither nvcc nor a GPU; `make cuda-build` compiles."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools.command.egg_info import FileList

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cuda"))

import kernel_report  # noqa: E402
import library_size  # noqa: E402

# What ptxas says of a kernel, of one that spills, and of a function that it calls.
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN10ringreduce4cuda4ringIfLi4EEEvPT_' for 'sm_90'
ptxas info    : Function properties for _ZN10ringreduce4cuda4ringIfLi4EEEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 1 barriers, 128 bytes smem, 380 bytes cmem[0]
ptxas info    : Compile time = 2.492 ms
ptxas info    : Compiling entry function '_ZN10ringreduce4cuda4ringIfLi4EEEvPT_' for 'sm_120'
ptxas info    : Function properties for _ZN10ringreduce4cuda4ringIfLi4EEEvPT_
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, 256 bytes smem
ptxas info    : Function properties for helper
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_the_report_names_a_kernel_that_spills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "ptxas.log"
    log.write_text(LOG)
    assert kernel_report.main(str(log)) == 1
    out, err = capsys.readouterr()
    assert out == "2 kernels, 1 spill registers\n"
    assert "ring" in err and err.endswith(" spills 20 bytes on sm_120\n")


def path_without_nvcc(folder: Path) -> list[str]:
    """PATH, and for each folder of it that has an nvcc one of links to everything else in there."""
    places = []
    for number, place in enumerate(map(Path, os.environ["PATH"].split(os.pathsep))):
        if (place / "nvcc").exists():
            links = folder / f"path{number}"
            links.mkdir()
            for tool in place.iterdir():
                if tool.name != "nvcc":
                    (links / tool.name).symlink_to(tool)
            place = links
        places.append(str(place))
    return places


def write_nvcc(folder: Path, script: str) -> None:
    folder.mkdir(parents=True)
    (folder / "nvcc").write_text(script)
    (folder / "nvcc").chmod(0o755)


def configure(folder: Path, nvcc: str | None, *arguments: str) -> tuple[int, str]:
    """Runs CMake with this nvcc, or none, in PATH; returns its status and what it says."""
    tools = folder / "bin"
    if nvcc is not None:
        write_nvcc(tools, nvcc)
    # Those of the virtual environment first, as setup.py takes them.
    places = [str(tools), str(Path(sys.executable).parent), *path_without_nvcc(folder)]
    environment = dict(os.environ, PATH=os.pathsep.join(places))
    environment["PYTHONPATH"] = str(folder / "site-packages")
    arguments = (*arguments, f"-DRINGREDUCE_CUDA_USUAL={folder}/usual")
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", folder / "build", "-G", "Ninja", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, " ".join(done.stdout.split())


BROKEN = "#!/bin/sh\necho unsupported GNU version >&2; exit 1\n"


@pytest.mark.parametrize(
    ("nvcc", "arguments", "fails", "says"),
    [
        (None, [], False, "CUDA: not built, there is no nvcc in PATH"),
        (None, ["1"], True, "RINGREDUCE_CUDA=1, but there is no nvcc in PATH"),
        (BROKEN, [], False, "CUDA: not built, {}/bin/nvcc cannot make a C++20 program with"),
        (BROKEN, ["1"], True, "unsupported GNU version"),
        (BROKEN, ["yes"], True, 'RINGREDUCE_CUDA is auto, 0 or 1, not "yes".'),
        (BROKEN, ["1", "-DRINGREDUCE_SANITIZE=thread"], True, "do not go with nvcc"),
    ],
)
def test_when_it_is_built(
    tmp_path: Path, nvcc: str | None, arguments: list[str], fails: bool, says: str
) -> None:
    if arguments:
        arguments = [f"-DRINGREDUCE_CUDA={arguments[0]}", *arguments[1:]]
    status, said = configure(tmp_path, nvcc, *arguments)
    assert (status != 0) == fails, said
    assert says.format(tmp_path) in said


# One that compiles anything, of a CUDA that is not torch's.
OTHER = """\
#!/bin/sh
case $1 in
  --version) echo "Cuda compilation tools, release 12.6, V12.6.20" ;;
  --list-gpu-arch) echo compute_90 ;;
esac
"""


def beside_a_torch_for_gpus(folder: Path) -> list[str]:
    """The arguments for CMake to build the extension for a torch of CUDA 13.0, of which no more is
    there than CMake looks at."""
    torch = folder / "site-packages" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text('__version__ = "2.13.0+cu130"\ncuda = "13.0"\n')
    (torch / "lib" / "libc10.so").write_text("N3c105ErrorC1ENS_14SourceLocationENSt7__cxx11")
    python = folder / "python"  # without its own packages, of which nvcc may be one
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return ["-DRINGREDUCE_BUILD_EXTENSION=ON", f"-DRINGREDUCE_PYTHON={python}"]


@pytest.mark.parametrize(
    ("place", "nvcc", "why"),
    [
        (None, "", ", {0}/usual-13.0/bin, {0}/usual-13/bin, {0}/usual/bin."),
        ("site-packages/nvidia/cu13/bin", BROKEN, "{0}/site-packages/nvidia/cu13/bin/nvcc cannot"),
        ("usual/bin", OTHER, "built with CUDA 13.0, and {0}/usual/bin/nvcc is of CUDA 12.6"),
    ],
)
def test_beside_a_torch_for_gpus_it_is_built_or_the_build_stops(
    tmp_path: Path, place: str | None, nvcc: str, why: str
) -> None:
    if place is not None:
        write_nvcc(tmp_path / place, nvcc)
    status, said = configure(tmp_path, None, *beside_a_torch_for_gpus(tmp_path))
    assert status != 0
    assert why.format(tmp_path) in said
    for way_out in ("install an nvcc of CUDA 13 ", "set CUDA_HOME", "RINGREDUCE_CUDA=0"):
        assert way_out in said


# One that compiles nothing: of the program that tells the GPUs of this machine it makes a script.
SEES = """\
#!/bin/sh
case "$*" in
  --version) echo "Cuda compilation tools, release 12.6, V12.6.20" ;;
  --list-gpu-arch) printf 'compute_%s\\n' 70 75 80 86 89 90 ;;
  *cuda_probe.cu*) for out; do :; done; printf '#!/bin/sh\\n{}\\n' > "$out"; chmod +x "$out" ;;
  *) exit 1 ;;
esac
"""
ALL_THAT_IT_KNOWS = "sm_75 sm_80 sm_90 and newer"


@pytest.mark.parametrize(
    ("gpus", "asked", "says"),
    [
        ("90 90", None, "sm_90 and newer (the GPUs of this machine;"),
        ("90 86", "auto", "sm_86 sm_90 and newer (the GPUs of this machine;"),
        ("89", "native", "sm_89 and newer (the GPUs of this machine;"),
        ("", None, f"{ALL_THAT_IT_KNOWS} (all, since no GPU is seen here;"),
        ("120", None, f"{ALL_THAT_IT_KNOWS} (all, since a GPU of this machine is sm_120;"),
        ("90 70", None, f"{ALL_THAT_IT_KNOWS} (all, since a GPU of this machine is sm_70;"),
        ("90", "all", f"{ALL_THAT_IT_KNOWS} (RINGREDUCE_CUDA_ARCHS=all;"),
        ("90", "75 86", "sm_75 sm_86 and newer (RINGREDUCE_CUDA_ARCHS=75 86;"),
        ("", "native", "this machine has no GPU to compile for"),
        ("120", "native", "compiles for none of the GPUs asked for"),
        ("", "some", "RINGREDUCE_CUDA_ARCHS is auto, native, all or a list of numbers"),
    ],
)
def test_it_compiles_for_the_gpus_that_are_here_or_for_all(
    tmp_path: Path, gpus: str, asked: str | None, says: str
) -> None:
    nvcc = SEES.format("".join(f"echo {gpu};" for gpu in gpus.split()))
    arguments = [] if asked is None else [f"-DRINGREDUCE_CUDA_ARCHS={asked}"]
    status, said = configure(tmp_path, nvcc, "-DRINGREDUCE_CUDA=1", *arguments)
    assert status != 0  # there is no such compiler, as CMake finds when it has said this
    assert says in said


@pytest.mark.parametrize(
    ("bytes", "flags", "status"),
    [
        (library_size.MOST_MACHINE_CODE, "--compress-mode=size", 0),
        (10**7, "--compress-mode=size", 1),
        (10**7, "", 0),
    ],
)
def test_a_library_that_has_grown_too_large_is_told(
    tmp_path: Path, bytes: int, flags: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert library_size.main(tmp_path) == 2
    kernels = tmp_path / "CMakeFiles/ringreduce_cuda.dir/csrc/kernels.cu.o"
    kernels.parent.mkdir(parents=True)
    kernels.write_bytes(b"\0" * bytes)
    (tmp_path / "libringreduce_cuda.a").touch()
    (tmp_path / "build.ninja").write_text(flags)
    (tmp_path / "ptxas.log").write_text(LOG.replace("sm_120", "sm_90"))
    assert library_size.main(tmp_path) == status
    said = capsys.readouterr()
    assert f"for sm_90 {bytes:,}" in said.out and ("(limit" in said.out) == bool(flags)
    assert ("larger than" in said.err) == bool(status)


def test_the_build_keeps_the_reason_why_it_is_not_built(tmp_path: Path) -> None:
    arguments = beside_a_torch_for_gpus(tmp_path)
    status, said = configure(tmp_path, None, "-DRINGREDUCE_CUDA=0", *arguments)
    assert status == 0, said
    built = runpy.run_path(str(tmp_path / "build" / "_build_info.py"))
    assert built["CUDA"] == "" and built["CUDA_MISSING"] == "switched off by RINGREDUCE_CUDA=0"
    assert built["CUDA_MISSING"] in (tmp_path / "build" / "cuda_missing.cc").read_text()


def test_the_extension_says_what_it_was_built_with() -> None:
    from ringreduce import _build_info
    from ringreduce.core import load

    assert load.load().cuda_build() == _build_info.CUDA


def test_a_source_distribution_has_all_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    packed = FileList()
    for line in Path("MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            packed.process_template_line(line)
    wanted = {
        str(path)
        for folder in ("csrc", "tests", "benchmarks", "cmake")
        for path in Path(folder).rglob("*")
        if path.suffix in (".h", ".cc", ".cu", ".cuh", ".cmake", ".sh", ".py")
    }
    assert "csrc/cuda/kernels/kernels.cu" in wanted and "cmake/cuda.cmake" in wanted
    assert sorted(wanted - set(packed.files)) == []
