"""The three ways for ranks to find each other, for those who start the processes themselves.

for r in 0 1; do
  python examples/tutorials/init_methods.py --method tcp --rank $r --world-size 2 &
done; wait

env   MASTER_ADDR and MASTER_PORT say where rank 0 listens, RANK and WORLD_SIZE who one is
tcp   the same as a URL, and rank and world size as arguments
file  a file that all ranks can see, which must not be there at first; no port is needed
"""

import argparse
import os

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="ringreduce")
    parser.add_argument("--method", choices=["env", "tcp", "file"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--port", type=int, default=29500, help="where rank 0 listens")
    parser.add_argument("--file", default="/tmp/ringreduce-tutorial", help="where the ranks meet")
    args = parser.parse_args()

    if args.method == "env":  # usually a launcher sets these
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(args.port)
        os.environ["RANK"] = str(args.rank)
        os.environ["WORLD_SIZE"] = str(args.world_size)
        dist.init_process_group(args.backend, init_method="env://")  # env:// is also the default
    elif args.method == "tcp":
        dist.init_process_group(
            args.backend,
            init_method=f"tcp://127.0.0.1:{args.port}",
            rank=args.rank,
            world_size=args.world_size,
        )
    else:
        dist.init_process_group(
            args.backend,
            init_method=f"file://{args.file}",
            rank=args.rank,
            world_size=args.world_size,
        )

    t = torch.tensor([args.rank + 1])
    dist.all_reduce(t)
    print(f"rank {dist.get_rank()}: sum = {t.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
