"""Messages between the controller and the rank processes: JSON over a Unix socket.

The socket lies in a directory that only this user can enter. Whoever waits for a message
sleeps in the kernel.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Client, Connection
from typing import Any

Message = dict[str, Any]


def connect(path: str) -> Connection:
    """A connection to the controller that listens at `path`. Raises OSError."""
    connection = Client(path, family="AF_UNIX")
    assert isinstance(connection, Connection)
    return connection


def send(connection: Connection, message: Message) -> None:
    """Send one message. Raises OSError if the other side has gone."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """Wait for one message. Raises EOFError or OSError if the other side has gone."""
    message = json.loads(connection.recv_bytes())
    assert isinstance(message, dict)
    return message
