"""Writes gradients of examples/train_gpt.py's model, for codec_study: real ones, early and late.

    python benchmarks/codec_gradients.py build/gradients
    build/test/codec_study build/gradients/*.f32

Each file has all gradients of one step, as float32 in the order in which DDP would see them.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 150], help="when to write")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    sys.path.insert(0, str(EXAMPLES))
    gpt = importlib.import_module("train_gpt")
    torch.manual_seed(0)
    model = gpt.GPT(4, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    text, _ = gpt.load_text()
    generator = torch.Generator().manual_seed(1)
    for step in range(max(args.steps) + 1):
        optimizer.zero_grad()
        loss = gpt.text_loss(model, *gpt.random_batch(text, generator))
        loss.backward()
        if step in args.steps:
            gradients = [p.grad.flatten() for p in reversed(list(model.parameters()))]
            path = args.folder / f"gpt_{step}.f32"
            path.write_bytes(torch.cat(gradients).numpy().tobytes())
            print(f"{path}: {sum(map(len, gradients))} values, loss {loss.item():.3f}", flush=True)
        optimizer.step()


if __name__ == "__main__":
    main()
