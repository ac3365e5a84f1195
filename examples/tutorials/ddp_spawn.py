"""DistributedDataParallel in processes that the script starts itself, by mp.spawn.

    python examples/tutorials/ddp_spawn.py --world-size 2

One step of training, then a checkpoint: rank 0 writes it, all read it.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))


def make_batch(rank: int) -> tuple[Tensor, Tensor]:
    """20 inputs and targets; others on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)


def show(rank: int, what: str, model: nn.Module) -> None:
    """Prints the norms of all parameters, which stand for the weights."""
    norms = [parameter.detach().double().norm().item() for parameter in model.parameters()]
    print(f"rank {rank}: {what} = {norms}", flush=True)


def step(ddp: DistributedDataParallel, rank: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = make_batch(rank)
    loss = mse_loss(ddp(inputs), targets)
    loss.backward()  # averages the gradients over the ranks
    optimizer.step()


def work(rank: int, args: argparse.Namespace, checkpoint: Path) -> None:
    """What each process does; mp.spawn passes the rank."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port)
    dist.init_process_group(args.backend, rank=rank, world_size=args.world_size)
    torch.set_num_threads(1)  # ranks share the cores of one host

    torch.manual_seed(rank)  # other weights on each rank: DDP sends rank 0's to all
    ddp = DistributedDataParallel(make_model())
    show(rank, "initial", ddp)
    step(ddp, rank)
    show(rank, "trained", ddp)

    if rank == 0:  # all ranks have the same weights, so one of them writes
        torch.save(ddp.state_dict(), checkpoint)
    dist.barrier()  # nobody reads before it is written
    other = DistributedDataParallel(make_model())
    other.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))
    show(rank, "loaded", other)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--port", type=int, default=29500)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model.pt"
        mp.spawn(work, args=(args, checkpoint), nprocs=args.world_size)


if __name__ == "__main__":
    main()
