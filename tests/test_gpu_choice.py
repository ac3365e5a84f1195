"""Who takes the calls on CUDA tensors that ringreduce's kernels do not perform."""

import datetime
import json
from typing import Any

import pytest
import torch.distributed as dist

from ringreduce import _gpu

ALL_SEEN: dict[str, Any] = {
    "host": "a",
    "gpus": 8,
    "visible": None,
    "nccl": True,
    "shares": False,
    "other": "auto",
}


def told(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**ALL_SEEN, **change} for change in changes]


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (told(*[{}] * 8), ""),
        (told(*[{}] * 9), "9 ranks of one host share 8 GPUs"),
        (told(*[{"shares": True}] * 9), ""),
        (told(*[{"shares": True}] * 8, {}), "9 ranks of one host share 8 GPUs"),
        # Each rank was given GPUs of its own, or two of them the same.
        (told({"gpus": 1, "visible": "0"}, {"gpus": 1, "visible": "1"}), ""),
        (told({"gpus": 1, "visible": "0"}, {"gpus": 1, "visible": "0"}), "share 1 GPUs"),
        # Two hosts with a GPU each; and one of them with two ranks on it.
        (told({"gpus": 1}, {"gpus": 1, "host": "b"}), ""),
        (told({"gpus": 1}, *[{"gpus": 1, "host": "b"}] * 2), "2 ranks of one host share 1 GPUs"),
        (told({}, {"nccl": False}), "rank 1 has a torch without NCCL"),
        (told({"gpus": 0}, {}), "rank 0 has no GPU"),
        # Rank 0's word holds.
        (told({"other": "host"}, {}), "RINGREDUCE_CUDA_OTHER=host"),
        (told({"other": "nccl", "gpus": 1}, {"gpus": 1}), ""),
        (told({}, {"other": "host"}), ""),
    ],
)
def test_nccl_where_it_can_start(ranks: list[dict[str, Any]], why: str) -> None:
    answer = _gpu.why_not_nccl(ranks)
    assert (why in answer) if why else answer == ""


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="RINGREDUCE_CUDA_OTHER=gloo is none of auto, nccl"):
        _gpu.why_not_nccl(told({"other": "gloo"}, {}))


def test_the_answer_comes_from_what_all_have_left_in_the_store() -> None:
    store = dist.HashStore()
    for rank, facts in enumerate(told({"gpus": 1}, {"gpus": 1})):
        store.set(f"ringreduce/gpus/{rank}", json.dumps(facts))
    assert _gpu.make_inner(datetime.timedelta(seconds=1), store, 0, 2) is None
