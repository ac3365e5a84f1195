"""The models that benchmarks/ddp.py trains, in plain torch.nn, and a batch for each.

A ResNet-50 (25.6 million parameters, many of them in small tensors), a GPT-2 small (124 million, a
third of them in one), and the wide MLP of examples/train_mlp.py (17.1 million, little to compute
for each).  What they learn from is random: the same batch again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, relu, scaled_dot_product_attention

EXPANSION = 4


class Bottleneck(nn.Module):
    """Three convolutions, 1 x 1, 3 x 3 and 1 x 1, added to what came in."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = EXPANSION * width
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(before, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
                nn.Conv2d(width, after, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, after))
        self.shortcut = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            y = norm(convolution(relu(y) if number else y))
        return relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Images in (float [batch, 3, side, side]), scores of the classes out."""

    def __init__(self, blocks: list[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        layers: list[nn.Module] = []
        before = width
        for stage, number in enumerate(blocks):
            for block in range(number):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(before, width << stage, stride))
                before = EXPANSION * (width << stage)
        self.blocks = nn.Sequential(*layers)
        self.scores = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.scores(self.blocks(self.stem(images)).mean((2, 3)))


class Block(nn.Module):
    """Causal self-attention and a two-layer MLP, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        query, key, value = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(gelu(self.expand(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens in (int64 [batch, length]), scores of the next one out."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions.weight[: text.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


@dataclass(frozen=True)
class Workload:
    """A model and its batch.  `sizes` holds all numbers that can be set, of both forms alike."""

    make: Callable[[dict[str, Any]], nn.Module]
    batch: Callable[[dict[str, Any], torch.Generator], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    full: dict[str, Any]
    tiny: dict[str, Any]


def make_resnet(sizes: dict[str, Any]) -> nn.Module:
    return ResNet(sizes["blocks"], sizes["width"], sizes["classes"])


def images(sizes: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (sizes["batch"], 3, sizes["side"], sizes["side"])
    labels = torch.randint(sizes["classes"], (sizes["batch"],), generator=generator)
    return torch.randn(shape, generator=generator), labels


def make_gpt(sizes: dict[str, Any]) -> nn.Module:
    names = ("layers", "width", "heads", "vocabulary", "context")
    return GPT(*(sizes[name] for name in names))


def text(sizes: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (sizes["batch"], sizes["tokens"] + 1)
    tokens = torch.randint(sizes["vocabulary"], shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_mlp(sizes: dict[str, Any]) -> nn.Module:
    width = sizes["width"]
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def pixels(sizes: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(10, (sizes["batch"],), generator=generator)
    return torch.randn((sizes["batch"], 64), generator=generator), labels


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, of images and of text."""
    scores = model(inputs)
    return cross_entropy(scores.flatten(0, -2), targets.flatten())


WORKLOADS = {
    "resnet50": Workload(
        make_resnet,
        images,
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        {"blocks": [3, 4, 6, 3], "width": 64, "classes": 1000, "side": 224, "batch": 32},
        {"blocks": [1, 1], "width": 8, "classes": 10, "side": 32, "batch": 4},
    ),
    "gpt2": Workload(
        make_gpt,
        text,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "context": 1024,
         "tokens": 512, "batch": 4},
        {"layers": 2, "width": 32, "heads": 2, "vocabulary": 97, "context": 16, "tokens": 16,
         "batch": 2},
    ),
    "mlp": Workload(
        make_mlp,
        pixels,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        {"width": 4096, "batch": 16},
        {"width": 32, "batch": 4},
    ),
}  # fmt: skip
STUDIED = ("resnet50", "gpt2")  # unless told otherwise
