"""benchmarks/ddp.py: its models, who takes part, that wrong gradients are seen; a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringreduce.bench import oracle
from ringreduce.bench.placing import Placing, nccl_environment
from ringreduce.bench.settings import BenchError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _ddp_models  # noqa: E402
import _ddp_rank  # noqa: E402
import _ddp_report  # noqa: E402
import ddp  # noqa: E402


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("gpt2", 124_439_808)])
def test_models_are_as_large_as_those_that_they_are_named_after(name, parameters):
    workload = _ddp_models.WORKLOADS[name]
    with torch.device("meta"):
        model = workload.make(workload.full)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", list(_ddp_models.WORKLOADS))
def test_tiny_models_learn(name):
    workload = _ddp_models.WORKLOADS[name]
    torch.manual_seed(1)
    model = workload.make(workload.tiny)
    batch = workload.batch(workload.tiny, torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = _ddp_models.loss_of(model, *batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- Who takes part -------------------------------------------------------------------------------


def ways(monkeypatch, world, devices, version, device="cuda"):
    monkeypatch.setattr(nccl_environment, "__defaults__", (lambda: version,))
    return {way.key: way for way in ddp.ways(Placing(device, world, devices))}


def test_on_a_cpu_stock_is_gloo():
    found = {way.key: way for way in ddp.ways(Placing("cpu", 2))}
    assert list(found) == ["bare", "parallel", "stock", "ours", "hook"]
    assert (found["stock"].backend, found["hook"].backend) == ("gloo", "gloo")
    assert "it would have none" in found["parallel"].missing
    assert ddp.why_not_nccl(Placing("cpu", 2)) == ""


def test_on_gpus_of_their_own_stock_is_nccl(monkeypatch):
    found = ways(monkeypatch, 8, 8, (2, 28, 9))
    assert not [way.key for way in found.values() if way.missing]
    assert (found["stock"].backend, found["hook"].kind) == ("nccl", "hook")
    assert found["hook"].title == "DDP, nccl + ringreduce hook"
    assert {way.key for way in found.values() if way.optional} == {"parallel", "stock"}


def test_on_one_gpu_stock_is_nccl_only_if_that_can_share(monkeypatch):
    found = ways(monkeypatch, 2, 1, (2, 30, 3))
    told = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert found["stock"].environment == found["hook"].environment == told
    assert "it would have 1" in found["parallel"].missing
    found = ways(monkeypatch, 2, 1, (2, 28, 9))
    assert (found["stock"].backend, found["hook"].backend) == ("gloo", "gloo")
    assert not found["stock"].missing
    assert "2.28.9 refuses" in ddp.why_not_nccl(Placing("cuda", 2, 1))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "vgg"], "'vgg' is none of"),
        (["--set", "gpt2.depth=3"], "there is no gpt2.depth"),
        (["--set", "gpt2.layers=x"], "is not MODEL.NAME=NUMBER"),
        (["--out", "no/such/place"], "there is no folder no/such"),
        (["--nproc", "0"], "numbers above 0"),
    ],
)
def test_refuses(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        ddp.main(arguments)
    assert complaint in capsys.readouterr().err


def test_sizes_can_be_set():
    options = ddp.parse(["--set", "gpt2.layers=3", "--batch", "7"])
    assert ddp.sizes_of(options, "gpt2")["layers"] == 3
    assert ddp.sizes_of(options, "resnet50")["batch"] == 7
    assert ddp.sizes_of(ddp.parse(["--tiny"]), "gpt2")["width"] == 32


def test_the_wide_mlp_is_that_of_the_examples_and_trained_only_where_asked():
    workload = _ddp_models.WORKLOADS["mlp"]
    with torch.device("meta"):
        model = workload.make(workload.full)
    assert sum(parameter.numel() for parameter in model.parameters()) == 17_088_522
    assert ddp.parse([]).models == ["resnet50", "gpt2"]
    assert ddp.parse(["--models", "mlp"]).models == ["mlp"]


def test_cuda_without_cuda_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert ddp.main(["--device", "cuda"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ddp.py: --device cuda: this torch")


# --- Right and wrong ------------------------------------------------------------------------------


def test_a_projection_is_linear_and_sees_every_element():
    signs = (2.0 * torch.randint(0, 2, (oracle.PERIOD,)) - 1).double()
    a, b = torch.randn(3, oracle.PERIOD // 2), torch.randn(3, oracle.PERIOD // 2)
    mean = (a + b) / 2
    (of_a, _), (of_b, _), (of_mean, norm) = (_ddp_rank.projection(t, signs) for t in (a, b, mean))
    assert of_mean == pytest.approx((of_a + of_b) / 2, abs=1e-6 * norm)
    assert norm == pytest.approx(mean.double().norm().item())
    for place in (0, oracle.PERIOD, mean.numel() - 1):
        other = mean.clone().reshape(-1)
        other[place] += 1
        assert abs(_ddp_rank.projection(other, signs)[0] - of_mean) == pytest.approx(1, abs=1e-3)


def answers(synced, digests=("a", "a")):
    own = [{"local": [1.0, -4.0], "norms": [2.0, 5.0]}, {"local": [3.0, -2.0], "norms": [2.0, 5.0]}]
    return [dict(o, synced=synced[r], digest=digests[r]) for r, o in enumerate(own)]


@pytest.mark.parametrize(
    ("synced", "wrong"),
    [
        ([[2.0, -3.0], [2.0, -3.0]], 0),
        ([[2.0005, -3.0], [2.0, -3.001]], 0),  # roundings
        ([[4.0, -6.0], [4.0, -6.0]], 4),  # a sum
        ([[1.0, -4.0], [3.0, -2.0]], 4),  # no sync
        ([[2.0, -3.0], [2.0, float("nan")]], 1),
    ],
)
def test_gradients_are_held_against_the_mean_of_all_ranks(synced, wrong):
    found = answers(synced)
    assert ddp.wrong_gradients(found, found, ddp.TOLERANCE["float32"]) == wrong


class Ranks:
    """The ranks of a way, by what they answer; a way named in `failing` fails at that question."""

    def __init__(self, contender, failing):
        self.contender, self.failing = contender, failing

    def ask(self, do, **arguments):
        if self.failing.get(self.contender.key) == do:
            raise BenchError(f"rank 1 failed:\nTraceback\nno {do} today")
        if do == "round":
            return [{"step": [1.0, 2.0], "no_sync": [1.0, 1.0]}, {"step": [3.0, 1.0],
                     "no_sync": [0.5, 0.5]}]  # fmt: skip
        if do == "memory":
            return [
                {"allocated": 5, "staging": 1, "gpu": 7},
                {"allocated": 4, "staging": 2, "gpu": 7},
            ]
        digests = ("a", "b") if self.contender.key == "hook" else ("a", "a")
        return answers([[2.0, -3.0], [2.0, -3.0]], digests) if do == "check" else [
            {"parameters": 9}
        ] * 2  # fmt: skip


def race(monkeypatch, failing):
    contenders = [way for way in ways(monkeypatch, 2, 2, (2, 30, 3)).values() if not way.missing]
    sets = {way.key: Ranks(way, failing) for way in contenders}
    controller = SimpleNamespace(sets=sets, skip=lambda key, reason: sets.pop(key))
    one = ddp.Race(controller, ddp.parse(["--tiny", "--rounds", "2"]), "gpt2")
    return one, lambda: one.run()


def test_a_step_is_that_of_the_slowest_rank(monkeypatch):
    _, run = race(monkeypatch, {})
    result = run()
    stock = result.ways["stock"]
    assert stock.step == [3.0, 2.0, 3.0, 2.0]  # the first of three rounds is not timed
    assert stock.exposed == pytest.approx(1.5)
    assert (stock.allocated_bytes, stock.staging_bytes, stock.gpu_bytes) == (5, 2, 7)
    assert result.over_bare("stock") == pytest.approx(0) and result.over_bare("bare") is None
    assert stock.same_bits and not result.ways["hook"].same_bits


@pytest.mark.parametrize("question", ["prepare", "check", "round", "memory"])
def test_stock_that_fails_is_left_out_and_ours_is_not(monkeypatch, question):
    one, run = race(monkeypatch, {"stock": question})
    assert "stock" not in run().ways
    assert one.skipped == {"stock": f"it failed: no {question} today"}
    with pytest.raises(BenchError, match=f"no {question} today"):
        race(monkeypatch, {"hook": question})[1]()


def test_the_report_says_that_ranks_share_and_what_is_wrong(monkeypatch, tmp_path):
    report = _ddp_report.Run(
        created="2030-01-01",
        machine={"cpu": "a CPU", "cores": 2, "torch": "2.11", "gpus": ["NVIDIA X"] * 2,
                 "cuda": "13.0", "nccl": ""},
        settings={"device": "cuda", "world": 2, "dtype": "float32", "rounds": 2, "steps": 2,
                  "sharing": "ranks sharing one GPU"},
        titles={key: way.title for key, way in ways(monkeypatch, 2, 1, (2, 30, 3)).items()},
        models=[race(monkeypatch, {})[1]()],
    )  # fmt: skip
    text = "\n".join([*_ddp_report.preamble(report), *_ddp_report.table(report, report.models[0])])
    assert "RANKS SHARING ONE GPU" in text and "\nranks sharing one GPU\n" in text
    assert report.faults() == ["gpt2, DDP, nccl + ringreduce hook: ranks have different bits"]
    assert not report.ours_is_right
    report.write(tmp_path / "ddp.json")
    way = json.loads((tmp_path / "ddp.json").read_text())["models"][0]["ways"]["ours"]
    assert way["samples_per_s"] == pytest.approx(2 * 2 / 2.5)
    assert (way["exposed_s"], way["over_bare_s"]) == (pytest.approx(1.5), pytest.approx(0))
    pytest.importorskip("matplotlib")
    assert _ddp_report.plot(report, tmp_path / "ddp.svg")
    assert "ranks sharing one GPU" in (tmp_path / "ddp.svg").read_text()


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "ddp.py"), "--tiny", "--rounds", "1", "--steps", "2",
         "--warmup", "1", "--out", str(tmp_path / "ddp")],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "ddp.json").read_text())
    assert [model["name"] for model in document["models"]] == ["resnet50", "gpt2"]
    for model in document["models"]:
        assert list(model["ways"]) == ["bare", "stock", "ours", "hook"]
        for key, way in model["ways"].items():
            assert len(way["step"]) == 2 and (way["wrong"], way["same_bits"]) == (0, True)
            assert len(way["no_sync"]) == (0 if key == "bare" else 2)
            assert (way["staging_bytes"] > 0) == (key in ("ours", "hook"))
    assert list(document["skipped"]) == ["parallel"]
