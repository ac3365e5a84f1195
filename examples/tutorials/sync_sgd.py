"""Synchronous SGD by hand, without DDP: each rank takes a share of every batch, and gradients are
averaged before each step; first one parameter at a time, then in ringreduce's buckets.

    torchrun --standalone --nproc-per-node 2 examples/tutorials/sync_sgd.py

Whatever the number of ranks, this is the training that one process does with the whole batch.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

import ringreduce

BATCH = 128  # images of all ranks together
EPOCHS = 4


def make_data() -> TensorDataset:
    """2048 points in 16 dimensions, in four classes that a linear rule tells apart."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(2048, 16, generator=generator)
    return TensorDataset(points, (points @ torch.randn(16, 4, generator=generator)).argmax(1))


def share_of(dataset: TensorDataset, rank: int, world_size: int) -> Subset[tuple[Tensor, ...]]:
    """Every world_size-th point, in an order that all ranks agree on."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(2))
    return Subset(dataset, order[rank::world_size].tolist())


def make_model() -> nn.Module:
    """Six thin layers: many small parameters, for which buckets matter most."""
    torch.manual_seed(3)  # all ranks start from the same weights
    layers: list[nn.Module] = []
    for inputs in (16, 32, 32, 32, 32):
        layers += [nn.Linear(inputs, 32), nn.LayerNorm(32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def average_gradients(model: nn.Module) -> None:
    """Replaces every gradient by its average over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def train(average: Callable[[nn.Module], None]) -> tuple[list[float], list[float], float]:
    """Trains a new model.

    Returns the loss of each epoch over all ranks, two numbers that stand for the final weights, and
    what `average` took, in milliseconds a step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    loader = DataLoader(share_of(make_data(), rank, world_size), batch_size=BATCH // world_size)
    losses, times = [], []
    for _ in range(EPOCHS):
        total = torch.zeros(1)
        for points, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(points), labels)
            loss.backward()
            dist.barrier()  # for the clock only: ranks that wait for each other are not counted
            start = time.perf_counter()
            average(model)
            times.append(1e3 * (time.perf_counter() - start))
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / len(loader) / world_size)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()
    return losses, [flat.sum().item(), flat.norm().item()], statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    args = parser.parse_args()

    torch.set_num_threads(1)  # ranks share the cores of one host
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    milliseconds = {}
    ways = {"per parameter": average_gradients, "bucketed": ringreduce.average_gradients}
    for way, average in ways.items():
        losses, weights, milliseconds[way] = train(average)
        print(f"rank {rank}: losses {way} = {losses}", flush=True)
        print(f"rank {rank}: weights {way} = {weights}", flush=True)
    if rank == 0:
        for way, value in milliseconds.items():
            print(f"rank 0: milliseconds a step {way} = {value:.3f}", flush=True)
        ratio = milliseconds["per parameter"] / milliseconds["bucketed"]
        print(f"rank 0: ratio = {ratio:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
