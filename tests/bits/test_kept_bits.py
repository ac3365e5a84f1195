"""Results have the bits that are recorded by kept_bits.py: those of an earlier version."""

from __future__ import annotations

import json

import kept_bits
import pytest
from pool import Pool

RECORD: kept_bits.Record = json.loads(kept_bits.FILE.read_text())


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(s, id=str(s), marks=[pytest.mark.slow] * (len(s.hosts) in (4, 5)))
        for s in kept_bits.settings()
    ],
)
def test_results_have_the_recorded_bits(pool: Pool, setting: kept_bits.Setting) -> None:
    for line, hashes in kept_bits.found(pool, setting).items():
        differing = [kind for kind in hashes if RECORD[line].get(kind) != hashes[kind]]
        assert not differing, f"{line}: other bits than recorded for {', '.join(differing)}"
