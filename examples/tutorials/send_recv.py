"""Point to point: a token around the ring, blocking; then both neighbours at once, non-blocking.

    torchrun --standalone --nproc-per-node 2 examples/tutorials/send_recv.py

Every rank prints what came.
"""

import argparse

import torch
import torch.distributed as dist


def pass_a_token(rank: int, world_size: int) -> torch.Tensor:
    """Rank 0 sends a 1, everybody doubles what comes and sends it on, until it is back."""
    token = torch.zeros(1)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    if rank == 0:
        dist.send(token + 1, dst=after)
        dist.recv(token, src=before)
    else:  # somebody must receive first: ranks that all send to each other may all wait
        dist.recv(token, src=before)
        dist.send(token * 2, dst=after)
    return token


def exchange_with_neighbours(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends the own rank both ways and receives from both sides, all under way at once."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    mine = torch.full((1000,), float(rank))
    from_before, from_after = torch.empty(1000), torch.empty(1000)
    # With two ranks both neighbours are the same: tags tell the messages apart.
    requests = [
        dist.isend(mine, dst=after, tag=1),
        dist.isend(mine, dst=before, tag=2),
        dist.irecv(from_before, src=before, tag=1),
        dist.irecv(from_after, src=after, tag=2),
    ]
    for request in requests:  # until then: leave `mine` as it is, and do not read what arrives
        request.wait()
    return from_before, from_after


def receive_from_anyone(rank: int, world_size: int) -> list[int]:
    """Every rank sends to rank 0, which takes the messages as they come; the senders, sorted."""
    if rank != 0:
        dist.send(torch.tensor([rank * rank]), dst=0, tag=3)
        return []
    senders = []
    for _ in range(world_size - 1):
        square = torch.zeros(1, dtype=torch.int64)
        sender = dist.recv(square, tag=3)  # no src: from anyone
        assert square.item() == sender * sender
        senders.append(sender)
    return sorted(senders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    token = pass_a_token(rank, world_size)
    print(f"rank {rank}: token = {token.tolist()}", flush=True)
    from_before, from_after = exchange_with_neighbours(rank, world_size)
    neighbours = [from_before.unique().tolist(), from_after.unique().tolist()]
    print(f"rank {rank}: neighbours = {neighbours}", flush=True)
    senders = receive_from_anyone(rank, world_size)
    print(f"rank {rank}: senders = {senders}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
