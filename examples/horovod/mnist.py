"""A training script as Horovod's users have them, on ringreduce: one import differs.

    horovodrun -np 2 python examples/horovod/mnist.py
    torchrun --standalone --nproc-per-node 2 examples/horovod/mnist.py

The digits (1797 images of 8 x 8 pixels) come with scikit-learn; nothing is downloaded.
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

import ringreduce.horovod.torch as hvd  # was: import horovod.torch as hvd


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
        )
        self.classes = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.features(images))
        return logits


def digits() -> list[Dataset[tuple[Tensor, ...]]]:
    """[train, test] of images float32 [n, 1, 8, 8] and labels int64 [n]; the same on all ranks."""
    given = load_digits()
    images = torch.from_numpy(given.images).float().unsqueeze(1) / 16
    everything = TensorDataset(images, torch.from_numpy(given.target))
    draw = torch.Generator().manual_seed(0)
    return [*random_split(everything, [0.8, 0.2], draw)]


def metric_average(value: Tensor, name: str) -> float:
    """Of all ranks."""
    return hvd.allreduce(value, name=name).item()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[tuple[Tensor, ...]]
) -> float:
    """One epoch; the mean loss over all ranks."""
    model.train()
    total = torch.zeros(())
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return metric_average(total / len(loader), "loss")


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Of all ranks' parts of the data."""
    model.eval()
    right = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return metric_average(torch.cat(right).mean(), "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="of one rank")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum")
    parser.add_argument("--record", type=Path, help="folder for one JSON file a rank")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)  # ranks share the cores of one host

    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, 256, sampler=test_sampler)

    model = Net()
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )

    losses, right = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses.append(train(model, optimizer, loader))
        right = accuracy(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}   loss {losses[-1]:.4f}   accuracy {right:.2%}", flush=True)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        weights = [float(p.detach().double().sum()).hex() for p in model.parameters()]
        record = {"losses": losses, "accuracy": right, "weights": weights}
        (args.record / f"rank{hvd.rank()}.json").write_text(json.dumps(record))
    hvd.shutdown()


if __name__ == "__main__":
    main()
