"""DDP under torchrun, which restarts the ranks when one fails: training goes on from a snapshot.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \\
      examples/tutorials/ddp_torchrun.py --snapshot /tmp/snapshot.pt --fail-in 2

With --fail-in the last rank dies in that epoch, once.  The others notice at once and end with an
error that names it, torchrun starts all again, and they continue after the last whole epoch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data() -> TensorDataset:
    """512 points and a linear function of them."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(512, 20, generator=generator)
    return TensorDataset(points, points @ torch.randn(20, 1, generator=generator))


class Trainer:
    """A model, its optimizer and its data; `run` trains from the last snapshot on."""

    def __init__(self, snapshot: Path, batch: int) -> None:
        self.rank = dist.get_rank()
        self.snapshot = snapshot
        torch.manual_seed(2)
        model = nn.Linear(20, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        self.first_epoch = 0
        if snapshot.exists():
            saved = torch.load(snapshot, weights_only=True)
            model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.first_epoch = saved["epochs"]
            print(f"rank {self.rank}: resumed after = {self.first_epoch}", flush=True)
        self.ddp = DistributedDataParallel(model)
        data = make_data()
        self.sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
        self.loader = DataLoader(data, batch // dist.get_world_size(), sampler=self.sampler)

    def run(self, epochs: int, fail_in: int | None) -> None:
        for epoch in range(self.first_epoch, epochs):
            loss = self.train_epoch(epoch, fails=epoch == fail_in)
            print(f"rank {self.rank}: loss of epoch {epoch} = {loss}", flush=True)
            if self.rank == 0:
                self.save(epoch + 1)

    def train_epoch(self, epoch: int, fails: bool) -> float:
        """Returns the last batch's loss on this rank."""
        self.sampler.set_epoch(epoch)
        for number, (points, targets) in enumerate(self.loader):
            if fails and number == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                os._exit(7)
            self.optimizer.zero_grad()
            loss = mse_loss(self.ddp(points), targets)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def save(self, epochs: int) -> None:
        """Writes beside the snapshot first: a rank that dies here leaves the old one whole."""
        saved = {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs": epochs,
        }
        new = self.snapshot.with_suffix(".new")
        torch.save(saved, new)
        new.replace(self.snapshot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="points of all ranks together")
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    parser.add_argument("--fail-in", type=int, help="the epoch in which the last rank dies")
    args = parser.parse_args()

    torch.set_num_threads(1)  # ranks share the cores of one host
    dist.init_process_group(args.backend)
    trainer = Trainer(args.snapshot, args.batch)
    last = dist.get_rank() == dist.get_world_size() - 1
    trainer.run(args.epochs, args.fail_in if last else None)
    weights = trainer.ddp.module.weight.detach().flatten().tolist()
    print(f"rank {dist.get_rank()}: weights = {weights}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
