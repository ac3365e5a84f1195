"""benchmarks/gpu_model.py: its formulas, and that docs/gpu.md shows what it prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_model as model  # noqa: E402


def test_its_numbers_are_those_of_tuning_h() -> None:
    text = (ROOT / "csrc" / "cuda" / "tuning.h").read_text()
    found = re.search(r"H = (\d+) us and B = (\d+) GB/s", text)
    assert found
    assert (model.NVLINK.hop, model.NVLINK.rate) == (float(found[1]), float(found[2]))


def test_one_shot_gives_way_where_tuning_h_says() -> None:
    for ranks, bytes_at in ((3, 1.8e6), (4, 600e3), (8, 170e3)):
        on = model.Links(ranks, model.NVLINK.hop, model.NVLINK.rate)
        edge = on.hop * on.rate * 1e3 * ranks / ((ranks - 1) * (ranks - 2))
        assert edge == pytest.approx(bytes_at, rel=0.5)
        assert model.best(on, int(0.9 * edge))[0] == "one-shot"
        assert model.best(on, int(1.1 * edge))[0] == "two-shot"


def test_large_messages_come_to_the_rate_of_the_links() -> None:
    for on in (model.NVLINK, model.without_peer_access(8)):
        for algorithm in (model.two_shot, model.ring):
            reached = model.busbw(on.ranks, 1 << 40, algorithm(on, 1 << 40))
            assert reached == pytest.approx(on.rate, rel=1e-3)
    # Of a host's port each byte of a message passes 2 (N - 1) / N times.
    hosts = model.Hosts(model.NVLINK, 2, model.PORT_HOP, model.PORT_RATE)
    assert 1e-3 * (1 << 40) / hosts.time(1 << 40) == pytest.approx(model.PORT_RATE, rel=0.1)


def test_floors_of_a_shared_gpu() -> None:
    direct = [line.split("|") for line in model.shared_table() if "direct" in line]
    assert [cell.strip() for cell in direct[0][2:4]] == ["0.25 ms", "0.50 ms"]


def test_the_documentation_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main() == 0
    documented = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line for line in printed if line not in documented] == []
