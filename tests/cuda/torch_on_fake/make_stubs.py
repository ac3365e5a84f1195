"""Makes libraries that stand in for those of CUDA that PyTorch's wheel for GPUs wants to load.

    make_stubs.py TORCH_LIB HERE [--missing]

Reads which symbols the libraries in TORCH_LIB leave undefined and writes to HERE, for each library
of CUDA's that would have them, NAME.cc, NAME.map (its symbol versions) and NAME itself, compiled by
$CXX, or c++.  A function of a stub says its name and ends the process, or, where its library's
functions answer with an error as a rule, returns one.

The runtime and the driver (libcudart, libcuda) are one library of the build's, of the files beside
this one and of the fake's, and NCCL is another: for what these leave out there are weak functions
in libcudart.so.13.cc and libnccl.so.2.cc.

--missing makes stubs for programs on the CPU, without the fake.  HERE is an environment's folder
nvidia/cuNN/lib, where torch looks.  A stub is made of each library that is in no nvidia/*/lib, but
not of the driver, which torch does without.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

RUNTIME, DRIVER, NCCL = "libcudart.so.13", "libcuda.so.1", "libnccl.so.2"
BUILT = (RUNTIME, NCCL)

# Symbols without a version, or with one that is not a library's name, by how they begin.
BY_PREFIX = {
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "nccl": NCCL,
    "nvshmem": "libnvshmem_host.so.3",
    "cu": RUNTIME,  # the driver's
}

# Their functions return 0 or an error; this is the one that says least.
ANSWERS = {"libcupti.so.13": 999, NCCL: 3, RUNTIME: 801}

# Torch needs these even if it does without the rest.
WRITTEN = {"cudnnGetVersion": "unsigned long cudnnGetVersion() { return 0; }"}


def undefined(library: Path) -> list[tuple[str, str]]:
    """The symbols that it takes from others, each with its version or ""."""
    command = ["nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split()[-1].partition("@") for line in lines]
    return [(name, version.lstrip("@")) for name, _, version in symbols]


def needed(library: Path) -> set[str]:
    output = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True).stdout
    return {line.split("[")[1].rstrip("]") for line in output.splitlines() if "(NEEDED)" in line}


def home_of(name: str, version: str) -> str | None:
    """The library of CUDA's that has the symbol; none for those of other libraries."""
    if ".so." in version and version.startswith(("libcu", "libnv")):
        return version
    if version == "NVSHMEM" or (not version and name.isidentifier()):
        return next((home for prefix, home in BY_PREFIX.items() if name.startswith(prefix)), None)
    return None


def source(library: str, names: list[str]) -> str:
    weak = "__attribute__((weak)) " if library in BUILT else ""
    answer = ANSWERS.get(library)
    text = "#include <cstdio>\n#include <cstdlib>\n\n"
    end = "std::abort();" if answer is None else f"return {answer};"
    kind = "void" if answer is None else "int"
    for name in names:
        if name in WRITTEN:
            text += f'extern "C" {WRITTEN[name]}\n'
            continue
        text += (
            f'extern "C" {weak}{kind} {name}() {{\n'
            f'  std::fprintf(stderr, "fake CUDA: {library} has no {name}, which was called\\n");\n'
            f"  {end}\n}}\n"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("torch_lib", type=Path)
    parser.add_argument("here", type=Path)
    parser.add_argument("--missing", action="store_true", help="stubs beside libraries of CUDA's")
    arguments = parser.parse_args()
    torch_lib, here = arguments.torch_lib, arguments.here
    here.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, set[tuple[str, str]]] = defaultdict(set)
    files = sorted(torch_lib.glob("*.so"))
    there = {path.name for path in files}
    for path in files:
        for library in needed(path):
            if library not in there and library.startswith(("libcu", "libnv", "libnccl")):
                wanted[RUNTIME if library == DRIVER else library]  # maybe for nothing in it
        for name, version in undefined(path):
            home = home_of(name, version)
            if home is not None:
                wanted[home].add((name, version))
    if arguments.missing:
        for path in here.parent.parent.glob("*/lib/*"):
            wanted.pop(path.name, None)
    else:
        (here / DRIVER).unlink(missing_ok=True)
        (here / DRIVER).symlink_to(RUNTIME)
    for library, symbols in sorted(wanted.items()):
        versions = defaultdict(list)
        for name, version in sorted(symbols):
            versions[version].append(name)
        stub = here / f"{library}.cc"
        stub.write_text(source(library, sorted({name for name, _ in symbols})))
        script = here / f"{library}.map"
        script.write_text(
            "".join(
                f"{version or library} {{ global: {'; '.join(names)}; }};\n"
                for version, names in versions.items()
            )
        )
        if library in BUILT and not arguments.missing:
            continue
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{library}"]
        flags += [f"-Wl,--version-script={script}"] if symbols else []
        subprocess.run([*compiler, *flags, str(stub), "-o", str(here / library)], check=True)


if __name__ == "__main__":
    main()
