"""What each rank of test_launchers.py and test_manifests.py runs, whatever has started it.

    LAUNCHER python tests/launched.py FOLDER [--backend gloo] [--train] [--kill RANK] [--go-on]

It says who it is, all-reduces, trains by DDP if asked to (torch then loads for seconds more), and
writes it all to FOLDER/rankR.json.  With --kill one rank ends by SIGKILL amid calls, and the others
write what they raise.  With --go-on too, they train on instead until the rank has come back, and a
little further.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import elastic


def train(rank: int, steps: int = 5) -> list[str]:
    """The weights after DDP's steps, to the last bit.

    Inputs, learning rate and first weights are small binary fractions, so with 2 or 4 ranks no sum
    is rounded, in whatever order a backend adds.
    """
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, rank + 1.0)  # those of rank 0 count
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1 / 16)
    for step in range(steps):
        numbers = torch.arange(10, dtype=torch.float64) * (rank + 2) + step
        inputs, targets = (numbers % 5 - 2).split((8, 2))
        optimizer.zero_grad()
        (ddp(inputs.view(2, 4)).flatten() - targets).square().mean().backward()
        optimizer.step()
    return [value.hex() for p in model.parameters() for value in p.flatten().tolist()]


def until_lost(rank: int, victim: int) -> dict[str, Any]:
    """What this rank raises once the victim is gone."""
    for step in range(10**9):
        if step == 3 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1000))
        except dist.DistBackendError as error:
            return {"error": type(error).__name__, "message": str(error)}
    raise AssertionError("the victim was not missed")


def until_back(rank: int, victim: int) -> dict[str, Any]:
    """The weights after training without the victim, and 5 steps with its next life."""
    model = torch.nn.Linear(4, 1)
    state = elastic.State(model=model, step=0, missed=0, last=0)
    state.restore()
    everybody = dist.get_world_size()
    began = state.step
    while not state.last or state.step < state.last:
        if state.missed and not state.last and len(state.live_ranks) == everybody:
            state.last = state.step + 5
        if rank == victim and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
        model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
        ringreduce.average_gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
        state.step += 1
        state.commit()
        state.missed = max(state.missed, everybody - len(state.live_ranks))
    weights = [value.hex() for p in model.parameters() for value in p.flatten().tolist()]
    return {"began": began, "steps": state.step, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="ringreduce")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--kill", type=int)
    parser.add_argument("--go-on", action="store_true")
    args = parser.parse_args()

    options = {"pg_options": ringreduce.Options(on_loss="continue")} if args.go_on else {}
    launch = ringreduce.init(args.backend, **options)
    record = dataclasses.asdict(launch) | {"host": socket.gethostname()}
    record["LOCAL_RANK"] = os.environ["LOCAL_RANK"]
    if args.go_on:
        record |= until_back(launch.rank, args.kill)
        dist.destroy_process_group()
    elif args.kill is not None:
        record |= until_lost(launch.rank, args.kill)
    else:
        t = torch.full((1000,), 2.0**launch.rank)
        dist.all_reduce(t)
        record |= {"sum": t.unique().tolist(), "weights": train(launch.rank) if args.train else []}
        dist.destroy_process_group()
    text = json.dumps(record)
    unfinished = args.folder / f"rank{launch.rank}.new"
    unfinished.write_text(text)
    unfinished.replace(unfinished.with_suffix(".json"))  # the launcher may kill this rank now
    sys.stdout.write(text + "\n")  # one write: ranks may share a pipe
    sys.stdout.flush()
    if "error" in record:
        os._exit(3)  # as a rank does that does not handle the error


if __name__ == "__main__":
    main()
