"""ringreduce in PyTorch on CUDA tensors, in processes on all GPUs there are; if those are too few,
they share them.

    python -m pytest tests/cuda/gpu_torch_test.py        # as gpu-check does; skipped without a GPU

The jobs that the ranks do are in gpu_torch_jobs.py.  With GPU_TEST_DEVICE=cpu those that need no
CUDA run on the CPU.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import gpu_coded_jobs as coded_jobs
import gpu_torch_jobs as jobs
import pytest
import torch
from conftest import MakeWorld
from pool import Pool, World

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blame import blamed

ON_GPU = jobs.DEVICE != "cpu"
if ON_GPU and not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

# A rank for each GPU, so that every link and the ring of all are used.
EVERY = min(max(2, torch.cuda.device_count()), 16) if ON_GPU else 2
SIZES = sorted({2, 4, EVERY})
cuda_only = pytest.mark.skipif(not ON_GPU, reason="what it shows is CUDA's")
LONG = 120.0  # seconds: far longer than any test here
# Of float32: two ways to add up the same shards, over some steps.
ROUNDINGS = 1e-4


def beside(stock: str) -> World:
    """Two ranks on a stock backend; skips where torch's NCCL cannot be one."""
    from ringreduce.tools.bench.placing import Placing, nccl_environment
    from ringreduce.tools.bench.settings import Unsupported

    if stock != "nccl":
        return World(2, stock)
    try:
        nccl_environment(Placing(jobs.DEVICE, 2, max(1, torch.cuda.device_count())))
    except Unsupported as reason:
        pytest.skip(str(reason))
    return World(2, stock, (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "uint8"])
def test_every_call_gives_what_it_gives_on_the_cpu(
    pool: Pool, world: MakeWorld, size: int, dtype: str
) -> None:
    for unit in (1, 71):
        found = pool.run(jobs.unlike_the_cpu, world(size), dtype, unit, deadline=LONG)
        assert found == [[]] * size, f"units of {unit} elements"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_have_the_bits_of_the_cpus(
    pool: Pool, world: MakeWorld, size: int, dtype: str
) -> None:
    # The last are 256 MiB, which go by the ring where GPUs reach each other.
    large = (64 << 20,) if ON_GPU and dtype == "float32" and size == EVERY else ()
    for count in (999, 300_001, 5_000_000, *large):
        found = pool.run(jobs.odd_bits, world(size), dtype, count, deadline=LONG)
        assert found == [[]] * size, f"{count} elements"


@pytest.mark.parametrize("way", ["backend", "hook", "python hook"])
@pytest.mark.parametrize("model", ["mlp", "resnet50", "gpt2"])
def test_ddp_is_one_process_with_all_shards(
    pool: Pool, world: MakeWorld, way: str, model: str
) -> None:
    for found in pool.run(jobs.train, world(2), way, model, deadline=LONG):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


@pytest.mark.parametrize("stock", ["gloo", "nccl"])
def test_the_hook_beside_a_stock_backend(pool: Pool, stock: str) -> None:
    for found in pool.run(jobs.train, beside(stock), "hook", "mlp", deadline=LONG):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_more_ranks_accumulate_gradients(pool: Pool, world: MakeWorld, way: str) -> None:
    for found in pool.run(jobs.train, world(max(4, EVERY)), way, "mlp", 3, deadline=LONG):
        assert found["apart"] < ROUNDINGS and found["kinds"] == 1


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_bfloat16_parameters(pool: Pool, world: MakeWorld, way: str) -> None:
    for found in pool.run(jobs.train, world(2), way, "mlp", 1, "bfloat16", deadline=LONG):
        assert found["apart"] < 2e-2 and found["kinds"] == 1


@cuda_only
@pytest.mark.parametrize("way", ["backend", "hook"])
def test_mixed_precision_with_a_scaler(pool: Pool, world: MakeWorld, way: str) -> None:
    for found in pool.run(jobs.train, world(2), way, "mlp", 2, "float32", True, deadline=LONG):
        assert found["finite"] and found["apart"] < 1e-2 and found["kinds"] == 1


@pytest.mark.parametrize(
    "way,settings",
    [
        ("hook", {"codec": "int8"}),
        ("hook", {"codec": "int4", "schedule": "ring"}),
        ("python hook", {"codec": "int8", "start_after": 2, "error_feedback": False}),
        ("python hook", {"codec": "int4", "stochastic": True, "seed": 7}),
    ],
)
def test_compressed_gradients_have_the_bits_of_the_cpus(
    pool: Pool, world: MakeWorld, way: str, settings: dict[str, Any]
) -> None:
    for dtype in ("float32", "bfloat16"):
        found = pool.run(coded_jobs.unlike_the_cpus, world(2), way, settings, dtype, deadline=LONG)
        assert found == [[]] * 2, dtype


