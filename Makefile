# Everything that is done with this tree, each thing in one command.  `make` alone lists them.
# It all happens in .venv and build/: nothing is installed outside of this folder.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= $(shell nproc)
WORLD ?= 3
# More arguments for CMake; setup.py reads the same variable.
RINGREDUCE_CMAKE_ARGS ?=
export RINGREDUCE_CMAKE_ARGS
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(abspath $(VENV))/bin
CPP_FILES = $(shell find csrc tests benchmarks -name '*.cc' -o -name '*.h')
# What the extension is made of: when none of it changed, `make build` has nothing to do.
BUILD_INPUTS := $(shell find csrc -name '*.cc' -o -name '*.h') CMakeLists.txt setup.py pyproject.toml
CMAKE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja $(RINGREDUCE_CMAKE_ARGS)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv build demo test test-full test-cpp torch-suite lint format sanitize bench clean

help:
	@echo "make demo      train two models on gloo and on ringreduce, side by side"
	@echo "make bench     time all-reduce on gloo and on ringreduce, side by side"
	@echo "make test      the C++ tests and the Python tests"
	@echo "make test-full the long variants: 100 kills, 1,000 groups, more than 2 GiB, many random programs"
	@echo "make torch-suite  PyTorch's own distributed tests on ringreduce, beside Gloo's results"
	@echo "make sanitize  the C++ tests under the address, undefined and thread sanitizers"
	@echo "make lint      formatting, lint and types          (make format: put the formatting right)"
	@echo "make build     build and install ringreduce into $(VENV)"
	@echo "make venv      only make $(VENV), with torch and the tools"
	@echo "make clean     remove build/ and what the tools left ($(VENV) stays)"
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  TORCH='$(TORCH)'  (any pip requirement, a wheel's path too)"
	@echo "           JOBS=$(JOBS)  VENV=$(VENV)"
	@echo "           WORLD=$(WORLD)  (ranks of torch-suite)"

venv: $(VENV)/.ready

$(VENV)/.ready: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "ringreduce needs Python 3.10 or newer: make PYTHON=/path/to/python3 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: install its venv module" \
	         "(Debian and Ubuntu: apt-get install python3-venv)."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements-dev.txt '$(TORCH)'
	@touch $@

build: $(VENV)/.built

$(VENV)/.built: $(VENV)/.ready $(BUILD_INPUTS)
	@echo "Building ringreduce (minutes the first time: torch's headers are large)"
	$(BIN)/python -m pip install -q --no-build-isolation -e .
	@touch $@

demo: build
	$(BIN)/python examples/demo.py

bench: build
	$(BIN)/python -m ringreduce.bench all_reduce --nproc 2 --compare gloo

# Three files at a time, whatever the machine: the tests of failures wait more than they compute.
test: build test-cpp
	$(BIN)/python -m pytest tests -q -n 3 --dist loadfile

# What needs minutes or gigabytes to show: 100 kills, 1,000 groups, more than 2 GiB, random programs,
# compiled steps.
test-full: build
	RINGREDUCE_TEST_FULL=1 $(BIN)/python -m pytest tests -q \
	  -k "2_to_the_31 or sigkill_amid or names_a_survivor or many_groups or burn_a_core or soak or \
	  compiled_steps"

# Gloo's results are kept in tests/torch_suite; for another torch or number of ranks they are made first.
torch-suite: build
	$(BIN)/python tests/torch_suite/run.py --world $(WORLD)

# One at a time: tests that hold others to deadlines want the cores for themselves.
test-cpp: $(VENV)/.ready
	$(CMAKE) -B build/test
	$(BIN)/cmake --build build/test -j $(JOBS)
	cd build/test && $(BIN)/ctest --output-on-failure

# The mutants run last and by themselves, so that their names and count are seen.
sanitize: $(VENV)/.ready
	$(CMAKE) -B build/asan -DRINGREDUCE_SANITIZE="address;undefined" -DRINGREDUCE_BUILD_BENCHMARKS=OFF
	$(BIN)/cmake --build build/asan -j $(JOBS)
	cd build/asan && $(BIN)/ctest --output-on-failure
	$(CMAKE) -B build/tsan -DRINGREDUCE_SANITIZE=thread -DRINGREDUCE_BUILD_BENCHMARKS=OFF
	$(BIN)/cmake --build build/tsan -j $(JOBS)
	cd build/tsan && $(BIN)/ctest --output-on-failure -LE mutants
	tests/cpp/run_mutants.sh build/tsan

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf build dist *.egg-info ringreduce/*.so ringreduce/_build_info.py $(VENV)/.built
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ringreduce tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
