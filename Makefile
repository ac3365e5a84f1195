# Everything that is done with this tree, each thing in one command.  `make` alone lists them.
# It all happens in .venv, .venv-cuda and build/: nothing is installed outside of this folder.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
# NEWEST is torch-smoke's, TORCHES are torch-matrix's; the first is the oldest that is supported.
NEWEST ?= $(shell sed -n 's/^torch==//p' requirements-newest.txt)
TORCHES ?= 2.11.0 2.13.0 2.14.1 $(NEWEST)
# The environment from which VENV borrows all but torch, and whose core is not compiled once more; empty:
# VENV has everything itself.
BASE_VENV ?=
JOBS ?= $(shell nproc)
WORLD ?= 3
# full: make demo takes its time.
DEMO ?=
# For make t: part of a test's name.
T ?=
# For fuzz.
CLANG ?= clang++
FUZZ_SECONDS ?= 60
# Arguments for benchmarks/figures.py.
FIGURES ?=
# For net-faults and survive: how many, and the first one's seed.
RUNS ?= 200
SEED ?= 0
# An nvcc for cuda-build instead of the one from pip; cmake and ninja are then those in PATH.
CUDA_NVCC ?=
CUDA_VENV ?= .venv-cuda
# GPUs that cuda-build makes machine code for (cmake/cuda.cmake); `make nightly` makes it for all.
CUDA_ARCHS ?= 90
# For cuda-build: a libringreduce_core.a of this very tree, which is then not compiled once more.
CORE ?=
# ON: asan and tsan both have all tests that they can have, and asan all checks of UBSan.
SANITIZE_ALL ?= OFF
# More arguments for CMake; setup.py reads the same variable.
RINGREDUCE_CMAKE_ARGS ?=
export RINGREDUCE_CMAKE_ARGS
# torch from pip's index may be one for GPUs, which builds ringreduce for them or not at all.  Where there
# is no GPU, `make build` does without, whatever torch is.
export RINGREDUCE_CUDA ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),auto,0)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Python compiles a module at its first import and keeps the result.  pip does not compile them all: most
# of torch is never imported.  With this variable nothing is kept, and every process compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE
# torch looks up the name behind the address of every store that it connects to.  An answer that is
# lost then costs a second, not five.
export RES_OPTIONS ?= timeout:1 attempts:1

