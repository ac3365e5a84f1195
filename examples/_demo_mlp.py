"""One rank of one contender in the demo's MLP comparison: trains a few steps when told to.

Each contender has rank processes of its own, and those that are not timed sleep in readline().
The demo writes one request a line to stdin and gets one line of JSON back:
    train N     N steps; answers {"losses": [...], "step_ms": [...]}
    finish      answers {"weights_hash": ..., "test_accuracy": ...} and ends
The training itself is train_mlp.py's.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from _common import weights_hash
from train_mlp import (
    LEARNING_RATE,
    WIDTH,
    accuracy,
    batches,
    load_data,
    make_model,
    train_step,
    wrap,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--hook", action="store_true")
    parser.add_argument("--no-sync", action="store_true", help="every rank trains for itself")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # Answers get stdout for themselves; what a library prints goes to the log with the errors.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    torch.set_num_threads(1)
    ddp = wrap(make_model(args.seed, args.width), args.backend, args.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    train_set, test_set = load_data(args.seed)
    data = batches(train_set, args.seed)

    while request := sys.stdin.readline().split():  # no line: the demo is gone
        if request[0] == "finish":
            score = accuracy(ddp.module, test_set)
            answer({"weights_hash": weights_hash(ddp), "test_accuracy": score})
            dist.destroy_process_group()
            break
        losses, times = [], []
        with ddp.no_sync() if args.no_sync else contextlib.nullcontext():
            for _ in range(int(request[1])):
                images, labels = next(data)
                start = time.perf_counter()
                losses.append(train_step(ddp, optimizer, images, labels))
                times.append(1e3 * (time.perf_counter() - start))
        answer({"losses": losses, "step_ms": times})


if __name__ == "__main__":
    main()
