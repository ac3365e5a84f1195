"""What the benchmark knows of each collective: whether it was done, sizes, bandwidth factors."""

import pytest

from ringreduce.bench.collective import Case
from ringreduce.bench.collectives import COLLECTIVES, Barrier


class TestCollectives:
    """Those with buffers; that right results pass is shown by the runs of test_bench_runs.py."""

    SIZED = tuple(cls for cls in COLLECTIVES.values() if cls.has_size)

    @pytest.mark.parametrize("cls", SIZED, ids=lambda cls: cls.name)
    @pytest.mark.parametrize("world", [2, 3])
    def test_a_call_that_does_nothing_is_wrong(self, cls, world):
        count = cls.fit(1000, world)
        wrong = []
        for rank in range(world):
            collective = cls(Case(count, "float32", "sum", rank, world))
            wrong.append(collective.check(lambda: None, salt=1)["wrong"])
        # Who has the result: rank 0 gets or gives it, ranks 0 and 1 play ping-pong.
        having = {"reduce": {0}, "gather": {0}, "sendrecv": {0, 1}}
        having["broadcast"] = set(range(1, world))
        assert {r for r in range(world) if wrong[r]} == having.get(cls.name, set(range(world)))
        assert min(filter(None, wrong)) > 0.9 * count / world

    @pytest.mark.parametrize("cls", SIZED, ids=lambda cls: cls.name)
    @pytest.mark.parametrize("world", [2, 3, 4])
    def test_sizes_fit(self, cls, world):
        fitting = cls.fit(1000, world)
        assert 900 < fitting <= 1000 and cls.fit(fitting, world) == fitting
        assert cls.fit(0, world) == 0
        assert 0 < cls.busbw_factor(world) <= 2

    def test_factors_are_those_of_nccl_tests(self):
        factors = {cls.name: cls.busbw_factor(4) for cls in self.SIZED}
        assert factors["all_reduce"] == factors["all_reduce_coalesced"] == 1.5
        assert factors["reduce"] == factors["broadcast"] == 1
        assert factors["sendrecv"] == factors["exchange"] == 1
        for name in ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"):
            assert factors[name] == 0.75
        # One of 1 + 2 + 3 + 4 units stays where it is.
        assert factors["all_to_all_uneven"] == pytest.approx(0.9)

    @pytest.mark.parametrize("world", [2, 3, 5])
    def test_uneven_pieces_agree(self, world):
        cls = COLLECTIVES["all_to_all_uneven"]
        ranks = [cls(Case(cls.fit(500, world), "int8", "sum", r, world)) for r in range(world)]
        for sender in range(world):
            for receiver in range(world):
                sent = ranks[sender].to[receiver].numel()
                assert sent == ranks[receiver].origin[sender].numel() > 0
        assert len({tuple(rank.sizes_to) for rank in ranks}) == world

    def test_barrier_notices_who_left_early(self):
        barrier = Barrier(Case(0, "float32", "sum", 1, 2))
        answer = barrier.check(lambda: None, salt=1)
        assert answer["came"] <= answer["left"]
        assert not COLLECTIVES["barrier"].has_size
