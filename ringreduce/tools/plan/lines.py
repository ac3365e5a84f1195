"""Lines between hosts, as the command line describes them: "10Gbit,0.2ms,0.01%"."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

# By field: what stands before its number, and the factors of its units.
_UNITS: tuple[tuple[str, str | None, dict[str, float]], ...] = (
    ("rate", None, {"bit": 0.125, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9}),
    ("round_trip", None, {"us": 1e-6, "ms": 1e-3, "s": 1.0}),
    ("loss", None, {"%": 0.01}),
    ("mtu", "mtu=", {"": 1}),
    ("burst", "burst=", {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}),
)
_NAMES = {
    "rate": "rate", "round_trip": "round trip", "loss": "loss", "mtu": "MTU", "burst": "burst",
    "congestion": "congestion control",
}  # fmt: skip
_HEADERS = 52  # of IP and TCP, with TCP's time stamps
# How long TCP waits before it sends the last packets again, beyond two round trips: about two
# ticks of the kernel.
_PROBE = 10e-3
_SELDOM = 1e-9
_LONG = 2e-3  # from this round trip on a stream begins with several connections, and keeps BBR


@dataclass(frozen=True)
class Line:
    """The line of each host, both ways at a time.

    Raises ValueError for a field whose value cannot be.

    Attributes:
        rate: bytes a second, headers included.
        round_trip: seconds, of the line alone.
        loss: the part of packets that is lost.
        mtu: bytes of the largest packet.
        burst: bytes that pass at once after the line was idle, as tc's tbf and clouds' shapers
            allow.
        congestion: "bbr", or "cubic" for any control that slows down with each loss.
    """

    rate: float = 1e9 / 8
    round_trip: float = 0.0
    loss: float = 0.0
    mtu: int = 1500
    burst: float = 0.0
    congestion: str = "cubic"

    def __post_init__(self) -> None:
        # The limits of RINGREDUCE_BANDWIDTH_MBIT and RINGREDUCE_ROUND_TRIP_MS.  Where more than
        # half of the packets are lost, all of TCP's tries in a row often are.
        for name, least, most, words in (
            ("rate", 125.0, 1.25e12, "rate of 1 kbit to 10 Tbit"),
            ("round_trip", 0.0, 60.0, "round trip of 0 to 60 s"),
            ("loss", 0.0, 0.5, "loss of 0% to 50%: with more no connection lives"),
            ("mtu", 576, 65535, "MTU of 576 to 65535"),
            ("burst", 0.0, 1 << 30, "burst of 0 to 1G"),
        ):
            if not least <= getattr(self, name) <= most:  # nor NaN
                raise ValueError(f"is no {words}")
        if self.mtu != int(self.mtu):
            raise ValueError("is no MTU, which is a whole number")
        if self.congestion not in ("bbr", "cubic"):
            raise ValueError("is none of bbr and cubic")

    @property
    def delay(self) -> float:
        """Seconds one way."""
        return self.round_trip / 2

    @property
    def is_long(self) -> bool:
        """Whether ringreduce takes it for a long path."""
        return self.round_trip > _LONG

    @property
    def byte(self) -> float:
        """Seconds of the line for a byte of payload, with what is lost and sent again."""
        return self.mtu / (self.mtu - _HEADERS) / self.rate / (1 - self.loss)

    def again(self, size: float) -> float:
        """Seconds that losses add, on average, until `size` bytes that are sent at once are there.

        A packet needs 1 / (1 - loss) tries; the bytes are there when the unluckiest packet is.
        """
        packets, tries, lost = math.ceil(max(1.0, size) / (self.mtu - _HEADERS)), 0.0, self.loss
        while packets * lost > _SELDOM:
            tries -= math.expm1(packets * math.log1p(-lost))  # the probability of one more
            lost *= self.loss
        return tries * (2 * self.round_trip + _PROBE)

    def loss_rate(self, connections: int) -> float:
        """Payload bytes a second that losses allow `connections` connections.

        For controls that slow down with each loss: Mathis, Semke, Mahdavi and Ott, "The macroscopic
        behavior of the TCP congestion avoidance algorithm" (1997).  BBR is not bound by it.
        """
        if self.loss <= 0 or self.round_trip <= 0 or self.congestion == "bbr":
            return float("inf")
        segment = self.mtu - _HEADERS
        return connections * segment / self.round_trip * math.sqrt(1.5 / self.loss)

    def __str__(self) -> str:
        text = f"{self.rate * 8e-6:g} Mbit/s, {self.round_trip * 1e3:g} ms"
        return text + (f", {self.loss * 100:g} % loss, {self.congestion}" if self.loss else "")


def parse(text: str) -> Line:
    """A line from words between commas, in any order.

    Args:
        text: a rate ("10Gbit", "300Mbit"), a round trip ("0.2ms", "50us"), a loss ("0.01%"), and
            "mtu=9000", "burst=64K", "bbr" or "cubic".  The rate is needed, the others are not; none
            may stand there twice.

    Returns:
        The line.

    Raises:
        ValueError: a word is none of these or has no possible value, or there is no rate; names
            the line and the word.
    """
    found: dict[str, Any] = {}
    words: dict[str, str] = {}  # by field
    for word in text.split(",") if text.strip() else ():
        word = word.strip()
        try:
            name, value = _field(word.lower())
            if name in found:
                raise ValueError(f"is a second {_NAMES[name]}, after '{words[name]}'")
            dataclasses.replace(Line(), **{name: value})  # raises for what cannot be
        except ValueError as error:
            raise ValueError(f"in the line '{text}', '{word}' {error}") from None
        found[name], words[name] = value, word
    if "rate" not in found:
        raise ValueError(f"the line '{text}' has no rate, such as 10Gbit")
    return Line(**found)


def _field(word: str) -> tuple[str, Any]:
    """The field that a word is about, and its value. Raises ValueError."""
    if word in ("bbr", "cubic"):
        return "congestion", word
    match = re.fullmatch(r"(mtu=|burst=)?([+-]?[0-9.]+|[+-]?(?:nan|inf))([a-z%]*)(/s)?", word)
    if match:
        key, number, unit, per_second = match.groups()
        for name, keys, units in _UNITS:
            with contextlib.suppress(ValueError):
                if key == keys and unit in units and not (per_second and name != "rate"):
                    value = float(number) * units[unit]
                    return name, int(value) if name == "mtu" and value.is_integer() else value
    raise ValueError(
        "is none of a rate (10Gbit), a round trip (0.2ms), a loss (0.01%), mtu=9000, burst=64K, "
        "bbr and cubic"
    )
