"""The stages of gpu_check.py that need torch: the extension, its tests, and what users measure.

The extension is made in the folder of the build, of the same objects, and put into a folder of its
own (build/gpu/site); nothing is downloaded, and neither the system's Python nor .venv is touched.
The programs run outside of the source tree, so that they find that ringreduce.
"""

from __future__ import annotations

import sys
from typing import Any

import gpu_torch_figures as figures
from gpu_figures import counted
from gpu_machine import ROOT
from gpu_plan import BUILD_LIMIT, HERE, Plan
from gpu_runner import Stage, Step

PYTHON = sys.executable
LOOK = """
import torch, ringreduce
from ringreduce.core.backend import extension
built = extension().cuda_build()
print("ringreduce", ringreduce.__version__, "of", ringreduce.__file__, "for CUDA:", built)
raise SystemExit(0 if built else "Error: it was built without CUDA")
"""


def extension(plan: Plan) -> Stage:
    cmake, folder = plan.tools.cmake or "cmake", str(plan.build)
    return Stage(
        "extension",
        "torch's extension compiles for the GPUs that are here, and loads",
        BUILD_LIMIT,
        (
            Step((cmake, "--build", folder, "--target", "_C", "-j", str(plan.jobs))),
            Step((PYTHON, str(HERE / "gpu_site.py"), folder, str(plan.site))),
            Step((PYTHON, "-c", LOOK), with_site(plan), inside=True),
        ),
        skip=plan.no_torch,
        needs_gpu=False,
        counted=False,
    )


def with_site(plan: Plan, nccl: bool = False) -> dict[str, str]:
    """The environment in which ringreduce is found; `nccl`: and the NCCL to compare with."""
    env = {"PYTHONPATH": str(plan.site)}
    if nccl and plan.nccl:
        env["LD_PRELOAD"] = plan.nccl
    return env


def run(plan: Plan, *command: str, nccl: bool = False) -> Step:
    """A Python program on the installed ringreduce."""
    return Step((PYTHON, *command), with_site(plan, nccl), inside=True)


def bench(plan: Plan, what: str, ranks: int, sizes: str, *more: str) -> Step:
    """ringreduce.bench beside all that may be compared with, into a file of its own."""
    return run(
        plan,
        *("-m", "ringreduce.bench", what, "--device", "cuda", "--nproc", str(ranks)),
        *("--sizes", sizes, "--timeout", "60", "--json", f"{{folder}}/bench-{what}-{ranks}.json"),
        *more,
        nccl=True,
    )


def ddp(plan: Plan, ranks: int, *more: str) -> Step:
    return run(
        plan,
        *(str(ROOT / "benchmarks" / "ddp.py"), "--device", "cuda", "--nproc", str(ranks)),
        *("--timeout", "120", "--out", f"{{folder}}/ddp-{ranks}"),
        *more,
        nccl=True,
    )


def measured(plan: Plan, name: str, shows: str, limit: float, *steps: Step, **more: Any) -> Stage:
    """A stage on the installed ringreduce; `collect` and `figure` are what it measures."""
    about = {"skip": plan.no_torch, "needs": "extension", "measures": True}
    return Stage(name, shows, limit, steps, **about, **more)


BENCH = {"collect": figures.bench_lines, "figure": figures.bench_figure}
DDP = {"collect": figures.ddp_lines, "figure": figures.ddp_figure}


def tests(plan: Plan) -> Stage:
    pytest = (
        *("-m", "pytest", str(HERE / "gpu_torch_test.py"), "-q", "-p", "no:cacheprovider"),
        *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
        *("-o", "junit_family=xunit2", "--junitxml", "{folder}/junit.xml"),
    )
    return measured(
        *(plan, "torch", "calls, DDP, FSDP2, graphs, streams, a killed rank, by PyTorch", 300),
        run(plan, *pytest),
        collect=figures.junit,
        figure=figures.tests_figure,
    )


def speed(plan: Plan) -> list[Stage]:
    peers = ("--compare", "nccl,gloo,symm_mem", "--rounds", "3")
    return [
        measured(
            *(
                plan,
                "ddp",
                "ResNet-50 and GPT-2 by DataParallel, DDP on NCCL or Gloo, DDP on ringreduce, hook",
                120,
            ),
            ddp(plan, plan.every, "--dtype", "bfloat16", "--rounds", "2", "--steps", "5"),
            ddp(plan, 1, "--models", "gpt2", "--rounds", "3", "--steps", "8"),
            **DDP,
        ),
        measured(
            *(plan, "torch-bench", "dist.all_reduce beside NCCL, Gloo and symmetric memory", 120),
            bench(plan, "all_reduce", plan.every, "1K,64K,1M,64M,256M", *peers),
            bench(plan, "all_reduce", 1, "1K", "--rounds", "3"),
            **BENCH,
        ),
    ]


def study(plan: Plan) -> list[Stage]:
    """The long tables."""
    sizes = "1K,64K,1M,25M,256M"
    wide = ("--dtype", "bfloat16", "--compare", "nccl,symm_mem")
    return [
        measured(
            *(plan, "study-torch-bench", "every collective and size; 8 ranks' bfloat16", 300),
            bench(plan, "all", 2, sizes, "--compare", "nccl,gloo"),
            bench(plan, "all", 4, "1K,1M,64M", "--compare", "nccl", "--rounds", "3"),
            bench(plan, "all_reduce", 8, sizes, *wide),
            collect=figures.bench_lines,
            figure=counted,
        ),
        measured(
            *(plan, "study-ddp", "the two models in float32, 2 and 4 ranks", 240),
            ddp(plan, 2),
            ddp(plan, 4, "--dtype", "bfloat16"),
            **DDP,
        ),
        measured(
            *(plan, "study-torch-suite", "PyTorch's own distributed tests that want GPUs", 400),
            run(
                *(plan, str(ROOT / "tests" / "torch_suite" / "run.py"), "--device", "cuda"),
                *("--world", "2", "--limit", "60", "--logs", "{folder}"),
            ),
            collect=figures.suite,
            figure=figures.suite_figure,
        ),
    ]
