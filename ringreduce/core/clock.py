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
        # A signal handler may call now() while it is in the midst of it.
        self._lock = threading.RLock()
        self._seen = time.monotonic()
        self._missed = 0.0

    def now(self) -> float:
        """Seconds."""
        with self._lock:
            real = time.monotonic()
            # No calls from here on, so that no signal handler comes between.
            gap = real - self._seen
            if gap > _LONGEST_GAP:
                self._missed += gap - _LONGEST_GAP
            if gap > 0:
                self._seen = real
            return real - self._missed


now = ProcessClock().now
