"""Trains a wide MLP (17 million parameters) on handwritten digits with DDP, where sync dominates.

    torchrun --standalone --nproc-per-node 2 examples/train_mlp.py --backend gloo
    torchrun --standalone --nproc-per-node 2 examples/train_mlp.py --backend ringreduce
    torchrun --standalone --nproc-per-node 2 examples/train_mlp.py --backend gloo --hook

The digits (1797 images of 8 x 8 pixels) come with scikit-learn; nothing is downloaded. What a
script must change for ringreduce is between the two lines of dashes: the backend's name, or,
where the process group has to stay as it is, one line for the hook.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from _common import weights_hash, write_record
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 4096
BATCH = 16  # images a rank and step
LEARNING_RATE = 0.1


def wrap(model: nn.Module, backend: str, hook: bool) -> DistributedDataParallel:
    """Joins the process group and wraps the model: all that this script does for DDP."""
    # ---------------------------------------------------------------------------------------
    dist.init_process_group(backend)  # way 1: "ringreduce" in place of "gloo"

    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    if hook:  # way 2: the group stays gloo, and the gradients go through ringreduce
        import ringreduce

        ringreduce.register_comm_hook(ddp)
    # ---------------------------------------------------------------------------------------
    return ddp


def make_model(seed: int, width: int = WIDTH) -> nn.Module:
    """64 pixels in, 10 digits out. The seed makes every run start from the same weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """(train, test) of images float32 [n, 64], normalised, and labels int64 [n]."""
    digits = load_digits()
    split = train_test_split(
        digits.data, digits.target, test_size=0.2, random_state=seed, stratify=digits.target
    )
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in split)
    mean, std = train_x.mean(), train_x.std()
    train_x, test_x = ((x - mean) / std for x in (train_x, test_x))
    return TensorDataset(train_x.float(), train_y), TensorDataset(test_x.float(), test_y)


def batches(
    dataset: TensorDataset, seed: int, batch: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the data, shuffled anew every epoch, without end."""
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train_step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    """One step; returns the loss of this rank's batch."""
    optimizer.zero_grad()
    loss = cross_entropy(ddp(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "ringreduce"])
    parser.add_argument("--hook", action="store_true", help="gradients through ringreduce's hook")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="folder for one JSON file a rank")
    args = parser.parse_args()

    torch.set_num_threads(1)  # ranks share the cores of one host
    ddp = wrap(make_model(args.seed), args.backend, args.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    train_set, test_set = load_data(args.seed)
    data = batches(train_set, args.seed)

    losses, times = [], []
    for step in range(1, args.steps + 1):
        images, labels = next(data)
        start = time.perf_counter()
        losses.append(train_step(ddp, optimizer, images, labels))
        times.append(1e3 * (time.perf_counter() - start))
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4}   loss {losses[-1]:.4f}   {times[-1]:6.1f} ms", flush=True)

    record = {
        "losses": losses,
        "weights_hash": weights_hash(ddp),
        "step_ms": statistics.median(times),
        "test_accuracy": accuracy(ddp.module, test_set),
    }
    write_record(args.record, record)
    if dist.get_rank() == 0:
        print(f"step {record['step_ms']:.1f} ms (median)", end="   ")
        print(f"test accuracy {record['test_accuracy']:.2%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
