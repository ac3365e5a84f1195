"""Lines between hosts, as the command line describes them: "10Gbit,0.2ms,0.01%"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_HEADERS = 52  # of IP and TCP, with TCP's time stamps
_LONG = 2e-3  # from this round trip on a stream begins with several connections, and keeps BBR


@dataclass(frozen=True)
class Line:
    """The line of each host, both ways at a time.

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
        """Seconds of the line for a byte of payload."""
        return self.mtu / (self.mtu - _HEADERS) / self.rate

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
            "mtu=9000", "burst=64K", "bbr" or "cubic".  The rate is needed, the others are not.

    Returns:
        The line.

    Raises:
        ValueError: a word is none of these, or there is no rate.
    """
    found: dict[str, object] = {}
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        number = re.fullmatch(r"([0-9.]+)([a-z%]+)(?:/s)?", word)
        try:
            if word in ("bbr", "cubic"):
                found["congestion"] = word
            elif word.startswith("mtu="):
                found["mtu"] = int(word[4:])
            elif word.startswith("burst="):
                found["burst"] = float(word[6:].rstrip("k")) * (1024 if word[-1] == "k" else 1)
            elif number is None:
                raise ValueError
            elif number[2] in _RATES:
                found["rate"] = float(number[1]) * _RATES[number[2]] / 8
            elif number[2] in _TIMES:
                found["round_trip"] = float(number[1]) * _TIMES[number[2]]
            elif number[2] == "%":
                found["loss"] = float(number[1]) / 100
            else:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"a line has a rate (10Gbit), a round trip (0.2ms), a loss (0.01%), mtu=9000, "
                f"burst=64K, bbr or cubic, and not '{word}'"
            ) from None
    if not found.get("rate"):
        raise ValueError(f"a line needs a rate above 0, such as 10Gbit: '{text}' has none")
    line = Line(**found)  # type: ignore[arg-type]
    if not 576 <= line.mtu <= 65535 or not 0 <= line.loss < 1:
        raise ValueError(f"'{text}': an MTU is 576 to 65535, a loss 0% to 100%")
    return line
