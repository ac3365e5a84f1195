"""How the benchmark measures: whose time counts, and what happens to who refuses."""

from types import SimpleNamespace

import pytest

from ringreduce.bench.alternate import measure_row
from ringreduce.bench.contenders import contenders_of
from ringreduce.bench.settings import OURS, Settings, Unsupported


class Answers:
    """The ranks of a contender that take 10 us a call, or refuse."""

    def __init__(self, contender, refusal: str = "") -> None:
        self.contender, self.refusal = contender, refusal
        self.asked: list[str] = []

    def ask(self, do: str, **arguments) -> list[dict]:
        self.asked.append(do)
        if self.refusal:
            raise Unsupported(self.refusal)
        if do == "check":
            return [{"wrong": 0, "digest": ""}] * 2
        if do == "round":
            seconds = 1e-5 * arguments["iterations"]
            return [{"seconds": s, "idle": 1.0, "idle_cpu": 0.0} for s in (seconds, 0.0)]
        return [{}] * 2


def measure_with(collective: str, refusals: dict[str, str]):
    """The row, who was left out and the answers of two contenders, of whom some refuse."""
    settings = Settings(collective, 2, (1024,), compare=("gloo",), iterations=100, rounds=2)
    answers = {
        c.key: Answers(c, refusals.get(c.key, "")) for c in contenders_of(settings, roofline=False)
    }
    skipped: dict[str, str] = {}
    row = measure_row(SimpleNamespace(sets=answers), settings, 1024, 4, skipped)
    return row, skipped, answers


class TestMethod:
    def test_time_is_that_of_one_call_of_the_slowest_rank(self):
        row, skipped, _ = measure_with("all_reduce", {})
        assert {key: m.seconds for key, m in row.measurements.items()} == {
            "ours": [pytest.approx(1e-5)] * 2,
            "gloo": [pytest.approx(1e-5)] * 2,
        }
        assert skipped == {}

    def test_ping_pong_is_half_of_the_way_there_and_back(self):
        row, _, _ = measure_with("sendrecv", {})
        assert row.measurements[OURS].seconds == [pytest.approx(5e-6)] * 2

    def test_a_peer_that_refuses_is_left_out(self):
        row, skipped, answers = measure_with("reduce", {"gloo": "no such type"})
        assert list(row.measurements) == ["ours"]
        assert skipped == {"gloo": "no such type"}
        assert answers["gloo"].asked == ["prepare"]

    def test_ours_must_not_refuse(self):
        with pytest.raises(Unsupported, match="ringreduce: not yet"):
            measure_with("reduce", {OURS: "not yet"})
