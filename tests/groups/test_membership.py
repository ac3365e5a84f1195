"""torchrun --nnodes=1:2: a node joins, loses a rank, is lost as a whole, and joins again.

Each time torchrun starts all ranks anew, with another world size on the same store.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launchers import environment, untouched

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import membership

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "ranks", "env", "wanted"),
    [
        pytest.param("ringreduce", 1, {}, (1, 2, 2, 1, 2), marks=pytest.mark.nightly),
        # The others go on after the loss of a node, and start anew when it joins again.
        ("ringreduce_hosts", 2, {"RINGREDUCE_ON_LOSS": "continue"}, (2, 4, 4, 4)),
    ],
)
def test_nodes_come_and_go(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    ranks: int,
    env: dict[str, str],
    wanted: tuple[int, ...],
) -> None:
    monkeypatch.setattr(membership, "RANKS", ranks)  # of a node
    with environment(untouched()):
        # Raises if weights differ, or a start is not that of the checkpoint.
        membership.run(way, tmp_path, env)
    begun = [record for record in membership.recorded(tmp_path) if "begins" in record]
    worlds = {record["attempt"]: record["world"] for record in begun}
    # On a busy machine torchrun may make further rounds in between.
    rounds = iter(worlds.values())
    assert all(world in rounds for world in wanted), worlds
    said = (tmp_path / "a.log").read_text()
    # The first node's ranks say who was lost: ranks of the second.
    lost = re.findall(r"(?:PeerLost:|\[ringreduce\]) .*?rank (\d).*? is lost", said)
    of_b = {str(record["rank"]) for record in begun if record["node"] == "b"}
    assert lost and set(lost) <= of_b
