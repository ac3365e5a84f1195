"""Reading errors: which of ringreduce's classes, and which ranks it holds responsible."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pool import Outcome, Raised

_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and )\d+)*)")


def blamed(message: str) -> set[int]:
    """The ranks that a message holds responsible.

    Not those that it names as witnesses ("noticed by rank 0", "rank 0 waited to receive ..."), as
    the majority ("where ranks 0 and 1 called ..."), as held up ("late too: rank 2 ...") or as the
    root of an operation ("from rank 0").
    """
    text = re.split(r", where |; late too: |; noticed by |; rank \d+ waited ", message)[0]
    text = re.sub(r"\b(from|to) rank \d+", "", text)
    return {int(n) for found in _RANKS.findall(text) for n in re.findall(r"\d+", found)}


def expect(outcome: Outcome, kind: str, ranks: Iterable[int], says: str = "") -> Raised:
    """Asserts that a rank raised `ringreduce.<kind>`, holding exactly these ranks responsible."""
    stack = getattr(outcome, "stack", "")
    assert isinstance(outcome, Raised), f"rank {outcome.rank} did not raise: {outcome}\n{stack}"
    assert outcome.isa(kind), f"rank {outcome.rank}: {outcome}\n{outcome.trace}"
    assert outcome.isa("Error") and outcome.isa("DistBackendError"), outcome.kinds
    assert any(k.startswith("ringreduce.") for k in outcome.kinds), outcome.kinds
    ranks = set(ranks)
    assert blamed(outcome.message) == ranks, f"rank {outcome.rank}: {outcome.message}"
    if outcome.group:
        assert outcome.culprit in ranks, f"rank {outcome.rank}: {outcome.culprit}, {outcome}"
    assert re.search(says, outcome.message), f"no {says!r} in: {outcome.message}"
    return outcome


def expect_all(
    outcomes: Sequence[Outcome], but: Iterable[int], kind: str, ranks: Iterable[int], says: str = ""
) -> list[Raised]:
    """`expect` for every rank but some."""
    left_out, named = set(but), list(ranks)
    return [expect(o, kind, named, says) for o in outcomes if o.rank not in left_out]
