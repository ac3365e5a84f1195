"""Processes as a test sees them from outside, waiting for what they do, and ports for them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path


def free_port() -> int:
    """A free port of the loopback, below those that the system gives out by itself if it can be."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = 10_000 + secrets.randbelow(max(low, 20_000) - 10_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def _state(pid: int) -> str:
    """R, S, Z ...: of the process's first thread; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether the process is there and has not ended, which one that nobody waited for has."""
    return _state(pid) not in ("", "Z")


def asleep(pid: int) -> bool:
    """Whether its first thread waits, and not for a processor."""
    return _state(pid) == "S"


def come_to_rest(*pids: int) -> bool:
    """Waits until their first threads sleep, for longer than between two operations."""

    def rest() -> bool:
        for _ in range(5):
            if not all(map(asleep, pids)):
                return False
            time.sleep(0.01)
        return True

    return wait_until(rest)


def wait_until(condition: Callable[[], bool], timeout: float = 120.0) -> bool:
    """Polls until the condition holds; whether it did within `timeout` seconds."""
    until = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
