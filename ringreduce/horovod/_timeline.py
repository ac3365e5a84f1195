"""Records the stages of operations in Chrome's trace format (chrome://tracing, Perfetto)."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from ringreduce.horovod._requests import Request


class Timeline:
    """A file of events; one row for each name of an operation.

    Args:
        path: of the file, which is overwritten.
        mark_cycles: also record when each cycle of the coordinator begins.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, mark_cycles: bool = False) -> None:
        self.path = Path(path)
        # Line by line, since it is looked at while the job runs, and after it was killed.
        self._file = self.path.open("w", buffering=1, encoding="utf-8")
        self._file.write("[\n")
        self._marks_cycles = mark_cycles
        self._lock = threading.Lock()
        self._start = time.monotonic()
        began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._write({"name": "process_name", "ph": "M", "pid": 0, "args": began})
        self._rows: dict[str, int] = {}
        self._running: dict[str, float] = {}

    def negotiated(self, request: Request, submitted: float) -> None:
        """All ranks are ready for the operation, which was submitted at that time."""
        now = time.monotonic()
        self._span(request, f"NEGOTIATE_{request.kind.upper()}", submitted, now)
        self._running[request.name] = now

    def ran(self, request: Request) -> None:
        """The operation has ended."""
        start = self._running.pop(request.name, None)
        if start is not None:
            self._span(request, request.kind.upper(), start, time.monotonic())

    def cycle(self) -> None:
        """A cycle begins."""
        if self._marks_cycles:
            now = self._micros(time.monotonic())
            self._write({"name": "CYCLE_START", "ph": "i", "ts": now, "pid": 0, "s": "g"})

    def close(self) -> None:
        """Ends the file; later events are dropped."""
        with self._lock:
            if not self._file.closed:
                self._file.write("{}]\n")
                self._file.close()

    def _span(self, request: Request, name: str, start: float, end: float) -> None:
        row = self._rows.get(request.name)
        if row is None:
            row = self._rows[request.name] = len(self._rows) + 1
            self._write(
                {"name": "process_name", "ph": "M", "pid": row, "args": {"name": request.name}}
            )
        begin = max(0.0, self._micros(start))
        sizes = [list(shape) for shape in request.shapes]
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": begin,
                "dur": self._micros(end) - begin,
                "pid": row,
                "args": {"dtype": [str(dtype) for dtype in request.dtypes], "shape": sizes},
            }
        )

    def _micros(self, moment: float) -> float:
        return round((moment - self._start) * 1e6, 1)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(event) + ",\n")
