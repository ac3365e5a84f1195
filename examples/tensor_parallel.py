"""Writes text with a small GPT that is split over the ranks: tensor parallelism on CPUs.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --backends ringreduce

Each rank holds a share of the heads and of the MLP of every layer (Shoeybi et al., "Megatron-LM",
2019).  A layer ends its two halves with an all-reduce of batch x length x width values, so a token
waits for 2 x layers of them: with one token at a time they are small, and latency is everything.

The same weights run over each backend by turns, and over a group whose operations do nothing: what
a token takes longer than there is its time in sync.  The exit status is 1 if the scores are not
those of the whole model on one rank.  The weights are random, since speed does not depend on them.
--out FILE has the times of all texts, as JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # of torch's tests: registers NOTHING
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY = 96
HEAD = 32  # values of a head
NOTHING = "fake"  # torch's backend whose operations do nothing
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of scores of about 1


class Attention(nn.Module):
    """Causal self-attention over all that came before, which it keeps."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)
        self.context = context
        self.keys, self.values = torch.empty(0), torch.empty(0)

    def make_cache(self, batch: int, heads: int) -> None:
        """Room for the keys and values of this rank's heads."""
        like = next(self.parameters())
        shape = (batch, heads, self.context, HEAD)
        self.keys = torch.zeros(shape, dtype=like.dtype)
        self.values = torch.zeros(shape, dtype=like.dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            linear(x).view(batch, length, -1, HEAD).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        seen = torch.arange(self.context) <= positions[:, None]
        mixed = scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, context)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.contract(gelu(self.expand(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens in (int64 [batch, length], with their positions), scores of the next one out."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.scores(self.norm(x[:, -1]))


def make(args: argparse.Namespace, mesh: DeviceMesh | None) -> GPT:
    """The model, whole or split over a mesh; the same weights each time and on each rank."""
    torch.manual_seed(0)
    model = GPT(args.layers, args.width, args.context).to(getattr(torch, args.dtype)).eval()
    ranks = 1
    if mesh is not None:
        ranks = mesh.size()
        columns, rows = ColwiseParallel, RowwiseParallel
        for layer in model.layers:
            plan = {f"attention.{name}": columns() for name in ("query", "key", "value")}
            plan |= {"attention.project": rows(), "expand": columns(), "contract": rows()}
            parallelize_module(layer, mesh, plan)
        parallelize_module(model, mesh, {"scores": columns(output_layouts=Replicate())})
    for layer in model.layers:
        layer.attention.make_cache(args.batch, args.width // HEAD // ranks)
    return model


class Writer:
    """A model and its text; the prompt is read at once, then each token follows the last."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh | None) -> None:
        self.model: Callable[[Tensor, Tensor], Tensor] = make(args, mesh)
        if mesh is not None and args.compiler != "none":
            # dynamic=False: a graph for the prompt and one for a token.
            self.model = torch.compile(
                self.model, backend=args.compiler, fullgraph=True, dynamic=False
            )
        generator = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(VOCABULARY, (args.batch, args.prompt), generator=generator)
        self.text = self.prompt
        self.scores = torch.empty(0)  # [tokens, batch, vocabulary]: of each token that was written
        self.prefill: list[float] = []  # ms a prompt
        self.decode: list[float] = []  # ms a token

    @torch.no_grad()
    def write(self, count: int, text: Tensor | None = None) -> None:
        """Reads the prompt and writes `count` tokens: those of `text`, or the most likely ones."""
        begin = time.perf_counter()
        scores = [self.model(self.prompt, torch.arange(self.prompt.shape[1]))]
        self.prefill.append((time.perf_counter() - begin) * 1e3)
        texts, position = [self.prompt], torch.tensor([self.prompt.shape[1]])
        begin = time.perf_counter()
        for _ in range(count - 1):
            now = slice(int(position), int(position) + 1)
            texts.append(scores[-1].argmax(1, keepdim=True) if text is None else text[:, now])
            scores.append(self.model(texts[-1], position))
            position += 1
        self.decode.append((time.perf_counter() - begin) * 1e3 / (count - 1))
        self.text, self.scores = torch.cat(texts, 1), torch.stack(scores)

    def forget_times(self) -> None:
        self.prefill, self.decode = [], []


def table(writers: dict[str, Writer], args: argparse.Namespace) -> list[str]:
    """A line for each backend: medians with quartiles, and ratios of the same round."""
    first, nothing = writers[args.backends[0]], writers[NOTHING]
    lines = []
    for backend in args.backends:
        for name, tokens in (("prefill", args.prompt), ("decode", 1)):
            times, idle = getattr(writers[backend], name), getattr(nothing, name)
            rate = [args.batch * tokens / ms * 1e3 for ms in times]
            faster = [a / b for a, b in zip(getattr(first, name), times, strict=True)]
            sync = [1 - a / b for a, b in zip(idle, times, strict=True)]
            low, middle, high = statistics.quantiles(rate, n=4)
            lines.append(
                f"{backend:12} {name:8} {middle:9,.0f} {low:9,.0f} to {high:7,.0f}"
                f" {statistics.median(faster):7.2f} x {statistics.median(sync):7.0%}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", nargs="+", default=["gloo", "ringreduce"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD} x ranks")
    parser.add_argument("--dtype", default="float32", choices=TOLERANCE)
    parser.add_argument("--batch", type=int, default=1, help="texts at a time")
    parser.add_argument("--prompt", type=int, default=64, help="tokens that are read at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are written")
    parser.add_argument("--rounds", type=int, default=10, help="texts with each backend, by turns")
    parser.add_argument(
        "--compiler",
        default="inductor",
        choices=["inductor", "aot_eager", "none"],
        help="of torch.compile; with none the work of DTensor in Python hides the sync",
    )
    parser.add_argument("--out", type=Path, help="a file for all times")
    args = parser.parse_args()
    args.context = args.prompt + args.tokens

    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if len({*args.backends, NOTHING}) <= len(args.backends):
        parser.error(f"each of --backends once, and not {NOTHING}")
    if min(args.layers, args.prompt, args.batch) < 1:
        parser.error("--layers, --prompt and --batch are 1 or more")
    if args.width % (HEAD * world_size) or min(args.rounds, args.tokens) < 2:
        parser.error(f"{HEAD} x {world_size} ranks must divide --width; 2 rounds, 2 tokens or more")
    torch.set_num_threads(1)  # ranks share the cores of one host
    dist.init_process_group("gloo")
    writers = {}
    for backend in [*args.backends, NOTHING]:
        # dynamo takes meshes of the same ranks for the same group unless their names differ.
        group = dist.new_group(backend=backend)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(backend,))
        writers[backend] = Writer(args, mesh)
        writers[backend].write(args.tokens)  # compiles
        writers[backend].forget_times()
    # dynamo need not check before each token again what does not change.
    torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
    for number in range(args.rounds):
        for writer in list(writers.values())[:: -1 if number % 2 else 1]:
            dist.barrier()
            writer.write(args.tokens)

    whole, first = Writer(args, None), writers[args.backends[0]]
    ratio = f"x {args.backends[0]}"
    if rank == 0:
        print(f"{args.layers} layers of {args.width}, {args.dtype}, {world_size} ranks, by turns,")
        print(f"{args.rounds} texts of {args.prompt} + {args.tokens} tokens, batch {args.batch}")
        print(f"{'backend':12} {'':8} {'tokens/s':>9} {'quartiles':>20} {ratio:>9} {'in sync':>7}")
        print("\n".join(table(writers, args)))
        if args.out:
            ms = {name: {"prefill": w.prefill, "decode": w.decode} for name, w in writers.items()}
            args.out.write_text(json.dumps({"prompt": args.prompt, "ms": ms}) + "\n")
    for backend in args.backends:
        whole.write(args.tokens, writers[backend].text)
        error = (writers[backend].scores - whole.scores).abs().max().item()
        same = torch.equal(writers[backend].scores, first.scores)
        if rank == 0:
            bits = f"bits {'equal' if same else 'differ from'} {args.backends[0]}'s"
            print(f"{backend:12} scores differ from one rank's by {error:.1e}, {bits}")
        # Two ranks add in one order only; more add in the backend's own.
        if error > TOLERANCE[args.dtype] or not (same or world_size > 2):
            sys.exit(f"rank {rank}: {backend} computed other scores")
    if world_size > 1 and torch.equal(writers[NOTHING].scores, first.scores):
        sys.exit("the model ran over another group than its own")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