BIN := $(abspath $(VENV))/bin
SOURCES = -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'
CPP_FILES = $(shell find csrc tests benchmarks $(SOURCES))
# The folder in which setup.py builds the extension of this environment: build/extension for .venv,
# build/extension-x for .venv-x.  The C++ tests and benchmarks are built there too, so the core is
# compiled once.
BUILD = build/extension$(patsubst $(CURDIR)/.venv%,%,$(filter $(CURDIR)/.venv%,$(abspath $(VENV))))
# What the extension is made of: when none of it changed, `make build` has nothing to do.
BUILD_INPUTS := $(shell find csrc $(SOURCES)) CMakeLists.txt $(wildcard cmake/*) setup.py pyproject.toml
# The sanitizers and the GPU data plane have build folders of their own.
CMAKE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DRINGREDUCE_CUDA=0 \
  $(RINGREDUCE_CMAKE_ARGS)

ifeq ($(CUDA_NVCC),)
CUDA_BUILD = build/cuda
CUDA_BIN = $(abspath $(CUDA_VENV))/bin/
NVCC = $(abspath $(CUDA_VENV))/cuda/bin/nvcc
CUDA_EXTENSION = -DRINGREDUCE_BUILD_EXTENSION=ON -DRINGREDUCE_PYTHON=$(CUDA_BIN)python \
  -DRINGREDUCE_ON_FAKE=ON
else
CUDA_BUILD = build/cuda-own
CUDA_BIN =
CUDA_EXTENSION =
NVCC = $(or $(shell command -v $(CUDA_NVCC)),$(CUDA_NVCC))
endif
CUDA_CMAKE = $(CUDA_BIN)cmake -S . -G Ninja $(if $(CUDA_BIN),-DCMAKE_MAKE_PROGRAM=$(CUDA_BIN)ninja) \
  -DCMAKE_CUDA_COMPILER=$(NVCC) -DRINGREDUCE_CORE=$(if $(CORE),$(abspath $(CORE))) '-DRINGREDUCE_CUDA_ARCHS=$(CUDA_ARCHS)' -DRINGREDUCE_CUDA=1 -DRINGREDUCE_WERROR=ON $(CUDA_EXTENSION) \
  $(RINGREDUCE_CMAKE_ARGS)
KERNELS = $(CUDA_BUILD)/CMakeFiles/ringreduce_cuda.dir/csrc/cuda/kernels
# Random calls that the kernels' PTX is interpreted for (tests/cuda/ptx.h).
PTX_CASES ?= 30
# torch finds the stubs of CUDA's libraries, and the fake before any other libcudart.  Its operations
# run on the host, so hiding GPU memory from the host at each would take most of the time.
ON_FAKE = $(abspath $(CUDA_BUILD))/on_fake
RUN_ON_FAKE = PYTHONPATH=. FAKE_HIDES_MEMORY=0 LD_LIBRARY_PATH=$(ON_FAKE)/lib \
  LD_PRELOAD=$(ON_FAKE)/lib/libcudart.so.13

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv build demo demo-survive demo-see demo-diloco quick t docs test test-full test-c10d test-tcp test-cpp test-python \
  torch-suite torch-suite-tcp torch-matrix torch-smoke frameworks launchers lint includes format sanitize asan tsan mutants arm fuzz \
  bench bench-net figures net-faults survive nightly clean cuda-build torch-on-fake gpu-check gpu-build gpu-study

help:
	@echo "make demo      train two models on gloo and on ringreduce, side by side (DEMO=full: longer)"
	@echo "make demo-survive  kill a rank of a training run and let a new process join: no step is lost"
	@echo "make demo-see  a rank is late: how it is found, live and afterwards"
	@echo "make demo-diloco  train by DDP and by outer steps once in 30: loss and bytes"
	@echo "make bench     time all-reduce on gloo and on ringreduce, side by side"
	@echo "make bench-net the same between hosts: namespaces on emulated lines (needs root)"
	@echo "make figures   measure the times in README.md and docs anew, about 40 minutes (needs root for emulated lines)"
	@echo "make quick     check what you changed: format, lint, build, the tests of that layer"
	@echo "make t T=ring  the C++ programs and Python tests with \"ring\" in the name"
	@echo "make test      the C++ tests and the Python tests"
	@echo "make test-full whole programs: examples, tutorials, types"
	@echo "make nightly   all that is too long for each change: 100 kills, 1,000 groups, 2 GiB, all GPUs"
	@echo "make test-tcp  a choice of the Python tests over sockets (RINGREDUCE_WIRE=tcp)"
	@echo "make torch-suite  PyTorch's own distributed tests on ringreduce, beside Gloo's results"
	@echo "make torch-suite-tcp  the same over sockets, 2 and 3 ranks, and as 2 hosts of 2 ranks"
	@echo "make torch-smoke  build on the newest torch, and the tests of what is new in it"
	@echo "make torch-matrix  build, a choice of the tests and torch-suite on each torch of TORCHES"
	@echo "make frameworks  train under Lightning, Accelerate, Ray, DeepSpeed, ...: the same weights as on gloo?"
	@echo "make launchers start groups by torchrun, Open MPI, MPICH, Slurm's daemons, a notebook: what is installed"
	@echo "make sanitize  the C++ tests under the sanitizers: make asan, make tsan, then make mutants (SANITIZE_ALL=ON: each under both)"
	@echo "make arm       the core and the C++ tests for AArch64, run by qemu-user; needs a cross compiler"
	@echo "make fuzz      libFuzzer on what reads bytes of strangers, for FUZZ_SECONDS; needs clang"
	@echo "make survive   RUNS training runs with random kills and newcomers (docs/survive.md)"
	@echo "make net-faults  RUNS random faults between hosts: kills, cuts, partitions (needs root)"
	@echo "make docs      the docs as a site, in build/docs: open build/docs/index.html (Python 3.11 or newer)"
	@echo "make lint      formatting, lint, types, the origin of figures in docs  (make format: put the formatting right)"
	@echo "make includes  compile each file of the core by itself: it includes what it uses"
	@echo "make build     build and install ringreduce into $(VENV)"
	@echo "make cuda-build   compile and link all that is for GPUs; needs neither a GPU nor nvcc"
	@echo "make torch-on-fake  the GPU path in PyTorch, on a CUDA made of host memory: needs no GPU"
	@echo "make gpu-check    test and time it on this machine's GPUs  (make gpu-study: long tables)"
	@echo "make gpu-build    only compile what gpu-check runs"
	@echo "make venv      only make $(VENV), with torch and the tools"
	@echo "make clean     remove build/ and what the tools left ($(VENV) stays)"
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  TORCH='$(TORCH)'  (any pip requirement, a wheel's path too)"
	@echo "           JOBS=$(JOBS)  VENV=$(VENV)"
	@echo "           TORCHES='$(TORCHES)'  (of torch-matrix)"
	@echo "           WORLD=$(WORLD)  (ranks of torch-suite)"
	@echo "           RUNS=$(RUNS)  SEED=$(SEED)  (of net-faults and survive)"
	@echo "           CLANG=$(CLANG)  FUZZ_SECONDS=$(FUZZ_SECONDS)"
	@echo "           CUDA_ARCHS=$(CUDA_ARCHS)  (GPUs that cuda-build compiles for)"
	@echo "           CUDA_NVCC=$(CUDA_NVCC)  (for cuda-build: an nvcc of yours instead of pip's)"

venv: $(VENV)/.ready

define need_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "ringreduce needs Python 3.10 or newer: make PYTHON=/path/to/python3 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: install its venv module" \
	         "(Debian and Ubuntu: apt-get install python3-venv)."; exit 1; }
endef

ifeq ($(BASE_VENV),)
$(VENV)/.ready: requirements-dev.txt
	$(need_python)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -r requirements-dev.txt '$(TORCH)'
	@touch $@
else
# Of CUDA's libraries, which a torch for GPUs loads even where it finds none, it has the runtime, and stubs
# in place of the rest: 1 GB in all, not 6.
override RINGREDUCE_CUDA = 0
export CUDA_VISIBLE_DEVICES =
export PATH := $(abspath $(BASE_VENV))/bin:$(PATH)
RINGREDUCE_CMAKE_ARGS += -DRINGREDUCE_CORE=$(abspath build/extension/libringreduce_core.a)
SITE_PACKAGES = lib/python3*/site-packages
$(VENV)/.ready: $(BASE_VENV)/.ready
	test -x $(BIN)/python || $(BASE_VENV)/bin/python -m venv --without-pip $(VENV)
	cd $(VENV)/$(SITE_PACKAGES) && \
	  echo $(abspath $(wildcard $(BASE_VENV)/$(SITE_PACKAGES))) > base.pth && \
	  $(BIN)/python -m pip install -q --no-compile --no-deps '$(TORCH)' && \
	  if [ -e torch/lib/libtorch_cuda.so ]; then \
	    $(BIN)/python -m pip install -q --no-deps \
	      nvidia-cuda-runtime=="$$(sed -n "s/^cuda\b.*= '\(.*\)'/\1.*/p" torch/version.py)" && \
	    $(BIN)/python $(CURDIR)/tests/cuda/torch_on_fake/make_stubs.py torch/lib nvidia/cu13/lib \
	      --missing; \
	  fi
	@touch $@
endif

build: $(VENV)/.built

$(VENV)/.built: $(VENV)/.ready $(BUILD_INPUTS)
	@echo "Building ringreduce with RINGREDUCE_CUDA=$(RINGREDUCE_CUDA) (minutes the first time: torch's headers are large)"
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

demo: build
	$(BIN)/python examples/demo.py $(if $(filter full,$(DEMO)),--full)

demo-survive: build
	$(BIN)/python examples/demo_survive.py

demo-see: build
	$(BIN)/python examples/demo_see.py

demo-diloco: build
	RINGREDUCE_WIRE=tcp $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	  examples/train_diloco.py --ddp-steps 75 --outer-lr 1 --outer-momentum 0.5

bench: build
	$(BIN)/python -m ringreduce.bench all_reduce --nproc 2 --compare gloo

bench-net: build
	mkdir -p build/bench-net
	$(BIN)/python benchmarks/net/compare.py --out build/bench-net
	$(BIN)/python benchmarks/net/ring_order.py

# All on one machine, of one commit; FIGURES="--only NAME" measures some of it, FIGURES=--list lists it.
figures: build
	$(BIN)/python -m pip install -q mpi4py matplotlib
	$(BIN)/python benchmarks/figures.py $(FIGURES)

# Each run has a seed and can be had again: make net-faults RUNS=1 SEED=17
net-faults: build
	$(BIN)/python tests/net_faults.py --runs $(RUNS) --seed $(SEED) --jobs 2

# The inner loop builds by itself what has changed since the first build.
quick: $(if $(wildcard $(VENV)/.built),,build)
	$(BIN)/python tests/inner_loop.py quick

t: $(if $(wildcard $(VENV)/.built),,build)
	@test -n "$(T)" || { echo "make t needs part of a test's name, as in: make t T=ring"; exit 1; }
	$(BIN)/python tests/inner_loop.py named "$(T)"

test: test-cpp test-python

# Four files at a time, whatever the machine: the tests of failures wait more than they compute.
test-python: build
	$(BIN)/python -m pytest tests -q -m "not slow and not nightly" -n 4 --dist loadfile

# The files that show most of c10d in the time.  Over sockets, any others would run too, but for those
# about shared memory.
C10D_TESTS = $(patsubst %,tests/*/test_%.py,rules mismatch messages moving backend groups work coalescing \
  objects properties hook sharded)
test-c10d: build
	$(BIN)/python -m pytest $(C10D_TESTS) -q -n 3 --dist loadfile

test-tcp:
	RINGREDUCE_WIRE=tcp $(MAKE) test-c10d

# Whole programs: examples, tutorials, the checks of types.
test-full: build
	$(BIN)/cmake --build $(BUILD) --target cpp_benchmarks -j $(JOBS)
	$(BIN)/python -m pytest tests -q -m "slow and not nightly" -n 3 --dist loadfile

# What takes minutes or gigabytes to show and rarely fails: whole runs of the benchmarks; 100 kills,
# 1,000 groups, more than 2 GiB, random programs, on GPUs too; PyTorch's suite over sockets; each file compiled by
# itself; the newest torch; machine code for all GPUs; every check of UBSan; mutants of protocols; and AArch64.
nightly: build
	RINGREDUCE_TEST_FULL=1 $(BIN)/python -m pytest tests -q -m nightly
	RINGREDUCE_TEST_FULL=1 $(BIN)/python -m pytest tests -q -m "not nightly" \
	  -k "2_to_the_31 or sigkill_amid or costs_no_round or names_a_survivor or many_groups or burn_a_core or soak or \
	  compiled_steps or properties"
	RINGREDUCE_TEST_FULL=1 $(MAKE) torch-on-fake
	$(MAKE) torch-suite-tcp
	$(MAKE) torch-smoke
	$(MAKE) includes
	$(CMAKE) -B build/single -DRINGREDUCE_UNITY=OFF -DRINGREDUCE_WERROR=ON \
	  -DRINGREDUCE_BUILD_EXTENSION=ON -DRINGREDUCE_PYTHON=$(BIN)/python
	$(BIN)/cmake --build build/single --target _C -j $(JOBS)
	$(MAKE) cuda-build CUDA_BUILD=build/cuda-all CUDA_ARCHS=all PTX_CASES=1000 \
	  RINGREDUCE_CMAKE_ARGS="$(RINGREDUCE_CMAKE_ARGS) -DRINGREDUCE_UNITY=OFF"
	$(MAKE) sanitize SANITIZE_ALL=ON
	$(MAKE) arm

# Gloo's results are kept in tests/torch_suite; for another torch or number of ranks they are made first,
# in build/torch-suite.
torch-suite: build
	$(BIN)/python tests/torch_suite/run.py --world $(WORLD)

# Each version in an environment of its own, .venv-VERSION, which stays; TORCH is that of VENV.
torch-matrix: build
	$(PYTHON) tests/torch_matrix.py --torch '$(TORCH)' --venv $(VENV) $(TORCHES)

# The extension on the newest torch, and the tests on CPU tensors of what is new in it.
NEWEST_TESTS = $(patsubst %,tests/*/test_%.py,backend_methods reconfigure work training)
torch-smoke: build
ifeq ($(BASE_VENV),)
	$(MAKE) $@ VENV=.venv-$(NEWEST) TORCH=torch==$(NEWEST) BASE_VENV=$(VENV)
else
	$(BIN)/python -m pytest $(NEWEST_TESTS) -q -n 2 --dist worksteal \
	  -k "not killed and not survivors and not random"
endif

# Each framework as its users run it, on gloo and on ringreduce, in an environment of its own.
FRAMEWORKS = lightning pytorch-ignite accelerate transformers 'ray[train]' deepspeed torchft
FRAMEWORKS_VENV = .venv-frameworks
frameworks: build
	test -x $(FRAMEWORKS_VENV)/bin/python || $(BIN)/python -m venv $(FRAMEWORKS_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$(echo $(FRAMEWORKS_VENV)/lib/python3*/site-packages)/base.pth
	$(FRAMEWORKS_VENV)/bin/python -m pip install -q $(FRAMEWORKS)
	$(FRAMEWORKS_VENV)/bin/python -m pytest -q tests/compat/test_lightning.py tests/compat/test_accelerate.py
	$(FRAMEWORKS_VENV)/bin/python benchmarks/frameworks.py $(FRAMEWORKS_ARGS)

# Each warning is an error, such as a link to nothing.  tests/package/test_docs.py builds it by the same command.
# A page is not looked at again before it changes, so what has warned does not stay.
docs: build $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W -c docs . build/docs || { rm -rf build/docs; exit 1; }
	@echo "The first page is build/docs/index.html"

$(VENV)/.docs: requirements-docs.txt $(VENV)/.ready
	$(BIN)/python -m pip install -q -r requirements-docs.txt
	@touch $@

# Real launchers.  What is not installed is skipped, and the end of the output says what to install.
launchers: build
	$(BIN)/python -m pip install -q nbclient ipykernel
	$(BIN)/python -m pytest tests/groups/test_launchers.py tests/groups/test_notebook.py -v -rs

# Between ranks of one host; between hosts that are none but by name, some of their ranks share memory.
torch-suite-tcp: build
	RINGREDUCE_WIRE=tcp $(BIN)/python tests/torch_suite/run.py --world 2
	RINGREDUCE_WIRE=tcp $(BIN)/python tests/torch_suite/run.py --world 3
	$(BIN)/python tests/torch_suite/run.py --world 4 --hosts 2

# Four at a time: most tests wait more than they compute.  Instrumented, they compute: two at a time.
CTEST = $(BIN)/ctest --output-on-failure
test-cpp: build
	$(BIN)/cmake --build $(BUILD) --target cpp_tests -j $(JOBS)
	cd $(BUILD) && $(CTEST) -j 4 -LE cuda

sanitize: asan tsan mutants

asan: $(VENV)/.ready
	$(CMAKE) -B build/asan -DRINGREDUCE_SANITIZE="address;undefined" -DRINGREDUCE_BUILD_BENCHMARKS=OFF \
	  -DRINGREDUCE_SANITIZE_ALL=$(SANITIZE_ALL)
	$(BIN)/cmake --build build/asan -j $(JOBS)
	cd build/asan && $(CTEST) -j 4

tsan: build/tsan/.built
	cd build/tsan && $(CTEST) -j 2

# Tests of protocols must fail with one memory order weakened, or one step left out.
mutants: build/tsan/.built
	$(BIN)/cmake --build build/tsan --target device_protocol_mutants
	tests/cpp/run_mutants.sh build/tsan

.PHONY: build/tsan/.built
build/tsan/.built: $(VENV)/.ready
	$(CMAKE) -B build/tsan -DRINGREDUCE_SANITIZE=thread -DRINGREDUCE_BUILD_BENCHMARKS=OFF \
	  -DRINGREDUCE_SANITIZE_ALL=$(SANITIZE_ALL)
	$(BIN)/cmake --build build/tsan -j $(JOBS)

# The core, without torch, for AArch64.  The emulator shows instructions and bits, but not the order of
# memory accesses: it has that of the machine that it runs on.
ARM = aarch64-linux-gnu
QEMU = qemu-aarch64-static
arm: $(VENV)/.ready
	@for tool in $(ARM)-g++ $(QEMU); do command -v $$tool > /dev/null || \
	  { echo "make arm needs $$tool (Debian and Ubuntu: apt-get install g++-$(ARM) qemu-user-static)."; exit 1; }; done
	$(CMAKE) -B build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=$(ARM)-g++ -DCMAKE_CROSSCOMPILING_EMULATOR="$(QEMU);-L;/usr/$(ARM)" \
	  -DRINGREDUCE_BUILD_BENCHMARKS=OFF -DRINGREDUCE_OPENSSL=0 -DRINGREDUCE_WERROR=ON
	$(BIN)/cmake --build build/arm --target cpp_tests -j $(JOBS)
	cd build/arm && $(CTEST) -j 2

# Each run has a seed: make survive RUNS=1 SEED=17
survive: build
	$(BIN)/python tests/survive_faults.py --runs $(RUNS) --seed $(SEED)

# New inputs go to build/fuzz/found; the kept ones (tests/fuzz/corpus) also run in every make test.
fuzz: $(VENV)/.ready
	@command -v $(CLANG) > /dev/null || \
	  { echo "make fuzz needs clang with libFuzzer: make CLANG=/path/to/clang++ fuzz"; exit 1; }
	$(CMAKE) -B build/fuzz -DCMAKE_CXX_COMPILER=$(CLANG) -DRINGREDUCE_BUILD_BENCHMARKS=OFF
	$(BIN)/cmake --build build/fuzz -j $(JOBS) --target handshake_libfuzzer \
	  control_libfuzzer stream_libfuzzer message_libfuzzer codec_libfuzzer
	for target in handshake control stream message codec; do \
	  mkdir -p build/fuzz/found/$$target && \
	  build/fuzz/$${target}_libfuzzer -max_len=1024 -max_total_time=$(FUZZ_SECONDS) \
	    build/fuzz/found/$$target tests/fuzz/corpus/$$target || exit 1; \
	done

# Warnings are errors here; so are a kernel that spills registers and kernels that have grown too large.
# ctest runs what needs no GPU.
cuda-build: $(if $(CUDA_NVCC),,$(CUDA_VENV)/.ready)
	$(CUDA_CMAKE) -B $(CUDA_BUILD)
	$(CUDA_BIN)cmake --build $(CUDA_BUILD) --target cuda_all -j $(JOBS)
	cd $(CUDA_BUILD) && $(CUDA_BIN)ctest -L cuda --output-on-failure
	$(PYTHON) tests/cuda/kernel_report.py $(CUDA_BUILD)/ptxas.log
	$(PYTHON) tests/cuda/kernel_lint.py --tools $(dir $(NVCC)) $(CUDA_BUILD)
	$(PYTHON) tests/cuda/library_size.py $(CUDA_BUILD)
	for file in kernels kernels_floating kernels_integer kernels_nvls; do \
	  PATH="$(dir $(NVCC)):$$PATH" cuobjdump -ptx $(KERNELS)/$$file.cu.o > $(CUDA_BUILD)/$$file.ptx || exit 1; \
	done
	$(CUDA_BUILD)/ptx_run $(CUDA_BUILD)/kernels*.ptx --cases $(PTX_CASES) --mutants

# PyTorch with CUDA on a machine without a GPU (tests/cuda/torch_on_fake).
torch-on-fake: $(CUDA_VENV)/.ready
	$(CUDA_CMAKE) -B $(CUDA_BUILD)
	$(CUDA_BIN)cmake --build $(CUDA_BUILD) --target torch_on_fake -j $(JOBS)
	cd $(ON_FAKE) && $(RUN_ON_FAKE) $(CUDA_BIN)pytest $(CURDIR)/tests/cuda/torch_on_fake -q \
	  $(if $(RINGREDUCE_TEST_FULL),,-m "not nightly") -n 3 --dist loadfile

# pip's nvcc lies deep inside, and looks for lib64, which it does not bring.
$(CUDA_VENV)/.ready: requirements-cuda.txt
	$(need_python)
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install -q --no-compile --no-deps -r requirements-cuda.txt
	cd $(CUDA_VENV) && ln -sfn lib/python3*/site-packages/nvidia/cu13 cuda && ln -sfn lib cuda/lib64
	@touch $@

# None of these touches .venv or pip: a machine with a GPU may have no network.
gpu-check:
	$(PYTHON) tests/cuda/gpu_check.py

gpu-build:
	$(PYTHON) tests/cuda/gpu_check.py --build

gpu-study:
	$(PYTHON) tests/cuda/gpu_check.py --study

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/figures.py check
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

# Other builds compile the files of a folder as one, which hides a missing include.  Those of csrc/cuda
# here need no CUDA; make nightly has the others.
CUDA_FREE = $(shell sed -n 's/^ *set(cuda_free \(.*\))/\1/p' CMakeLists.txt)
includes:
	{ find csrc -name '*.cc' ! -name '*_kernels.cc' ! -path 'csrc/torch/*' ! -path 'csrc/cuda/*'; \
	  printf 'csrc/cuda/%s.cc\n' $(CUDA_FREE); } | \
	  xargs -n 1 -P $(JOBS) $(if $(filter default,$(origin CXX)),c++,$(CXX)) -std=c++20 -fsyntax-only -Wall -Wextra -Werror -Icsrc \
	  -DRINGREDUCE_VERSION='""'

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf build dist *.egg-info $(VENV)/.built .venv*/.built
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ringreduce tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
