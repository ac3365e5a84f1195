"""Trains train_gpt.py's character GPT; goes on when a rank is lost, and lets a new one join.

    python -m ringreduce.supervise --nproc 4 examples/train_elastic.py

`kill -9` one of the processes whose numbers it prints: the others go on, and the process that is
started in its place joins them.  All ranks may go so, rank 0 too, as long as one is left.

Without the launcher, start a store and then each rank, a new one too, in a shell of its own:

    python -m ringreduce.supervise --store-only --master-port 29400

    export MASTER_ADDR=127.0.0.1 MASTER_PORT=29400 TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2
    RANK=0 python examples/train_elastic.py    # and RANK=1 in the next
"""

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _common import weights_hash, write_record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from train_gpt import BATCH, CONTEXT, GPT, load_text, rate_factor, text_loss

import ringreduce
from ringreduce import elastic

MAX_BYTES = 1 << 20  # of text: a new process is ready sooner than with all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--record", type=Path, help="folder for a line of JSON a rank and step")
    args = parser.parse_args()
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)  # ranks share the cores of one host
    options = ringreduce.Options(on_loss="continue")
    ringreduce.init(pg_options=options, timeout=timedelta(minutes=1))
    rank = dist.get_rank()

    text, _ = load_text(MAX_BYTES)
    pieces = text.unfold(0, CONTEXT + 1, CONTEXT)  # each with the character after it
    model = DistributedDataParallel(GPT(args.layers, args.width), init_sync=False)
    ringreduce.register_comm_hook(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate_factor(n, args.steps))
    sampler = elastic.ElasticSampler(len(pieces), BATCH)
    loader = DataLoader(pieces, batch_sampler=sampler)

    state = elastic.State(
        model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, step=0
    )
    state.restore()  # from rank 0, or from the ranks that this one joins
    if state.step > 0:
        print(f"rank {rank} takes part from step {state.step + 1} on", flush=True)

    while state.step < args.steps:
        for piece in state.batches(loader):
            start = time.monotonic()
            loss = text_loss(model, piece[:, :-1], piece[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            state.step += 1
            before_commit = time.monotonic()
            state.commit()
            end = time.monotonic()

            if args.record:
                line = {"step": state.step, "loss": loss.item(), "live": state.live_ranks}
                line |= {"time": end, "seconds": end - start, "commit": end - before_commit}
                with (args.record / f"steps{rank}.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if state.step % 20 == 0 and state.is_leader():
                live = ", ".join(map(str, state.live_ranks))
                print(f"step {state.step}: loss {loss.item():.3f}, ranks {live}", flush=True)
            if state.step == args.steps:
                break

    write_record(args.record, {"steps": state.step, "weights_hash": weights_hash(model)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
