"""Resetting a connection between two ranks from outside, as a firewall does that forgets it."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import struct
from pathlib import Path

PIDFD_GETFD = 438


def connected_sockets(pid: int) -> list[socket.socket]:
    """The connected TCP sockets of a process, as our own descriptors of them."""
    libc, found = ctypes.CDLL(None, use_errno=True), []
    process = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if not os.readlink(entry).startswith("socket:"):
                    continue
            except FileNotFoundError:
                continue  # it has closed it since
            fd = libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)
            if fd < 0:
                continue
            one = socket.socket(fileno=fd)
            try:
                one.getpeername()
            except OSError:
                one.close()  # it listens, or its other end has gone
                continue
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                found.append(one)
            else:
                one.close()
    finally:
        os.close(process)
    return found


def reset_one(pids: list[int], rank: int, seed: int) -> set[int]:
    """Resets a connection of that rank's to another rank, whichever; the two ranks."""
    sockets = {r: connected_sockets(pid) for r, pid in enumerate(pids)}
    try:
        owner = {
            (one.getsockname(), one.getpeername()): r for r, ones in sockets.items() for one in ones
        }
        pairs = [
            (one, owner[one.getpeername(), one.getsockname()])
            for one in sockets[rank]
            if (one.getpeername(), one.getsockname()) in owner
        ]
        if not pairs:
            raise RuntimeError(f"rank {rank} has no connection to another rank")
        one, other = random.Random(f"reset {seed}").choice(pairs)
        # Disconnecting a socket sends a reset, and its owner finds it reset as well.
        nowhere = struct.pack("H14x", socket.AF_UNSPEC)
        if ctypes.CDLL(None, use_errno=True).connect(one.fileno(), nowhere, len(nowhere)) != 0:
            raise OSError(ctypes.get_errno(), "connect")
        return {rank, other}
    finally:
        for ones in sockets.values():
            for one in ones:
                one.close()
