"""Collectives: broadcast, reduce, all_reduce, scatter, gather, all_gather, and a smaller group.

    torchrun --standalone --nproc-per-node 2 examples/tutorials/collectives.py

Every rank starts each of them with the tensor [rank, 10 * rank], and prints what it has after it.
"""

import argparse

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    root = world_size - 1

    def mine() -> torch.Tensor:
        return torch.tensor([1.0, 10.0]) * rank

    def show(what: str, value: object) -> None:
        print(f"rank {rank}: {what} = {value}", flush=True)

    # From the root to all.
    t = mine()
    dist.broadcast(t, src=root)
    show("broadcast", t.tolist())

    # The sum of all, on the root; what the others hold afterwards is unspecified.
    t = mine()
    dist.reduce(t, dst=root, op=dist.ReduceOp.SUM)
    if rank == root:
        show("reduce", t.tolist())

    # The sum, the largest, the smallest and the product of all, on every rank.
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        t = mine() + 1
        dist.all_reduce(t, op=getattr(dist.ReduceOp, op))
        show(f"all_reduce {op}", t.tolist())

    # A tensor of its own from the root to each; only the root has a list.
    t = torch.empty(2)
    pieces = [torch.tensor([100.0 + r, r]) for r in range(world_size)] if rank == root else None
    dist.scatter(t, pieces, src=root)
    show("scatter", t.tolist())

    # Everybody's tensor, on the root.
    collected = [torch.empty(2) for _ in range(world_size)] if rank == root else None
    dist.gather(mine(), collected, dst=root)
    if collected is not None:
        show("gather", [t.tolist() for t in collected])

    # Everybody's tensor, on every rank.
    collected = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(collected, mine())
    show("all_gather", [t.tolist() for t in collected])

    # Among some of the ranks.  All ranks make the group, also those that are not in it.
    members = [0, world_size - 1]
    group = dist.new_group(members)
    if rank in members:
        t = mine() + 1
        dist.all_reduce(t, group=group)
        show("all_reduce in a group", t.tolist())

    # Nobody leaves before all are here.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
