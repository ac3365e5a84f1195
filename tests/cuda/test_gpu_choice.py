"""Who takes the calls on CUDA tensors that ringreduce's kernels do not perform."""

import ctypes
import datetime
import json
import logging
from typing import Any

import pytest
import torch.distributed as dist

from ringreduce.core import gpu

ALL_SEEN: dict[str, Any] = {
    "host": "a",
    "gpus": [f"GPU-{number}" for number in range(8)],
    "nccl": True,
    "shares": False,
    "other": "auto",
}


ONE: dict[str, Any] = {"gpus": ["GPU-1"]}
OTHER: dict[str, Any] = {"gpus": ["GPU-2"]}


def told(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**ALL_SEEN, **change} for change in changes]


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (told(*[{}] * 8), ""),
        (told(*[{}] * 9), "9 ranks of one host share 8 GPUs"),
        (told(*[{"shares": True}] * 9), ""),
        (told(*[{"shares": True}] * 8, {}), "9 ranks of one host share 8 GPUs"),
        # Each rank was given a GPU of its own, or two of them the same.
        (told(ONE, OTHER), ""),
        (told(ONE, ONE), "2 ranks of one host share 1 GPUs"),
        (told(ONE, OTHER, ONE, {}), "2 ranks of one host share 1 GPUs"),
        # Two hosts with a GPU each; and one of them with two ranks on it.
        (told(ONE, {**OTHER, "host": "b"}), ""),
        (told(ONE, *[{**OTHER, "host": "b"}] * 2), "2 ranks of one host share 1 GPUs"),
        (told({}, {"nccl": False}), "rank 1 has a torch without NCCL"),
        (told({"gpus": []}, {}), "rank 0 has no GPU"),
        # Rank 0's word holds.
        (told({"other": "host"}, {}), "RINGREDUCE_CUDA_OTHER=host"),
        (told({"other": "nccl", **ONE}, ONE), ""),
        (told({}, {"other": "host"}), ""),
    ],
)
def test_nccl_where_it_can_start(ranks: list[dict[str, Any]], why: str) -> None:
    answer = gpu.why_not_nccl(ranks)
    assert (why in answer) if why else answer == ""


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="RINGREDUCE_CUDA_OTHER=gloo is none of auto, nccl"):
        gpu.why_not_nccl(told({"other": "gloo"}, {}))


def test_the_answer_comes_from_what_all_have_left_in_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()
    for rank, facts in enumerate(told(ONE, ONE)):
        store.set(f"ringreduce/gpus/{rank}", json.dumps(facts))
    with caplog.at_level(logging.WARNING, "ringreduce"):
        assert gpu.make_inner(datetime.timedelta(seconds=1), store, 0, 2) is None
    assert "go through host memory, which is slow: 2 ranks of one host share 1" in caplog.text


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [
        (told(*[{}] * 8), [1] * 8),
        (told(*[{}] * 9), [2] * 9),
        (told(ONE, ONE, OTHER), [2, 2, 1]),
        # Ranks without a GPU do not count, nor those of other hosts.
        (told(*[{}] * 8, {"gpus": []}), [1] * 9),
        (told(ONE, ONE, {**ONE, "host": "b"}), [2, 2, 1]),
        # Parts of a GPU run kernels of their own.
        (told({"gpus": ["GPU-1#MIG-1"]}, {"gpus": ["GPU-1#MIG-2"]}), [1, 1]),
    ],
)
def test_ranks_that_share_a_gpu_are_counted(ranks: list[dict[str, Any]], counts: list[int]) -> None:
    store, size = dist.HashStore(), len(ranks)
    for rank, facts in enumerate(ranks):
        assert gpu.ranks_on_gpu(store, rank, size) == 1  # not all have told
        store.set(f"ringreduce/gpus/{rank}", json.dumps(facts))
    assert [gpu.ranks_on_gpu(store, rank, size) for rank in range(size)] == counts


class FakeNvml:
    """The calls of NVML that are made, on a machine with these GPUs, some in parts or forbidden."""

    def __init__(
        self, *gpus: str, parts: dict[str, str] | None = None, allowed: str = "GPU-"
    ) -> None:
        self.gpus, self.parts, self.allowed = gpus, parts or {}, allowed
        self.found = [*gpus, *self.parts]  # a handle is an index + 1

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, gpu: Any) -> int:
        if not self.gpus[index.value].startswith(self.allowed):
            return 4  # no permission
        gpu._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, gpu: Any, text: Any, size: int) -> int:
        text.value = self.found[gpu.value - 1].encode()
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, gpu: Any) -> int:
        if uuid.decode() not in self.found:
            return 6  # not found
        gpu._obj.value = self.found.index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Any, gpu: Any) -> int:
        gpu._obj.value = self.found.index(self.parts[self.found[part.value - 1]]) + 1
        return 0


