"""Files of observers: read whatever lies there, written whole or not at all.

A folder of traces may hold a FIFO, half a line or another program's file.  Each is told in one
sentence, and the rest is read.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
import secrets
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket",
          stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}  # fmt: skip


_brief = reprlib.Repr()
_brief.maxlevel = 3  # what shares its parts is small in memory and endless as text


_Item = TypeVar("_Item")


class Damaged(ValueError):
    """What is in a file cannot be, or nothing can be read there; the text is a sentence."""


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read.

    Raises:
        Damaged: it is none, or cannot be opened; nothing waits for the writer of a FIFO.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Damaged(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")
    return os.fdopen(descriptor, "rb")


def contents(path: str | os.PathLike[str], most: int = 1 << 30) -> bytes:
    """What a regular file holds.

    Raises:
        Damaged: as `opened`; or it has more than `most` bytes.
    """
    with opened(path) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise Damaged(f"{path} has more than {most} bytes")
    return data


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """A new file that takes the path's place once it is whole; after an error nothing is left.

    Until then its name has no part of the path's, by which other tools might know it.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise FileExistsError(f"{path} is no file: nothing is written in its place")
    # tempfile makes files for their owner alone, and the mask is that of all threads.  The name is
    # not the file's, which other readers of the folder may look for.
    unfinished = path.with_name(f".{secrets.token_hex(8)}.unfinished")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, 0o666)
    try:
        with os.fdopen(descriptor, mode) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def check(value: Any, schema: Any, name: str = "it") -> None:
    """Compares a value of a file with what it is to be.

    Args:
        value: of JSON, of a pickle of plain objects.
        schema: a type, or a tuple of types; a list with the schema of all elements; a dict with the
            schema of each key, where "key?" may be missing and further keys are no fault; or a
            function that says whether the value is right.
        name: of the value, for the error.

    Raises:
        Damaged: they differ; says where.
    """
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            raise Damaged(f"{name} is {_shown(value)}, not an object")
        for key, inner in schema.items():
            known = key.removesuffix("?")
            if known in value:
                check(value[known], inner, f"{name}.{known}" if name != "it" else known)
            elif known == key:
                raise Damaged(f"{name} lacks '{key}'")
    elif isinstance(schema, list):
        if not isinstance(value, (list, tuple)):
            raise Damaged(f"{name} is {_shown(value)}, not a list")
        for at, one in enumerate(value):
            check(one, schema[0], f"{name}[{at}]")
    elif isinstance(schema, (type, tuple)):
        known = schema if isinstance(schema, tuple) else (schema,)
        # To Python a bool is an int.
        if not isinstance(value, known) or (isinstance(value, bool) and bool not in known):
            words = " or ".join(getattr(one, "__name__", str(one)) for one in known)
            raise Damaged(f"{name} is {_shown(value)}, not {words}")
    elif not schema(value):
        raise Damaged(f"{name} is {_shown(value)}")


def natural(value: Any) -> bool:
    """For `check`: a whole number from 0 on, of 63 bits at most."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def sharing(
    items: Iterable[_Item], keys: Callable[[_Item], Iterable[Hashable]]
) -> list[list[_Item]]:
    """Parts items, so that those with a common key are together: files of one job.

    Args:
        items: what was read.
        keys: of an item.
    """
    parts: list[tuple[set[Hashable], list[_Item]]] = []
    for item in items:
        known, members = set(keys(item)), [item]
        for part in [part for part in parts if part[0] & known]:
            parts.remove(part)
            known |= part[0]
            members = part[1] + members
        parts.append((known, members))
    return [members for _, members in parts]


def _shown(value: Any) -> str:
    text = _brief.repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
