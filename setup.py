"""Drives CMake, which describes the build (CMakeLists.txt); metadata is in pyproject.toml.

What is missing is said in one sentence before anything is compiled.  Environment: CXX (the
compiler), MAX_JOBS (compilations at a time), RINGREDUCE_CUDA and RINGREDUCE_CUDA_ARCHS (whether and
for which GPUs: cmake/cuda.cmake), RINGREDUCE_OPENSSL (whether connections can be encrypted:
cmake/openssl.cmake), RINGREDUCE_CMAKE_ARGS (more arguments for CMake).
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 11)

# Environments that are made for a build, and know none that it is for; by a part of their path.
WITHOUT_ISOLATION = {
    "/builds-v": (
        "With uv use `uv pip install --no-build-isolation .`; in a project that depends on "
        'ringreduce, put under [tool.uv] `no-build-isolation-package = ["ringreduce"]`, or '
        '`extra-build-dependencies = { ringreduce = [{ requirement = "torch", match-runtime = true '
        "}] }`."
    ),
    "/build-env-": "Use `python -m build --no-isolation`.",
}

# Uses what the oldest compilers that we support have and their predecessors lack.
PROBE = """
#include <atomic>
#include <concepts>
#include <span>
template <std::integral T> T load(T& x) { return std::atomic_ref<T>(x).load(); }
int main() { int x = 0; return load(x) + std::span<int>(&x, 1)[0]; }
"""


def fail(sentence: str) -> None:
    sys.exit(f"\nringreduce cannot be built here: {sentence}\n")


def check_platform() -> None:
    if sys.platform != "linux":
        fail(f"it runs on Linux only (memfd, pidfd, futex), and this is {sys.platform}.")
    if platform.machine() not in ("x86_64", "aarch64"):
        fail(f"it has kernels for x86_64 and aarch64 only, and this is {platform.machine()}.")


def find_torch() -> bool:
    """Whether there is a torch to build against.  Lets a build that pip isolates see it.

    pip isolates by these variables and a sitecustomize of its own, which hide the packages of this
    very Python.  They are put behind those of the build, and Pythons that CMake starts see them.
    """
    if importlib.util.find_spec("torch") is not None:
        return True
    isolation = ("PYTHONPATH", "PYTHONNOUSERSITE")
    environment = {name: value for name, value in os.environ.items() if name not in isolation}
    script = "import sys; print(*sys.path[1:], sep=chr(10))"  # without the current folder
    outside = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    hidden = [path for path in outside.stdout.splitlines() if path not in sys.path]
    sys.path += hidden
    importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        return False
    for name in isolation:
        os.environ.pop(name, None)
    return True


def check_torch() -> str:
    """Returns the version of the installed torch."""
    wanted = ".".join(map(str, MINIMUM_TORCH))
    if not find_torch():
        for part, way_out in WITHOUT_ISOLATION.items():
            if part in sys.prefix:
                fail(
                    f"it is to be built against the installed torch ({wanted} or newer), and "
                    f"{sys.prefix} is isolated from it. {way_out}"
                )
        fail(
            f"torch is missing for {sys.executable}, so install torch {wanted} or newer first "
            "and then use `pip install .`."
        )
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # no plugin has a part in a build
    try:
        import torch
    except Exception as error:
        fail(f"torch is installed but `import torch` fails with {type(error).__name__}: {error}.")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        fail(f"it needs torch {wanted} or newer, and torch {torch.__version__} is installed.")
    return str(torch.__version__)


def find_tool(name: str) -> str:
    """cmake or ninja: from its pip package, which is as new as we need, or else from PATH."""
    beside_python = Path(sys.executable).parent / name
    if beside_python.exists():
        return str(beside_python)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        for candidate in (package / "data" / "bin" / name, package / "bin" / name):
            if candidate.exists():
                return str(candidate)
    found = shutil.which(name)
    if found is None:
        fail(f"{name} is missing, so run `{sys.executable} -m pip install {name}` first.")
    return str(found)


def check_cmake(cmake: str) -> None:
    answer = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=True)
    version = answer.stdout.split()[2]
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 18):
        fail(
            f"it needs cmake 3.18 or newer, and {cmake} is {version}, so run "
            f"`{sys.executable} -m pip install cmake` first."
        )


def check_compiler() -> None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    wanted = "a C++20 compiler (GCC 11 or newer, clang 14 or newer)"
    if compiler is None:
        fail(f"{wanted} is missing: there is no {' and no '.join(names)} on PATH.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cc"
        source.write_text(PROBE)
        flags = ["-std=c++20", "-c", str(source), "-o", os.devnull]
        if platform.machine() == "x86_64":
            flags.append("-march=x86-64-v4")
        probe = subprocess.run(shlex.split(compiler) + flags, capture_output=True, text=True)
    if probe.returncode != 0:
        fail(
            f"it needs {wanted}, and {shutil.which(shlex.split(compiler)[0])} does not compile "
            "C++20, so install a newer one or name one in the environment variable CXX."
        )


def check_wheel() -> None:
    version = tuple(int(part) for part in setuptools.__version__.split(".")[:2])
    if version < (70, 1) and importlib.util.find_spec("wheel") is None:
        fail(
            f"setuptools {setuptools.__version__} needs the package wheel beside it, so run "
            f"`{sys.executable} -m pip install wheel` first."
        )


def run(command: list[str]) -> None:
    """Runs it, its output for all to see."""
    if subprocess.run(command).returncode != 0:
        fail(f"`{Path(command[0]).name}` failed; its output above says why.")


def jobs() -> int:
    """As many compilations as there are cores and memory for (torch's headers take up to 2 GiB)."""
    if os.environ.get("MAX_JOBS"):
        return int(os.environ["MAX_JOBS"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // 2**31))


class CMakeBuild(build_ext):
    """Builds ringreduce._C in build/<python>-torch<version>, which stays, so that it is quick to
    build again; for a wheel, puts it and _build_info.py where setuptools wants them."""

    def build_extension(self, ext: Extension) -> None:
        check_platform()
        torch_version = check_torch()
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        folder = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{torch_version}"
        # A configure that failed leaves no build.ninja, and a compiler once taken is not asked for
        # again: only then is there something to check.
        if not (folder / "build.ninja").exists():
            check_cmake(cmake)
            check_compiler()
        self.configure(cmake, ninja, folder)
        run([cmake, "--build", str(folder), "--target", "_C", "-j", str(jobs())])
        self.name_folder(folder)

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        for name in (target.name, "_build_info.py"):
            shutil.copy2(folder / name, target.parent)

    def name_folder(self, folder: Path) -> None:
        """build/extension-x is the folder of .venv-x, build/extension that of .venv or of an
        environment elsewhere: the Makefile builds the C++ tests there."""
        name = "extension" + sys.prefix.partition(f"{ROOT}/.venv")[2]
        link = folder.parent / name
        if link.is_dir() and not link.is_symlink():  # a copy of a tree may have made a folder of it
            shutil.rmtree(link)
        fresh = folder.parent / f"{name}.{os.getpid()}"
        fresh.symlink_to(folder.name)
        fresh.replace(link)

    def copy_extensions_to_source(self) -> None:
        """An editable install imports from the build folder of its Python and torch, so that
        several share a tree (ringreduce/core/load.py).  A copy in the tree would be found first."""
        for old in [*ROOT.glob("ringreduce/_C*.so"), *ROOT.glob("ringreduce/_build_info.py")]:
            old.unlink()

    def configure(self, cmake: str, ninja: str, folder: Path) -> None:
        cache = folder / "CMakeCache.txt"
        # CMake refuses a build folder that came along when its source tree was copied or moved.
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(folder)
        command = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        settings = {
            "CMAKE_MAKE_PROGRAM": ninja,
            "CMAKE_BUILD_TYPE": "Release",
            "RINGREDUCE_PYTHON": sys.executable,
            "RINGREDUCE_BUILD_EXTENSION": "ON",
            # Described, but not built: the Makefile builds them in the same folder.
            "RINGREDUCE_BUILD_TESTS": "ON",
            "RINGREDUCE_BUILD_BENCHMARKS": "ON",
        }
        command += [f"-D{name}={value}" for name, value in settings.items()]
        for name in ("RINGREDUCE_CUDA", "RINGREDUCE_CUDA_ARCHS", "RINGREDUCE_OPENSSL"):
            # Forgotten when no longer set, or the folder would go on as it was told the last time.
            command.append(f"-D{name}={os.environ[name]}" if os.environ.get(name) else f"-U{name}")
        command += shlex.split(os.environ.get("RINGREDUCE_CMAKE_ARGS", ""))
        run(command)


class Build(build):
    """build/lib* is filled anew each time, or modules deleted since would still be installed."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class DistInfo(dist_info):
    """pip asks for metadata first, and then downloads what it names: torch, 2 GB of it, only to
    fail afterwards where it cannot be built.  So what can be seen early is checked here."""

    def run(self) -> None:
        check_platform()
        check_torch()
        check_wheel()
        super().run()


setup(
    license="BSD-3-Clause",
    ext_modules=[Extension("ringreduce._C", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "dist_info": DistInfo},
)
