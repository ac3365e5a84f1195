"""The inner loop: checks what a change touches, and no more (`make quick`, `make t T=ring`).

    python tests/inner_loop.py quick        # the files that differ from HEAD, or the last commit's
    python tests/inner_loop.py named ring   # C++ programs and Python tests with "ring" in the name

`quick` checks format and lint of the changed files, builds the extension, and runs the C++ tests of
the changed layers with a choice of the Python tests.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# As setup.py names it: build/extension-x for .venv-x.
BUILD = ROOT / "build" / ("extension" + sys.prefix.partition(f"{ROOT}/.venv")[2])
TOOLS = Path(sys.executable).parent
CPP_TESTS = sorted((ROOT / "tests" / "cpp").glob("*_test.cc"))
# A few fast tests: the layers, errors that name the rank, averaged gradients.
SMOKE = ("test_layers.py", "test_mismatch.py", "test_average_gradients.py")
INCLUDE = re.compile(r'#include "([a-z0-9_/]+[.]h)"')


def run(*command: object) -> None:
    """Runs a tool of this environment; ends the program if it fails."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    status = subprocess.run([str(TOOLS / words[0]), *words[1:]], cwd=ROOT).returncode
    if status != 0:
        sys.exit(status)


def changed_files() -> list[Path]:
    """Files that differ from HEAD or are new; of a clean tree, those of the last commit."""

    def lines(*words: str) -> list[str]:
        answer = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return answer.stdout.split("\n")[:-1]

    names = lines("diff", "--name-only", "HEAD")
    names += lines("ls-files", "--others", "--exclude-standard")
    names = names or lines("diff", "--name-only", "HEAD~1", "HEAD")
    return [ROOT / name for name in sorted(set(names))]


def lint(files: list[Path]) -> None:
    files = [path for path in files if path.exists()]
    python = [path for path in files if path.suffix in (".py", ".pyi")]
    cpp = [path for path in files if path.suffix in (".cc", ".h", ".cu", ".cuh")]
    if python:
        run("ruff", "check", *python)
        run("ruff", "format", "--check", *python)
    if any(path.is_relative_to(ROOT / "ringreduce") for path in python):
        run("mypy")
    if cpp:
        run("clang-format", "--dry-run", "-Werror", *cpp)


def build_extension() -> None:
    run("python", "setup.py", "-q", "build_ext", "--inplace")


def includes_of(test: Path) -> set[str]:
    """What a test includes, also through the helper headers beside it, but not through csrc."""
    found: set[str] = set()
    todo = [test]
    while todo:
        for name in set(INCLUDE.findall(todo.pop().read_text())) - found:
            found.add(name)
            if (helper := test.parent / name).exists():
                todo.append(helper)
    return found


def cpp_tests_of(files: list[Path]) -> list[str]:
    """C++ tests and fuzz targets that changed, or are named after or include a changed layer."""
    csrc, tests = ROOT / "csrc", ROOT / "tests"
    folders = {str(path.parent.relative_to(csrc)) for path in files if path.is_relative_to(csrc)}
    helpers = {path.name for path in files if path.parent == tests / "cpp"}
    chosen = [path.stem for path in files if path.match("tests/fuzz/*_fuzz.cc")]
    for test in CPP_TESTS:
        includes = includes_of(test)
        named = any(Path(folder).name in test.stem for folder in folders)
        reached = folders & {str(Path(name).parent) for name in includes if "/" in name}
        if test in files or named or reached or helpers & includes:
            chosen.append(test.stem)
    return chosen


def run_cpp_tests(names: list[str]) -> None:
    if not names:
        return
    run("cmake", "--build", BUILD, "-j", os.cpu_count(), "--target", *names)
    pattern = f"^({'|'.join(names)})$"
    run("ctest", "--test-dir", BUILD, "--output-on-failure", "-j", 4, "-R", pattern)


def pytest(*arguments: object) -> None:
    run("python", "-m", "pytest", "-q", "-n", 3, "--dist", "loadfile", *arguments)


def quick() -> None:
    files = changed_files()
    lint(files)
    build_extension()
    run_cpp_tests(cpp_tests_of(files))
    tests = ROOT / "tests"
    python = {path for name in SMOKE for path in tests.glob(f"*/{name}")}
    python |= {path for path in files if path in set(tests.glob("*/test_*.py"))}
    pytest("-m", "not slow and not nightly", *sorted(python))


def named(word: str) -> None:
    build_extension()
    programs = [test.stem for test in CPP_TESTS if word in test.stem]
    run_cpp_tests(programs)
    files = [path for path in (ROOT / "tests").glob("*/test_*.py") if word in path.stem]
    if files:
        pytest("-m", "not slow and not nightly", *sorted(files))
    elif not programs:
        pytest("tests", "-k", word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("quick")
    verbs.add_parser("named").add_argument("word")
    args = parser.parse_args()
    if args.verb == "quick":
        quick()
    else:
        named(args.word)


if __name__ == "__main__":
    main()
