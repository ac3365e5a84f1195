"""Trains a small character-level GPT on the Python standard library's own source with DDP.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --backend gloo
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --backend ringreduce

The text is on every machine that has Python; nothing is downloaded. With two ranks both runs
give the same bits, since a + b = b + a: the losses, the weights and the text written at the end.
"""

import argparse
import math
import string
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _common import time_sync, weights_hash, write_record
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

VOCABULARY = "\n" + string.printable[:95]  # fixed, so that all ranks agree: newline, 0-9, a-z ...
CONTEXT = 128  # characters that a prediction sees
BATCH = 8  # sequences a rank and step
HEADS = 4
NEIGHBOURS = 4  # characters that the convolution in front sees
MAX_BYTES = 6 << 20  # of text
WARMUP = 5  # steps left out of tokens/s: DDP sorts its buckets after the first


class Block(nn.Module):
    """Causal self-attention and a two-layer MLP, each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        for last in (self.project, self.contract):  # a block adds nothing at first
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        query, key, value = qkv.view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(gelu(self.expand(self.mlp_norm(x))))


class GPT(nn.Module):
    """Characters in (int64 [batch, length]), scores of the next one out ([..., vocabulary]).

    A causal convolution over the last NEIGHBOURS characters precedes the blocks: attention
    would need most of so short a training to find out that the nearest characters matter most.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.neighbours = nn.Conv1d(width, width, NEIGHBOURS)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(VOCABULARY))
        nn.init.normal_(self.characters.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text)
        past = pad(x.transpose(1, 2), (NEIGHBOURS - 1, 0))  # zeros before the text begins
        x = x + gelu(self.neighbours(past)).transpose(1, 2)
        x = x + self.positions.weight[: text.shape[1]]
        return self.scores(self.norm(self.blocks(x)))


def load_text(max_bytes: int = MAX_BYTES) -> tuple[Tensor, Tensor]:
    """(train, held out): the standard library as int64 characters; every tenth file held out."""
    code = {character: number for number, character in enumerate(VOCABULARY)}
    parts: tuple[list[int], list[int]] = ([], [])
    total = 0
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        text = path.read_bytes()[: max_bytes - total].decode("utf-8", errors="ignore")
        total += path.stat().st_size
        parts[number % 10 == 9].extend(code[c] for c in text if c in code)
        if total >= max_bytes:
            break
    return torch.tensor(parts[0]), torch.tensor(parts[1])


def random_batch(
    text: Tensor, generator: torch.Generator, batch: int = BATCH
) -> tuple[Tensor, Tensor]:
    """`batch` pieces of the text, and the same pieces one character later."""
    starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
    pieces = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()])
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def text_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy a character, in nats."""
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, seed: int) -> float:
    """The loss on 16 batches of text that training never saw; the same ones on every rank."""
    generator = torch.Generator().manual_seed(seed)
    losses = [text_loss(model, *random_batch(text, generator)) for _ in range(16)]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def write_text(model: nn.Module, start: str, length: int, seed: int) -> str:
    """`start` continued by `length` characters, drawn at temperature 0.7."""
    generator = torch.Generator().manual_seed(seed)
    text = [VOCABULARY.index(character) for character in start]
    for _ in range(length):
        scores = model(torch.tensor([text[-CONTEXT:]]))[0, -1]
        text.append(int(torch.multinomial((scores / 0.7).softmax(0), 1, generator=generator)))
    return "".join(VOCABULARY[number] for number in text)


def rate_factor(step: int, steps: int) -> float:
    """The learning rate goes up in 20 steps, and down to a tenth along a cosine."""
    return min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "ringreduce"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEADS}")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--sync-pairs", type=int, default=20, help="steps that time the sync")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="folder for one JSON file a rank")
    args = parser.parse_args()

    torch.set_num_threads(1)  # ranks share the cores of one host
    torch.manual_seed(args.seed)
    dist.init_process_group(args.backend)  # "ringreduce" in place of "gloo": nothing else changes
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_text, held_out_text = load_text()
    ddp = DistributedDataParallel(GPT(args.layers, args.width), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate_factor(n, args.steps))
    generator = torch.Generator().manual_seed(args.seed + 1 + rank)  # other text on each rank

    losses: list[float] = []
    tokens = BATCH * CONTEXT * world_size  # a step
    tokens_per_s = math.nan
    bar = tqdm(total=args.steps, desc=f"{args.backend:>10}", unit="step", disable=rank != 0)
    for step in range(args.steps):
        if step == min(WARMUP, args.steps - 1):
            start = time.perf_counter()
            first = step
        loss = text_loss(ddp, *random_batch(train_text, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step > WARMUP or step == args.steps - 1:
            tokens_per_s = tokens * (step + 1 - first) / (time.perf_counter() - start)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
        bar.update()
    bar.close()

    record = {
        "losses": losses,
        "tokens_per_s": tokens_per_s,
        "parameters": sum(parameter.numel() for parameter in ddp.parameters()),
        "weights_hash": weights_hash(ddp),
        "held_out_loss": held_out_loss(ddp.module, held_out_text, args.seed),
        "sample": write_text(ddp.module, "def ", args.sample, args.seed),
    }
    inputs, targets = random_batch(train_text, generator)
    record |= time_sync(ddp, lambda: text_loss(ddp, inputs, targets).backward(), args.sync_pairs)
    write_record(args.record, record)
    if rank == 0:
        print(f"held-out loss {record['held_out_loss']:.4f}   {tokens_per_s:,.0f} tokens/s", end="")
        print(f"   sync {record['sync_ms']:.2f} ms a step\n{record['sample']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
