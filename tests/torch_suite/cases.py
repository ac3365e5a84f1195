"""The tests of torch.testing._internal.distributed.distributed_test, as classes that run here.

Which backend they get is settled while torch's module is imported, so a process serves one pass;
TORCH_SUITE_PASS names it, WORLD_SIZE the number of ranks, TORCH_SUITE_HOSTS that of the hosts on
which these pose to be:

    gloo         Gloo, as torch runs it
    ringreduce   ours, under its own name
    as-gloo      ours, made wherever torch makes a Gloo group: for the tests gated on that name

ringreduce-on-gpus and as-gloo-on-gpus are the last two for the tests that want GPUs (on_gpus.py).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing.context
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

PASSES = ("gloo", "ringreduce", "as-gloo")
PASS = os.environ["TORCH_SUITE_PASS"].removesuffix("-on-gpus")
HOSTS = int(os.environ.get("TORCH_SUITE_HOSTS", "1"))
ON_GPUS = os.environ["TORCH_SUITE_PASS"].endswith("-on-gpus")
os.environ["BACKEND"] = "ringreduce" if PASS == "ringreduce" else "gloo"
if ON_GPUS:
    import on_gpus  # before torch

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

if ON_GPUS:
    on_gpus.take_over(common_distributed)
if PASS == "ringreduce":
    import ringreduce  # noqa: F401

    for _backends in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in _backends:
            _backends.add("ringreduce")
    common_distributed.DistTestCases.backend_feature["plugin"].add("ringreduce")

from torch.testing._internal.distributed import distributed_test  # noqa: E402

if ON_GPUS:
    on_gpus.show_enough(distributed_test)
if PASS == "ringreduce":
    # So that what a profiler sees of us is checked as it is of Gloo.
    distributed_test.PROFILING_SUPPORTED_BACKENDS.append("ringreduce")
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("ringreduce")
elif PASS == "as-gloo":
    import gloo_name

    gloo_name.take_over(distributed_test)

_Tests = distributed_test.DistributedTest._DistTestBase


def limit_tests(seconds: int) -> None:
    """Gives every test so long; torch's own limits are minutes, and longer for some."""
    common_distributed.TIMEOUT_DEFAULT = seconds
    common_distributed.TIMEOUT_OVERRIDE.clear()


def threads() -> int:
    """The threads that this process has."""
    return len(os.listdir("/proc/self/task"))


class ForkedRank(multiprocessing.context.ForkProcess):
    """A rank that starts with torch imported, and ends as a program ends.

    multiprocessing ends what it forked with os._exit.  A rank that torch spawns goes through all of
    the interpreter's shutdown instead, where a backend can hang or crash; so does this one, unless
    its test was skipped.
    """

    _skips = frozenset(skip.exit_code for skip in common_distributed.TEST_SKIPS.values())

    def run(self) -> None:
        # The directory that the ranks share is the parent's to remove, not the first rank's to end.
        common_distributed.tmp_dir._finalizer.detach()
        code = 0
        try:
            super().run()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        if code in self._skips:
            os._exit(code)
        ctypes.pythonapi.Py_Exit(code)


