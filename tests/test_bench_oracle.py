"""The benchmark's oracle: right results pass in every type and operation, planted errors do not."""

import pytest
import torch

from ringreduce.bench import oracle
from ringreduce.bench.collective import Case
from ringreduce.bench.rank import Rank
from ringreduce.bench.reducing import AllReduce
from ringreduce.bench.settings import DTYPES, OPS


class Loopback:
    """An engine whose all-reduce adds what the other ranks would have sent, then lies a bit."""

    def __init__(self, rank: int, world: int, lie=None) -> None:
        self.rank, self.world, self.lie = rank, world, lie
        self.salt = 0

    def call(self, collective):
        def all_reduce():
            self.salt += 1
            tensor = collective.tensor
            inputs = collective._inputs(tensor.numel(), self.salt)
            for rank in range(self.world):
                if rank != self.rank:
                    other = torch.empty_like(tensor)
                    oracle.fill(other, inputs.of(rank))
                    tensor.add_(other)
            if self.lie:
                self.lie(tensor)

        return all_reduce

    def barrier(self):
        pass

    def about(self):
        return {}

    def close(self):
        pass


def check_with(lie, dtype: str, count: int, world: int = 3):
    """The answer of a rank process whose results `lie` has touched."""
    rank = Rank(Loopback(1, world, lie), world)
    rank.prepare("all_reduce", count, dtype, "sum")
    return rank.check(salt=1)


class TestOracle:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("count", [1, 1000, oracle.PERIOD + 7])
    def test_honest_sums_pass(self, dtype, count):
        assert check_with(None, dtype, count)["wrong"] == 0

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_finds_one_planted_error(self, dtype):
        def lie(tensor):
            tensor[-1] += 1

        assert check_with(lie, dtype, oracle.PERIOD + 7)["wrong"] == 1

    def test_finds_nan_and_infinity(self):
        def lie(tensor):
            tensor[3], tensor[5] = float("nan"), float("inf")

        assert check_with(lie, "float32", 100)["wrong"] == 2

    def test_finds_swapped_chunks(self):
        def lie(tensor):
            chunk = tensor[:128].clone()
            tensor[:128] = tensor[128:256]
            tensor[128:256] = chunk

        assert check_with(lie, "float32", 1024)["wrong"] > 250

    def test_finds_sums_in_a_smaller_type(self):
        def lie(tensor):
            tensor.copy_(tensor.bfloat16())

        assert check_with(lie, "float32", 1000)["wrong"] > 900

        def lie_64(tensor):
            tensor.copy_(tensor.float())

        assert check_with(lie_64, "float64", 1000)["wrong"] > 900

    def test_finds_what_the_call_before_left(self):
        rank = Rank(Loopback(0, 2), 2)
        rank.prepare("all_reduce", 1000, "int32", "sum")
        assert rank.check(salt=1)["wrong"] == 0
        assert rank.check(salt=9)["wrong"] > 900  # the loopback adds the inputs of salt 2

    @pytest.mark.parametrize("op", OPS)
    def test_every_operation_has_an_oracle(self, op):
        dtype = "int32" if op in ("band", "bor", "bxor") else "float32"
        inputs = oracle.Inputs(dtype, op, world=4, count=50, salt=1)
        stacked = torch.stack([inputs.of(rank) for rank in range(4)])
        expected = oracle.expect_reduced(inputs)
        by_torch = {
            "sum": lambda: stacked.sum(0),
            "avg": lambda: stacked.mean(0),
            "min": lambda: stacked.amin(0),
            "max": lambda: stacked.amax(0),
            "product": lambda: stacked.prod(0),
            "band": lambda: stacked[0] & stacked[1] & stacked[2] & stacked[3],
            "bor": lambda: stacked[0] | stacked[1] | stacked[2] | stacked[3],
            "bxor": lambda: stacked[0] ^ stacked[1] ^ stacked[2] ^ stacked[3],
        }[op]()
        assert oracle.count_wrong(by_torch, expected) == 0
        assert oracle.count_wrong(by_torch + 1, expected) == 50

    def test_the_values_timed_stay_what_they_are(self):
        for op in OPS:
            case = Case(10, "int32" if op.startswith("b") else "float32", op, 0, 2)
            collective = AllReduce(case)
            collective.settle()
            before = collective.tensor.clone()
            both = oracle._combine(op, before, before)
            assert torch.equal(both / 2 if op == "avg" else both, before), op

    def test_digest_sees_one_bit(self):
        zero = torch.zeros(100)
        assert oracle.digest(zero) == oracle.digest(torch.zeros(100))
        assert oracle.digest(zero) != oracle.digest(-zero)
        assert oracle.digest(torch.empty(0)) == ""
