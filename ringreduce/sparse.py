"""The sparse codec of outer steps: each rank sends the greatest elements of its message to all.

SparseLoCo's way.  Nothing is coded twice: the codes of all ranks are gathered, and each rank adds
them up in the order of ranks (csrc/kernels/sparse_codec.h).
"""

import re
import zlib

import torch
import torch.distributed as dist

from ringreduce.core.backend import backend_of, extension, ranks_of
from ringreduce.errors import Error

_NAME = re.compile(r"topk:([0-9.eE-]+)\+int2")
_SUM_BYTES = 4  # of a row: the checksum of the code behind it


def share_of(codec: str) -> float | None:
    """The share of a message's elements that a codec keeps.

    Args:
        codec: its name.

    Returns:
        The share; None for a codec that keeps all.

    Raises:
        ValueError: a sparse codec that is not known, or one with a share that cannot be.
    """
    if not codec.startswith("topk"):
        return None
    found = _NAME.fullmatch(codec)
    try:
        share = float(found[1]) if found else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f'codec "{codec}" is not known: a sparse codec is "topk:SHARE+int2" with a share '
            'above 0 and up to 1, such as "topk:0.02+int2"'
        )
    return share


def bytes_of_code(elements: int, share: float) -> int:
    """Bytes that a rank sends of a message, with the checksum."""
    code: int = extension().sparse_bytes(elements, share)
    return _SUM_BYTES + code


class SparseAverage:
    """An average of all ranks' messages, in place, that has begun.

    In a group that goes on after a loss the codes are gathered by an all-reduce, which survivors
    finish.  It may have a part of the lost rank's code: then the checksum is wrong, and on all
    survivors alike, since they have the same bits.  That rank is left out.

    Args:
        message: float32, in CPU memory; it holds the average once `wait` returns.
        error: receives what coding loses of it, if given.
        share: of the elements.
        group: a ringreduce group.
    """

    def __init__(
        self,
        message: torch.Tensor,
        error: torch.Tensor | None,
        share: float,
        group: dist.ProcessGroup,
    ) -> None:
        backend = backend_of(group)
        assert backend is not None
        self._message, self._share = message, share
        self._ranks = ranks_of(group, backend)
        self._goes_on = extension().goes_on(backend)
        size = bytes_of_code(message.numel(), share)
        row = torch.empty(size, dtype=torch.uint8, device="cpu")
        extension().sparse_encode(row[_SUM_BYTES:], message, share, error)
        row[:_SUM_BYTES] = torch.frombuffer(bytearray(_checksum(row)), dtype=torch.uint8)
        self._rows = torch.zeros(len(self._ranks), size, dtype=torch.uint8, device="cpu")
        if self._goes_on:
            self._rows[backend.rank()] = row
            work = dist.all_reduce(self._rows, op=dist.ReduceOp.BOR, group=group, async_op=True)
        else:
            work = dist.all_gather(list(self._rows), row, group=group, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> None:
        """Waits for the codes of all ranks, and averages them.

        Raises:
            PeerLost, Timeout, Mismatch, Aborted, Error: see `ringreduce.errors`.
        """
        self._work.wait()
        self._message.zero_()
        taken = 0
        for rank, row in zip(self._ranks, self._rows, strict=True):
            whole = row.numpy()[:_SUM_BYTES].tobytes() == _checksum(row)
            if self._goes_on and not whole:
                continue
            code = row[_SUM_BYTES:]
            if not whole or not extension().sparse_decode_add(self._message, code, self._share):
                raise Error(
                    f"DiLoCo: the code that came from rank {rank} is damaged: memory or the "
                    "network corrupts data.  Other ranks may have applied this round: make a new "
                    "group, and call sync_from",
                    rank=rank,
                )
            taken += 1
        if taken == 0:
            raise Error(
                "DiLoCo: the codes of all ranks are damaged: memory or the network corrupts data.  "
                "Make a new group, and call sync_from"
            )
        self._message /= taken


def _checksum(row: torch.Tensor) -> bytes:
    return zlib.crc32(row[_SUM_BYTES:].numpy().data).to_bytes(_SUM_BYTES, "little")
