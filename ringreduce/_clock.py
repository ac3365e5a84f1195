"""The clock of waits in Python; csrc/base/clock.h is that of all waits in C++."""

from __future__ import annotations

import threading
import time

_LONGEST_GAP = 2.0  # seconds


class ProcessClock:
    """time.monotonic() without the time for which this process was stopped.

    A wait looks at the clock at least once a second.  So if nobody has looked for longer than
    2 s, the process was stopped (Ctrl-Z, a frozen container), or nobody waited: that counts as
    2 s.  A job that is stopped as a whole then goes on, whatever its timeouts are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._missed = 0.0

    def now(self) -> float:
        """Seconds."""
        with self._lock:
            real = time.monotonic()
            self._missed += max(0.0, real - self._seen - _LONGEST_GAP)
            self._seen = real
            return real - self._missed


now = ProcessClock().now
