"""Messages from one rank to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.tools.bench import oracle
from ringreduce.tools.bench.collective import Call, Case, Collective
from ringreduce.tools.bench.oracle import Expected


class _Messages(Collective):
    """A rank sends one buffer to a rank and gets one from a rank, or takes no part."""

    least_ranks = 2

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.mine = self._empty(case.count)
        self.got = self._empty(case.count)

    @property
    def receiver(self) -> int | None:
        """The rank that this one sends to; None for one that takes no part."""
        return (self.case.rank + 1) % self.case.world

    @property
    def sender(self) -> int:
        """The rank that this one receives from."""
        return (self.case.rank - 1) % self.case.world

    def load(self, salt: int) -> None:
        if self.receiver is None:
            return
        oracle.fill(self.mine, self._inputs(self.case.count, salt).of(self.case.rank))
        self.got.fill_(0)

    def parts(self, salt: int) -> Iterator[tuple[torch.Tensor, Expected]]:
        if self.receiver is not None:
            yield self.got, Expected(self._inputs(self.case.count, salt).of(self.sender))


class SendRecv(_Messages):
    """Ping-pong between ranks 0 and 1, each with a buffer of the whole size; others are idle."""

    name = "sendrecv"
    trips = 2
    torch_name = "dist.send(t), dist.recv(t) between ranks 0 and 1, half of the way there and back"

    @property
    def receiver(self) -> int | None:
        return 1 - self.case.rank if self.case.rank < 2 else None

    @property
    def sender(self) -> int:
        return 1 - self.case.rank

    def torch_call(self) -> Call:
        return self._ping_pong(dist.send, dist.recv, self.mine, self.got)

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        return self._ping_pong(comm.Send, comm.Recv, self.mine.numpy(), self.got.numpy())

    def _ping_pong(self, send: Any, receive: Any, mine: Any, got: Any) -> Call:
        peer = self.receiver
        if peer is None:
            return lambda: None

        def ping() -> None:
            send(mine, peer)
            receive(got, peer)

        def pong() -> None:
            receive(got, peer)
            send(mine, peer)

        return ping if self.case.rank == 0 else pong


class Exchange(_Messages):
    """All at once: every rank sends to the next and receives from the one before.

    nccl-tests calls this one sendrecv.
    """

    name = "exchange"
    torch_name = "dist.batch_isend_irecv([isend to the next, irecv from the one before]), waited"

    def torch_call(self) -> Call:
        batch = [
            dist.P2POp(dist.isend, self.mine, self.receiver),
            dist.P2POp(dist.irecv, self.got, self.sender),
        ]

        def exchange() -> None:
            for work in dist.batch_isend_irecv(batch):
                work.wait()

        return exchange

    def mpi_call(self, mpi: Any, comm: Any) -> Call:
        mine, got = self.mine.numpy(), self.got.numpy()
        receiver, sender = self.receiver, self.sender
        return lambda: comm.Sendrecv(mine, receiver, recvbuf=got, source=sender)
