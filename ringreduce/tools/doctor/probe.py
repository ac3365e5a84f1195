"""A connection to a port of another rank, as ringreduce would make it, with an exchange of bytes.

Every rank echoes what comes to its port (`serve`).  `try_lines` connects to the ports of others:
first a few bytes, for the round trip, then packets of full size, which a path with a smaller MTU
that does not say so drops in silence.
"""

import concurrent.futures
import contextlib
import dataclasses
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

_PINGS = 5
TOKEN_BYTES = 16
_LARGE = 256 << 10
_PIECE = 64 << 10
AT_ONCE = 64
_AFTER_ERROR = 0.1  # seconds
_CLOCK = struct.Struct("!d")


class Target(NamedTuple):
    """Where a rank listens, and the token that `serve` was given there."""

    rank: int
    interface: str
    address: str
    port: int
    token: str


@dataclasses.dataclass
class Line:
    """What came of a connection to a rank.

    Attributes:
        sender, receiver: ranks; the sender connected.
        address: where, with the port.
        error: "" if all bytes came back.
        stage: where it failed: "connect", "small" packets or "large" ones.
        round_trip: seconds, the shortest of a few.
        ahead: by how many seconds the receiver's clock is ahead.
        interface: of the receiver.
    """

    sender: int
    receiver: int
    address: str
    error: str = ""
    stage: str = ""
    round_trip: float = 0.0
    ahead: float = 0.0
    interface: str = ""


def serve(listeners: Sequence[socket.socket], token: str) -> None:
    """Echoes to whoever knows the token, in threads that end with the process."""

    for listener in listeners:
        threading.Thread(target=_accept, args=(listener, token), daemon=True).start()


def stop(listener: socket.socket) -> None:
    """Gives its port to others."""
    with contextlib.suppress(OSError):  # its interface is gone
        listener.shutdown(socket.SHUT_RDWR)  # a thread that accepts would keep it
    listener.close()


def _accept(listener: socket.socket, token: str) -> None:
    listener.setblocking(True)
    while listener.fileno() >= 0:
        try:
            accepted, _ = listener.accept()
        except OSError:  # the caller has gone again, or there are too many descriptors
            time.sleep(_AFTER_ERROR)
            continue
        threading.Thread(target=_echo, args=(accepted, token), daemon=True).start()


def _echo(connection: socket.socket, token: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(30.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not secrets.compare_digest(_receive(connection, TOKEN_BYTES).hex(), token):
            return
        for _ in range(_PINGS):
            _receive(connection, _CLOCK.size)
            connection.sendall(_CLOCK.pack(time.time()))
        connection.sendall(_receive(connection, _LARGE))


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(_PIECE, count - len(received)))
        if not piece:
            raise ConnectionError(
                "the connection was closed: the rank has ended, or another program answers there"
            )
        received += piece
    return bytes(received)


def try_lines(sender: int, targets: Sequence[Target], seconds: float) -> list[Line]:
    """Connects to all targets, several at a time.

    Args:
        sender: this rank.
        targets: whom to try.
        seconds: for each step of one attempt.

    Returns:
        A line for each target, in their order.
    """
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda one: _try(sender, one, seconds), targets))


def _try(sender: int, to: Target, seconds: float) -> Line:
    host = f"[{to.address}]" if ":" in to.address else to.address
    line = Line(sender, to.rank, f"{host}:{to.port}", stage="connect", interface=to.interface)
    try:
        with socket.create_connection((to.address, to.port), timeout=seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.stage = "small"
            connection.sendall(bytes.fromhex(to.token))
            for _ in range(_PINGS):
                _ping(connection, line)
            line.stage = "large"
            # The other end echoes when it has all, so that this end need not read meanwhile.
            connection.settimeout(2 * seconds)
            connection.sendall(bytes(_LARGE))
            _receive(connection, _LARGE)
            line.stage = ""
    except OSError as error:
        waited = isinstance(error, TimeoutError)
        line.error = f"no answer within {seconds:g} s" if waited else error.strerror or str(error)
    return line


def _ping(connection: socket.socket, line: Line) -> None:
    begin, sent = time.perf_counter(), time.time()
    connection.sendall(_CLOCK.pack(sent))
    (there,) = _CLOCK.unpack(_receive(connection, _CLOCK.size))
    took = time.perf_counter() - begin
    if line.round_trip == 0 or took < line.round_trip:
        line.round_trip, line.ahead = took, there - sent - took / 2
