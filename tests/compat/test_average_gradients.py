"""ringreduce.average_gradients: one call after backward, for loops without DDP."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
from pool import Pool, Rank, World, on_ranks
from torch import nn


class Odd(nn.Module):
    """Parameters of several dtypes and shapes; some never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7,), (300, 40), (1,), (0,), (129, 3, 2), ()]
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
        self.all = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=kind)) for kind in kinds for shape in shapes
        )
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))


def fill(model: Odd, rank: int) -> None:
    for i, p in enumerate(model.all):
        draw = torch.Generator().manual_seed(31 * i + rank)
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


def average(me: Rank) -> str:
    import ringreduce

    model, others = Odd(), [Odd() for _ in range(me.world_size)]
    fill(model, me.rank)
    places = [p.grad.data_ptr() for p in model.all if p.grad is not None]
    ringreduce.average_gradients(model)
    assert model.unused.grad is None and model.frozen.grad is None
    assert places == [p.grad.data_ptr() for p in model.all if p.grad is not None], "in place"
    for r, other in enumerate(others):
        fill(other, r)
    for i, p in enumerate(model.all):
        assert p.grad is not None and p.grad.dtype == p.dtype and p.grad.shape == p.shape
        grads = [other.all[i].grad for other in others]
        wanted = torch.stack([g.double() for g in grads if g is not None]).mean(0)
        tolerance = 3 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.grad.double(), wanted, rtol=tolerance, atol=tolerance)
    return oracle.digest(*[p.grad for p in model.all if p.grad is not None])


@pytest.mark.parametrize("on", ["ringreduce", "gloo"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_gradient_is_averaged(pool: Pool, size: int, on: str) -> None:
    digests = pool.run(average, World(size, on))
    assert len(set(digests)) == 1


@on_ranks(3)
def test_over_a_subgroup(me: Rank) -> None:
    import ringreduce

    group = dist.new_group([0, 2])
    model = nn.Linear(5, 5)
    for p in model.parameters():
        p.grad = torch.full_like(p, float(me.rank))
    if me.rank != 1:
        ringreduce.average_gradients(model, group=group)
    dist.barrier()
    grad = model.weight.grad
    assert grad is not None and grad.eq(1.0).all(), grad


@on_ranks(2)
def test_non_contiguous_gradients(me: Rank) -> None:
    import ringreduce

    p = nn.Parameter(torch.zeros(6, 4))
    model = nn.Module()
    model.p = p
    p.grad = (torch.arange(24.0).view(4, 6) * (me.rank + 1)).t()
    ringreduce.average_gradients(model)
    assert torch.equal(p.grad, (torch.arange(24.0).view(4, 6) * 1.5).t())
    ringreduce.average_gradients(nn.Module())  # nothing to do


class Unusual(nn.Module):
    """Gradients of other kinds than dense real numbers with a place each."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(10, 3, sparse=True)
        self.large = nn.Embedding(100_000, 8, sparse=True, dtype=torch.bfloat16)
        self.complex = nn.Parameter(torch.zeros(6, 4, dtype=torch.complex64))
        self.large_complex = nn.Parameter(torch.zeros(300_000, dtype=torch.complex128))
        self.complex_halves = nn.Parameter(torch.zeros(7, dtype=torch.complex32))
        self.conjugated = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.sparse_complex = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
        self.expanded = nn.Parameter(torch.zeros(5, 4))
        self.large_expanded = nn.Parameter(torch.zeros(1000, 1000))
        self.overlapping = nn.Parameter(torch.zeros(3, 4))
        self.column = nn.Parameter(torch.zeros(5))
        self.dense = nn.Parameter(torch.zeros(5))


def fill_unusual(model: Unusual, rank: int) -> torch.Tensor:
    x = float(rank + 1)
    for table, rows in ((model.sparse, [rank, 3, 3]), (model.large, [rank, 99_999])):
        (table(torch.tensor(rows)).sum() * x).backward()
    for p in (model.complex, model.large_complex, model.complex_halves):
        p.grad = torch.full_like(p, complex(x, -2 * x))
    model.conjugated.grad = torch.full((5,), complex(x, 2 * x)).conj()
    model.sparse_complex.grad = (torch.eye(4) * complex(x, x)).to_sparse()
    model.expanded.grad = torch.full((1,), x).expand(5, 4)
    model.large_expanded.grad = torch.full((1000, 1), x).expand(1000, 1000)
    model.overlapping.grad = (torch.arange(6.0) * x).unfold(0, 4, 1)
    whole = torch.full((5, 2), x)  # what is beside the gradient stays
    model.column.grad = whole[:, 0]
    model.dense.grad = torch.full((5,), x)
    return whole


def average_unusual(me: Rank) -> str:
    import ringreduce

    model, others = Unusual(), [Unusual() for _ in range(me.world_size)]
    whole = fill_unusual(model, me.rank)
    ringreduce.average_gradients(model)
    for r, other in enumerate(others):
        fill_unusual(other, r)
    averages = []
    for i, (name, p) in enumerate(model.named_parameters()):
        grads = [list(other.parameters())[i].grad for other in others]
        dense = [g.to_dense() if g.is_sparse else g for g in grads if g is not None]
        wide = torch.complex128 if p.is_complex() else torch.float64
        wanted = torch.stack([g.to(wide) for g in dense]).mean(0)
        assert p.grad is not None
        assert p.grad.is_sparse == ("sparse" in name or "large.weight" in name), name
        averages.append(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        torch.testing.assert_close(averages[-1].to(wide), wanted, msg=name, rtol=0.01, atol=0.01)
    assert whole[:, 1].eq(me.rank + 1).all() and torch.equal(whole[:, 0], model.column.grad)
    return oracle.digest(*[a.resolve_conj() for a in averages])


@pytest.mark.parametrize("on", ["ringreduce", "gloo"])
@pytest.mark.parametrize("size", [1, 3])
def test_sparse_complex_and_expanded_gradients(pool: Pool, size: int, on: str) -> None:
    assert len(set(pool.run(average_unusual, World(size, on)))) == 1


@pytest.mark.parametrize("what", ["one more", "none", "as large", "transposed", "sparse"])
@on_ranks(2, timeout=8.0)
def test_gradients_of_other_parameters(me: Rank, what: str) -> None:
    """Every rank is told, and no gradient has changed: never two different models."""
    import ringreduce

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = me.rank == 0
    if what == "one more":
        model[0].bias.grad = torch.ones(2)
        if first:
            model[0].weight.grad = torch.ones(2, 2)
    elif what == "none":
        if first:
            model[0].weight.grad = torch.ones(2, 2)
    elif what == "as large":
        model[0 if first else 1].weight.grad = torch.full((2, 2), 10.0 + me.rank)
    elif what == "sparse":
        model[0].weight.grad = torch.ones(2, 2) if first else torch.ones(2, 2).to_sparse()
    else:
        model = nn.Linear(2, 3, bias=False) if first else nn.Linear(3, 2, bias=False)
        model.weight.grad = torch.ones_like(model.weight)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(ringreduce.Mismatch) as caught:
        ringreduce.average_gradients(model)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(before, after, strict=True):
        assert a.is_sparse == b.is_sparse and torch.equal(a.to_dense(), b.to_dense())
    one = torch.ones(1)
    dist.all_reduce(one)  # nothing was sent, so the group goes on
    assert one.item() == 2.0
    assert "[1] have gradients of other parameters" in str(caught.value)
