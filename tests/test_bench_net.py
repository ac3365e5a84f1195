"""benchmarks/net/compare.py: what is to be reached, who is left out, a whole run between hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hosts import why_not

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks" / "net"
sys.path.insert(0, str(BENCHMARKS))

import _cases  # noqa: E402
import _coded  # noqa: E402
import compare  # noqa: E402
import train  # noqa: E402

from ringreduce.bench.results import Measurement, Row  # noqa: E402
from ringreduce.bench.settings import OURS  # noqa: E402

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())
MIB = 1 << 20


def case(**more: object) -> _cases.Case:
    return _cases.Case("a", "a path", hosts=2, sizes=(25 * MIB,), **more)  # type: ignore[arg-type]


def row(size: int, **seconds: float) -> Row:
    times = {key: Measurement([value], iterations=[1]) for key, value in seconds.items()}
    return Row(size, size // 4, "float32", "sum", 1.0, times)


def test_bus_bandwidth_is_bits_over_time():
    # 25 MiB by two ranks: each line carries 25 MiB each way, here in 0.2097152 s.
    assert compare.mbit(row(25 * MIB, ours=0.2097152), OURS) == pytest.approx(1000)


def test_targets_are_met_or_missed():
    rate = case(targets={25 * MIB: 900.0})
    assert compare.target_of(rate, row(25 * MIB, ours=0.21)) == (">= 900 Mbit/s", True)
    assert compare.target_of(rate, row(25 * MIB, ours=0.25)) == (">= 900 Mbit/s", False)
    small = case(targets={1024: 100.0})
    assert compare.target_of(small, row(1024, ours=9e-5)) == ("<= 100 us", True)
    assert compare.target_of(small, row(1024, ours=2e-4)) == ("<= 100 us", False)
    both = case(targets={25 * MIB: 900.0}, times_gloo={25 * MIB: 1.5})
    assert compare.target_of(both, row(25 * MIB, ours=0.2, gloo=0.4))[1] is True
    assert compare.target_of(both, row(25 * MIB, ours=0.2, gloo=0.25))[1] is False


def test_nothing_is_said_of_a_target_that_was_not_measured():
    both = case(targets={25 * MIB: 900.0}, times_gloo={25 * MIB: 1.5})
    assert compare.target_of(both, row(25 * MIB, gloo=0.25))[1] is None
    assert compare.target_of(both, row(1024, ours=0.25)) == ("", None)


def test_every_path_has_hosts_and_a_name_of_its_own():
    assert len({case.key for case in _cases.CASES}) == len(_cases.CASES)
    for path in _cases.CASES:
        assert path.world >= 2
        names = [contender.key for contender in path.contenders("ringreduce", ("gloo",))]
        assert names[0] == OURS
        assert "gloo" in names
        assert {*path.targets, *path.times_gloo} <= {*path.sizes}
        assert {*path.codecs} == {*names} - {OURS, "gloo", *path.also}
        alone = [contender.key for contender in path.contenders("gloo", ("gloo",))]
        assert alone == [OURS, "gloo"]  # codecs are ringreduce's


def test_a_codec_is_to_be_faster_than_exact_and_gloo():
    asked = _cases.Coded(3.3, 0.27)
    measured = row(25 * MIB, ours=2.2, gloo=2.3, int8=0.6)
    assert _coded.coded_target(asked, measured, "int8") == (">= 3.3 x exact and gloo", True)
    for slow in ({"ours": 1.9}, {"gloo": 1.9}, {"int8": 0.7}):
        times = {"ours": 2.2, "gloo": 2.3, "int8": 0.6, **slow}
        assert _coded.coded_target(asked, row(25 * MIB, **times), "int8")[1] is False
    assert _coded.coded_target(asked, row(25 * MIB, int8=0.6), "int8")[1] is None
    assert _coded.coded_target(_cases.Coded(0, 0.505), measured, "int8") == ("", None)


def test_bytes_at_the_link_are_held_against_exact():
    codecs = {"int8": _cases.Coded(3.3, 0.27), "int4": _cases.Coded(5.5, 0.15)}
    measured = row(25 * MIB, ours=2.2, int8=0.6)
    measured.measurements["int8"].error = {"max": 0.04, "rms": 0.008, "cosine": 0.99997}
    [line] = _coded.coded_lines(codecs, measured, {"ours": 1000.0, "int8": 266.0})
    assert "3.67 x as fast" in line and "0.2660 of its bytes" in line and "0.27: met" in line
    assert "rms error 0.008" in line
    [line] = _coded.coded_lines(codecs, measured, {"ours": 1000.0, "int8": 271.0})
    assert "MISSED" in line
    assert "bytes" not in _coded.coded_lines(codecs, measured, {})[0]


class Links:
    """Hosts whose links carry what was put on them."""

    def __init__(self) -> None:
        self.bytes = 500

    def statistics(self) -> dict[str, object]:
        return {"links": [{"bytes": self.bytes}, {"bytes": 2 * self.bytes}]}


def test_bytes_of_one_call_are_those_between_two_looks():
    links = Links()

    class Ranks:
        def __init__(self, size: int) -> None:
            self.size = size

        def ask(self, do: str, warmup: int, iterations: int) -> None:
            assert (do, warmup) == ("round", 0)
            links.bytes += iterations * self.size

    sets = {"ours": Ranks(100), "int8": Ranks(27)}
    controller = SimpleNamespace(sets=sets)
    measured = row(25 * MIB, ours=1.0, int8=1.0)
    found = _coded.count_bytes(controller, links, measured)  # type: ignore[arg-type]
    assert found == {"ours": 300, "int8": 81}
    assert _coded.count_bytes(controller, None, measured) == {}  # type: ignore[arg-type]


def test_a_step_with_a_codec_is_held_against_gloos():
    def way(step: float) -> train.ddp.WayResult:
        return train.ddp.WayResult(step=[step])

    ways = {"stock": way(0.6), "ours": way(0.6), "int8": way(0.25)}
    model = train.ModelResult("mlp", 1, {}, ways)
    at_link = {"stock": 2e6, "ours": 2e6, "int8": 5.2e5}
    lines = train.verdicts(model, at_link, 1000)
    assert "0.2600 of exact's" in lines[-2]
    assert "2.40 x as fast as gloo (asked: 2: met)" in lines[-1]
    ways["int8"] = way(0.31)
    assert "(asked: 2: MISSED)" in train.verdicts(model, at_link, 1000)[-1]
    assert "asked" not in "".join(train.verdicts(model, at_link, 100))  # of another line


def test_auto_is_held_against_exact():
    def verdict(step: float) -> list[str]:
        ways = {"ours": train.ddp.WayResult(step=[0.2]), "auto": train.ddp.WayResult(step=[step])}
        ways["auto"].choice = "exact: why"
        return train.verdicts(train.ModelResult("mlp", 1, {}, ways), {}, None)

    assert verdict(0.208)[0] == "# auto chose exact: why"
    assert "1.040 of exact's (asked: at most 1.05: met)" in verdict(0.208)[1]
    assert "MISSED" in verdict(0.212)[1]


@pytest.mark.slow
def test_training_on_one_host(tmp_path, capsys):
    path = tmp_path / "train.json"
    arguments = ["--hosts", "1", "--tiny", "--rounds", "1", "--steps", "2", "--ways", "ours,auto"]
    assert train.main([*arguments, "--out", str(path)]) == 0, capsys.readouterr().out
    [model] = json.loads(path.read_text())["models"]
    assert model["ways"]["auto"]["choice"].startswith(("exact: a step takes", "int8: a step takes"))
    assert model["ways"]["ours"]["choice"] == ""


@pytest.mark.slow
@needs_hosts
def test_a_run_between_hosts(tmp_path, capsys):
    arguments = ["--paths", "lan_2", "--backend", "gloo", "--sizes", "4K", "--rounds", "2"]
    assert compare.main([*arguments, "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "net_lan_2.json").read_text())
    [measured] = document["rows"]
    assert measured["bytes"] == 4096
    assert measured["measurements"].keys() == {"ours", "gloo"}
    for measurement in measured["measurements"].values():
        assert measurement["wrong"] == 0
        assert measurement["median_us"] > 200  # a round trip, at the very least
        assert measurement["busbw_mbit"] < 1000
    assert all(link["packets"] > 100 for link in document["statistics"]["links"])
    assert document["line"]["rate_mbit"] == 1000
    assert "gloo (as ours)" in capsys.readouterr().out


@pytest.mark.slow
@needs_hosts
def test_a_run_with_codecs_between_hosts(tmp_path, capsys):
    arguments = ["--paths", "slow_2", "--sizes", "256K", "--rounds", "1", "--out", str(tmp_path)]
    assert compare.main(arguments) == 0
    [measured] = json.loads((tmp_path / "net_slow_2.json").read_text())["rows"]
    found = measured["measurements"]
    assert found.keys() == {"ours", "bfloat16", "int8", "int4", "gloo"}
    assert all(m["wrong"] == 0 and m["same_bits"] for m in found.values())
    shares = {key: found[key]["link_bytes"] / found["ours"]["link_bytes"] for key in found}
    assert found["ours"]["link_bytes"] > 2 * (256 << 10)
    assert 0.45 < shares["bfloat16"] < 0.6
    assert 0.13 < shares["int4"] < 0.25 < shares["int8"] < 0.35  # and what a small call adds
    assert "bytes at the link" in capsys.readouterr().out


@pytest.mark.slow
@needs_hosts
def test_training_between_hosts(tmp_path, capsys):
    path = tmp_path / "train.json"
    arguments = ["--tiny", "--rounds", "1", "--steps", "2", "--ways", "stock,ours,int8"]
    assert train.main([*arguments, "--out", str(path)]) == 0, capsys.readouterr().out
    [model] = json.loads(path.read_text())["models"]
    assert model["ways"].keys() == {"stock", "ours", "int8"}
    for way in model["ways"].values():
        assert len(way["step"]) == 2 and (way["wrong"], way["same_bits"]) == (0, True)
        assert way["link_bytes"] > 1000


@pytest.mark.slow
@needs_hosts
def test_a_backend_that_cannot_take_part_is_told(capsys):
    assert compare.main(["--paths", "lan_2", "--backend", "nobody", "--sizes", "4K"]) == 1
    assert "left out: nobody (as ours): " in capsys.readouterr().out
