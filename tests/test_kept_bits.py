"""Results have the bits that are recorded in bits.json: those of an earlier version (bits.py)."""

from __future__ import annotations

import json

import bits
import pytest
from pool import Pool

RECORD: bits.Record = json.loads(bits.FILE.read_text())


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(s, id=str(s), marks=[pytest.mark.slow] * (len(s.hosts) in (4, 5)))
        for s in bits.settings()
    ],
)
def test_results_have_the_recorded_bits(pool: Pool, setting: bits.Setting) -> None:
    for line, hashes in bits.found(pool, setting).items():
        differing = [kind for kind in hashes if RECORD[line].get(kind) != hashes[kind]]
        assert not differing, f"{line}: other bits than recorded for {', '.join(differing)}"