SPLIT = FakeNvml(
    "GPU-a1", "GPU-b2", parts={"MIG-1": "GPU-a1", "MIG-2": "GPU-a1", "MIG-3": "GPU-b2"}
)


class FakeCuda:
    """The calls of libcuda that are made, where CUDA shows GPUs with these numbers in their UUIDs.

    A pair: part of a GPU, and the GPU.
    """

    def __init__(self, *shown: int | tuple[int, int]) -> None:
        self.shown = [(one, one) if isinstance(one, int) else one for one in shown]

    def cuInit(self, flags: Any) -> int:
        return 0 if self.shown else 100  # there is none

    def cuDeviceGet(self, gpu: Any, index: Any) -> int:
        gpu._obj.value = index.value
        return 0

    def cuDeviceGetUuid(self, found: Any, gpu: Any) -> int:
        found.raw = bytes([*range(15), self.shown[gpu.value][1]])
        return 0

    def cuDeviceGetUuid_v2(self, found: Any, gpu: Any) -> int:
        found.raw = bytes([*range(15), self.shown[gpu.value][0]])
        return 0


GPU_7 = "GPU-00010203-0405-0607-0809-0a0b0c0d0e07"  # as NVML calls it


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        # Slurm and cgroups: each sees its own GPU alone, as number 0.
        ([(FakeNvml("GPU-a1"), "0"), (FakeNvml("GPU-b2"), "0")], ""),
        ([(FakeNvml("GPU-a1"), None), (FakeNvml("GPU-b2"), None)], ""),
        (
            [(FakeNvml("GPU-a1"), "0"), (FakeNvml("GPU-a1"), "0")],
            "2 ranks of one host share 1 GPUs",
        ),
        (
            [(FakeNvml("GPU-a1", "GPU-b2", allowed=own), "0") for own in ("GPU-a1", "GPU-b2")],
            "",
        ),
        ([(SPLIT, "0"), (SPLIT, "1")], ""),
        ([(SPLIT, "GPU-a1"), (SPLIT, "GPU-b2")], ""),
        ([(SPLIT, "GPU-b"), (SPLIT, "1")], "2 ranks of one host share 1 GPUs"),
        # NCCL takes the parts of a GPU for one.
        ([(SPLIT, "MIG-1"), (SPLIT, "MIG-3")], ""),
        ([(SPLIT, "MIG-1"), (SPLIT, "MIG-2")], "2 ranks of one host share 1 GPUs"),
        # Containers without NVML: CUDA names those that it shows.
        ([(FakeCuda(7), "0"), (FakeCuda(8), "0")], ""),
        ([(FakeCuda(7), None), (FakeCuda(8), None)], ""),
        ([(FakeCuda(7), "0"), (FakeCuda(7), "1")], "2 ranks of one host share 1 GPUs"),
        ([(FakeCuda(7), "0"), (FakeNvml(GPU_7), None)], "2 ranks of one host share 1 GPUs"),
        ([(FakeCuda((1, 7)), "0"), (FakeCuda((2, 8)), "0")], ""),
        ([(FakeCuda((1, 7)), "0"), (FakeCuda((2, 7)), "0")], "2 ranks of one host share 1 GPUs"),
        ([(FakeCuda((1, 7)), "0"), (FakeCuda(7), "0")], "2 ranks of one host share 1 GPUs"),
        # What nobody knows is not taken for one GPU.
        ([(None, "0"), (None, "1")], ""),
        ([(None, "0"), (None, "0")], ""),
        ([(FakeCuda(), None), (FakeCuda(), None)], ""),
        ([(SPLIT, "MIG-7"), (SPLIT, "MIG-8")], ""),
    ],
)
def test_a_gpu_has_the_same_name_whatever_number_a_rank_sees(
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[tuple[FakeNvml | FakeCuda | None, str | None]],
    why: str,
) -> None:
    seen = []
    for library, visible in ranks:

        def load(name: str, library: FakeNvml | FakeCuda | None = library) -> Any:
            kind = FakeCuda if "cuda" in name else FakeNvml
            if not isinstance(library, kind):
                raise OSError(f"no {name}")
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        seen.append({"gpus": gpu._visible_gpus(1)})
    answer = gpu.why_not_nccl(told(*seen))
    assert (why in answer) if why else answer == ""