class Ranks(distributed_test.TestDistBackend):
    """Starts a test's ranks, and looks at how each of them ended."""

    start_method = "fork"

    @classmethod
    def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
        if HOSTS > 1:
            host = rank * HOSTS // int(os.environ["WORLD_SIZE"])
            os.environ["RINGREDUCE_HOSTID"] = f"host {host} of torch's tests"
        super()._run(rank, *args, **kwargs)

    def setUp(self) -> None:
        super().setUp()
        if self.start_method == "spawn":
            self._spawn_processes()
            return
        gc.freeze()  # nothing imported needs to be looked through again as each rank ends
        if threads() != 1:
            raise RuntimeError(f"{threads()} threads run here: a rank forked now could deadlock")
        self._start_processes(ForkedRank)

    def tearDown(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        super().tearDown()

    def _check_return_codes(self, fn: Callable[..., Any], elapsed_time: float) -> None:
        """As torch's, which looks only at rank 0 where nobody failed; and says what hung."""
        codes = [process.exitcode for process in self.processes]
        failed = self.TEST_ERROR_EXIT_CODE in codes
        hung = [str(rank) for rank, code in enumerate(codes) if code is None]
        if hung and not failed:
            raise RuntimeError(
                f"hang: of {len(codes)} ranks, rank {', '.join(hung)} did not end within "
                f"{elapsed_time:.0f} s; the log has the stacks"
            )
        if len(set(codes)) > 1 and not failed and fn not in self.skip_return_code_checks:
            raise RuntimeError(f"the ranks ended with different exit statuses: {codes}")
        super()._check_return_codes(fn, elapsed_time)


class Suite(Ranks, _Tests):
    """All of torch's tests."""


class Beyond(Ranks, _Tests):
    """CPU tests of what torch tests on other backends or devices only, with torch's own helpers."""

    def _all_gather_into(self, *shape_of_all: int) -> None:
        group, group_id, rank = self._init_global_test()
        out = self._all_gather_into_tensor_helper(
            torch.full(shape_of_all, -1.0), torch.full((2, 2), float(rank)), group_id, rank, False
        )
        parts = [torch.full((2, 2), float(r)) for r in group]
        self.assertEqual(out, torch.cat(parts).reshape(shape_of_all))

    def test_all_gather_into_cat_tensor(self) -> None:
        self._all_gather_into(2 * dist.get_world_size(), 2)

    def test_all_gather_into_stack_tensor(self) -> None:
        self._all_gather_into(dist.get_world_size(), 2, 2)

    def _reduce_scatter_of(self, *shape_of_all: int) -> None:
        group, group_id, rank = self._init_global_test()
        out = self._reduce_scatter_tensor_helper(
            torch.zeros(2, dtype=torch.int64),
            torch.arange(2 * len(group)).reshape(shape_of_all),
            group_id,
            rank,
            False,
        )
        self.assertEqual(out, torch.arange(rank * 2, rank * 2 + 2) * len(group))

    def test_reduce_scatter_cat_tensor(self) -> None:
        self._reduce_scatter_of(2 * dist.get_world_size())

    def test_reduce_scatter_stack_tensor(self) -> None:
        self._reduce_scatter_of(dist.get_world_size(), 2)

    def test_reduce_scatter(self) -> None:
        group, group_id, rank = self._init_global_test()
        for op, of_all in ((dist.ReduceOp.SUM, sum(group)), (dist.ReduceOp.MAX, group[-1])):
            inputs = [torch.full((3,), float(rank + 10 * to)) for to in group]
            output = torch.empty(3)
            self.call_dist_op(
                ":reduce_scatter",
                False,
                dist.reduce_scatter,
                output,
                inputs,
                op,
                group_id,
                expect_event=False,
            )
            times = len(group) if op == dist.ReduceOp.SUM else 1
            self.assertEqual(output, torch.full((3,), float(of_all + 10 * rank * times)))

    def test_ddp_logging_data_cpu(self) -> None:
        # Nothing else keeps this test from passing than the name that exceptions.py explains.
        name = "gloo" if PASS == "gloo" else "custom"
        with mock.patch.object(dist, "get_backend", return_value=name):
            super().test_ddp_logging_data_cpu()

    def test_broadcast_object_list(self) -> None:
        self._test_broadcast_object_list()

    def test_gather_object(self) -> None:
        self._test_gather_object()


def _ungated(test: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(self: Any) -> None:
        test(self)

    run.__name__ = test.__name__
    return run


for _name in dir(_Tests):
    _test = getattr(_Tests, _name)
    if getattr(_test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
        setattr(Beyond, _name, _ungated(_test))


def all_tests() -> dict[str, tuple[type[Ranks], str]]:
    """Every test by its name here: torch's own for torch's, `beyond.` before those of Beyond."""
    tests: dict[str, tuple[type[Ranks], str]] = {}
    for name in dir(Suite):
        wanted = not ON_GPUS or hasattr(getattr(Suite, name), "needs_gpus")
        if name.startswith("test_") and wanted:
            tests[name] = (Suite, name)
    for name in vars(Beyond) if not ON_GPUS else ():
        if name.startswith("test_"):
            tests[f"beyond.{name}"] = (Beyond, name)
    return tests
