"""One script for every launcher: torchrun, mpirun, srun, or none.

    torchrun --standalone --nproc-per-node 2 examples/tutorials/any_launcher.py
    mpirun -n 2 python examples/tutorials/any_launcher.py
    srun -n 2 python examples/tutorials/any_launcher.py
    python examples/tutorials/any_launcher.py

torch itself reads torchrun's variables only.  ringreduce.init also reads those of Open MPI, of
MPICH and Intel MPI, and of Slurm, and sets torchrun's from them for the code that follows.
"""

import argparse
import os

import torch
import torch.distributed as dist

import ringreduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    args = parser.parse_args()

    launch = ringreduce.init(args.backend)  # in place of dist.init_process_group
    t = torch.tensor([launch.rank + 1])
    dist.all_reduce(t)
    print(f"rank {launch.rank}: sum = {t.item()}", flush=True)
    print(f'rank {launch.rank}: launcher = "{launch.launcher}"', flush=True)
    print(f"rank {launch.rank}: local rank = {os.environ['LOCAL_RANK']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
