"""DistributedSampler: every rank its own share of the data, in another order every epoch.

    torchrun --standalone --nproc-per-node 2 examples/tutorials/sampler.py

Every rank prints the samples that it was given.
"""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIZE = 22  # with 4 ranks some are given twice, so that all ranks have as many batches


def epoch_of(loader: DataLoader[tuple[torch.Tensor, ...]]) -> list[int]:
    """The samples that this rank sees in an epoch, in their order."""
    return [int(sample) for (batch,) in loader for sample in batch]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = TensorDataset(torch.arange(SIZE))
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(dataset, seed=5)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)  # shuffle=True is the sampler's

    for epoch in range(3):
        sampler.set_epoch(epoch)  # otherwise every epoch has the order of the first
        mine = epoch_of(loader)
        print(f"rank {rank}: epoch {epoch} = {mine}", flush=True)

        # What all ranks saw together.
        everyone = [torch.empty(len(mine), dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(everyone, torch.tensor(mine))
        print(f"rank {rank}: seen in epoch {epoch} = {torch.cat(everyone).unique().tolist()}")

    print(f"rank {rank}: without set_epoch = {epoch_of(loader)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