@pytest.mark.parametrize("stock", ["gloo", "nccl"])
def test_compressed_gradients_beside_a_stock_backend(pool: Pool, stock: str) -> None:
    arguments = "hook", {"codec": "int8"}
    found = pool.run(coded_jobs.unlike_the_cpus, beside(stock), *arguments, deadline=LONG)
    assert found == [[]] * 2


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_training_with_compressed_gradients(pool: Pool, world: MakeWorld, model: str) -> None:
    for found in pool.run(jobs.train, world(2), "int8", model, deadline=LONG):
        assert found["finite"] and found["apart"] < 2e-2 and found["kinds"] == 1
    if model == "mlp" and ON_GPU:
        again = pool.run(jobs.train, world(2), "int8", model, 2, "float32", True, deadline=LONG)
        assert all(found["finite"] and found["kinds"] == 1 for found in again)


def test_auto_decides_alike(pool: Pool, world: MakeWorld) -> None:
    found = pool.run(coded_jobs.chosen, world(2), deadline=LONG)
    assert found[0]["choices"] == found[1]["choices"]
    assert found[0]["choices"][-1] in ("exact", "int8") and "ms" in found[0]["why"]
    assert all(each["off"] < 0.2 for each in found)


def test_fsdp2(pool: Pool, world: MakeWorld) -> None:
    assert max(pool.run(jobs.train_sharded, world(EVERY), deadline=LONG)) < 1e-3


@cuda_only
def test_a_graph_replays_an_all_reduce(pool: Pool, world: MakeWorld) -> None:
    assert pool.run(jobs.replay, world(EVERY), 1000, deadline=LONG) == [[]] * EVERY


@pytest.mark.parametrize("size", SIZES)
def test_two_groups_in_two_streams(pool: Pool, world: MakeWorld, size: int) -> None:
    assert pool.run(jobs.two_streams, world(size), 20, deadline=LONG) == [[]] * size


@cuda_only
def test_wait_orders_streams_and_leaves_the_host_free(pool: Pool, world: MakeWorld) -> None:
    wanted = {"busy": True, "completed before": False, "completed after": True, "right": True}
    assert pool.run(jobs.wait_in_a_stream, world(2), deadline=LONG) == [wanted] * 2


@cuda_only
def test_expandable_segments(pool: Pool, world: MakeWorld) -> None:
    call = pool.start(jobs.expandable, world(2), fresh=True)
    assert call.results(LONG) == [{"used": True, "right": True, "trained": True}] * 2
    mapped = pool.start(jobs.in_expandable_segments, world(EVERY, CUDA_MAP="vmm"),
                        list(range(EVERY)), fresh=True)  # fmt: skip
    assert mapped.results(LONG) == [[True, True]] * EVERY


@pytest.mark.parametrize("spec", ["cpu:gloo,cuda:ringreduce", "cpu:ringreduce,cuda:ringreduce"])
def test_named_for_each_device(pool: Pool, spec: str) -> None:
    assert pool.run(jobs.on_both_devices, World(2, spec), deadline=LONG) == [[3.0] * 4] * 2


@cuda_only
def test_told_its_device(pool: Pool) -> None:
    none = World(0, "ringreduce")
    call = pool.start(jobs.with_device_id, none, pool.name(), 2, ranks=2, fresh=True)
    assert call.results(LONG) == [6.0] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1000, 4_000_000])
def test_a_killed_rank_is_named_and_the_others_go_on(
    pool: Pool, world: MakeWorld, size: int, count: int
) -> None:
    victim, left = size - 1, list(range(size - 1))
    call = pool.start(jobs.outlive, world(size), count, pool.name(), fresh=True)
    try:
        for rank in range(size):
            assert call.heard(rank, LONG) == "flowing"
        time.sleep(0.05)
        killed = call.signal(victim, signal.SIGKILL)
        for rank in left:
            said = call.heard(rank, LONG)
            assert said["kind"] == "PeerLost", said
            assert blamed(said["message"]) == {victim}, said["message"]
            assert said["when"] - killed < 2.0
        for rank in left:
            call.tell(rank, left)
        call.await_end(left, LONG)
        sums = [getattr(call.ended.get(rank), "value", {}).get("sum") for rank in left]
        assert sums == [sum(rank + 1 for rank in left)] * len(left), call.ended
    finally:
        call.outcomes(1.0)  # which ends all of them
