"""Trains under each framework as its users do, on gloo and on ringreduce: same weights, which time?

    make frameworks                                       # installs them all into .venv-frameworks
    python benchmarks/frameworks.py                       # those that are installed
    python benchmarks/frameworks.py --only lightning-ddp deepspeed-zero3

Three ways: "gloo" is the script as the framework's users write it.  "switch" is the same script
under RINGREDUCE_DEFAULT=cpu and RINGREDUCE_REPLACE=gloo.  "named" names ringreduce where the
framework has a place for it: its backend, or its hook in lightning-ddp-hook.  Each trains the same
model on the same data, all on CPUs, with so many ranks in a group that each sum has two addends:
their order does not matter, so the weights must be equal to the bit.  Prints a table; --out FILE
has all runs, as JSON.  The exit status is 1 if weights differ or gradients went another way than
they should have.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NAME = "ringreduce"
BATCH, IN, WIDTH, OUT = 16, 64, 512, 8
SWITCH = {"RINGREDUCE_DEFAULT": "cpu", "RINGREDUCE_REPLACE": "gloo"}
WAYS = ("gloo", "switch", "named")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(IN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, OUT)
    )


def batches(steps: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(BATCH, IN, generator=draw), torch.randn(BATCH, OUT, generator=draw))
        for _ in range(steps)
    ]


class Watch:
    """Times of steps, and what a run tells at its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self._begun)

    def tell(self, tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
        """The weights' digest, the group's backend, and the median of a step in ms."""
        digest = hashlib.sha256()
        for tensor in tensors:
            full = tensor.detach()
            if isinstance(full, torch.distributed.tensor.DTensor):
                full = full.full_tensor()
            digest.update(full.contiguous().view(torch.uint8).numpy().tobytes())
        world: Any = dist.group.WORLD if dist.is_initialized() else None
        made = world and world._get_backend(torch.device("cpu"))
        return {
            "weights": digest.hexdigest(),
            "backend": made.name() if made else "",
            "ms": statistics.median(self.seconds[len(self.seconds) // 4 :]) * 1e3,
        }


def fit(
    step: Callable[[torch.Tensor, torch.Tensor], None], steps: int, rank: int, watch: Watch
) -> None:
    for x, y in batches(steps, rank):
        watch.begin()
        step(x, y)
        watch.end()


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


# ---- What a user writes.  `backend` is None in a script that names none.


def torch_ddp(backend: str | None, steps: int) -> dict[str, Any]:
    dist.init_process_group(backend)
    model, watch = nn.parallel.DistributedDataParallel(make_model()), Watch()
    step = plain_step(model, torch.optim.AdamW(model.parameters()))
    fit(step, steps, dist.get_rank(), watch)
    return watch.tell(model.parameters())


def torch_fsdp2_tp(backend: str | None, steps: int) -> dict[str, Any]:
    """2 x 2 ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel as tp

    dist.init_process_group(backend)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, watch = make_model(), Watch()
    plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh["tp"], plan)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    step = plain_step(model, torch.optim.AdamW(model.parameters()))
    fit(step, steps, dist.get_rank() // 2, watch)
    return watch.tell(model.parameters())


def torch_post_local_sgd(backend: str | None, steps: int) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    dist.init_process_group(backend)
    model, watch = nn.parallel.DistributedDataParallel(make_model()), Watch()
    own, _ = dist.new_subgroups(group_size=1)  # as if each rank were a host
    state = local.PostLocalSGDState(process_group=None, subgroup=own, start_localSGD_iter=4)
    model.register_comm_hook(state, local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=4)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    fit(plain_step(model, optimizer), steps, dist.get_rank(), watch)
    return watch.tell(model.parameters())


def lightning(
    strategy: Any,
    steps: int,
    named: bool,
    shard: bool = False,
    callbacks: Iterable[Any] = (),
) -> dict[str, Any]:
    import lightning as L
    from torch.distributed.fsdp import fully_shard

    rank, watch = int(os.environ["RANK"]), Watch()

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.hook = ""
            self.scale: torch.Tensor | None = None

        def configure_model(self) -> None:
            if shard and not hasattr(self.net, "unshard"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def cached(self) -> torch.Tensor:
            """Made by whoever needs it first, in training or in a validation before it."""
            if self.scale is None:
                self.scale = torch.full((OUT,), 0.5)
            return self.scale

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]) * self.cached(), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            loss = nn.functional.mse_loss(self.net(batch[0]) * self.cached(), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.all_gather(loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            watch.begin()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            watch.end()

        def on_train_end(self) -> None:
            ddp = self.trainer.strategy.model
            if isinstance(ddp, nn.parallel.DistributedDataParallel):
                called = ddp._get_ddp_logging_data().get("comm_hook", "")
                self.hook = NAME if called == "ringreduce_all_reduce" else called

    def loader(first: int, count: int) -> Any:
        return torch.utils.data.DataLoader(batches(first + count, rank)[first:], batch_size=None)

    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", devices=dist_size(), strategy=strategy, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=list(callbacks), default_root_dir=folder,
            # Else what a validation made cannot be trained with, but on what is called gloo.
            inference_mode=not named,
        )  # fmt: skip
        net = Net()
        trainer.validate(net, loader(steps, 2), verbose=False)
        trainer.fit(net, loader(0, steps), loader(steps, 2))
        told = watch.tell(net.parameters())
        if net.hook:
            told["backend"] = net.hook  # the group is gloo's, but its gradients are not
    return told


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def lightning_ddp(backend: str | None, steps: int) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend) if backend else "ddp"
    return lightning(strategy, steps, named=bool(backend))


def lightning_ddp_hook(backend: str | None, steps: int) -> dict[str, Any]:
    callbacks = []
    if backend:
        from ringreduce.integrations.lightning import CommHook

        callbacks = [CommHook()]
    return lightning("ddp", steps, named=False, callbacks=callbacks)


def lightning_model_parallel(backend: str | None, steps: int) -> dict[str, Any]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(process_group_backend=backend)
    return lightning(strategy, steps, named=bool(backend), shard=True)


def ignite(backend: str | None, steps: int) -> dict[str, Any]:
    """Ignite makes no DDP for a backend that its list lacks."""
    import ignite.distributed as idist

    idist.initialize("gloo")
    watch = Watch()
    model: Any = idist.auto_model(make_model())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters()))
    fit(plain_step(model, optimizer), steps, idist.get_rank(), watch)
    assert idist.all_reduce(idist.get_rank()) == 1 and idist.all_gather("x") == ["x", "x"]
    return watch.tell(model.parameters())


def accelerate(backend: str | None, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator, InitProcessGroupKwargs

    handlers = []
    if backend:
        from ringreduce.integrations import accelerate as integration

        integration.enable()
        handlers = [InitProcessGroupKwargs(backend=backend)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model, watch = make_model(), Watch()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()

    fit(step, steps, accelerator.process_index, watch)
    return watch.tell(model.parameters())


def transformers(backend: str | None, steps: int) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if backend:
        from ringreduce.integrations import accelerate as integration

        integration.enable()
    watch = Watch()

    class Timing(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.end()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.net(x)
            return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

    rows = [
        {"x": x, "labels": y}
        for xs, ys in batches(steps * dist_size(), 0)
        for x, y in zip(xs, ys, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=BATCH, max_steps=steps,
            report_to="none", save_strategy="no", disable_tqdm=True, ddp_backend=backend,
        )  # fmt: skip
        trainer = Trainer(Net(), settings, train_dataset=rows, callbacks=[Timing()])
        trainer.train()
    return watch.tell(trainer.model.parameters())


def ray_train(backend: str | None, steps: int) -> dict[str, Any]:
    """Starts its own workers: this process is not a rank."""
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    def train_loop(given: dict[str, str]) -> None:
        model, watch = prepare_model(make_model()), Watch()
        step = plain_step(model, torch.optim.AdamW(model.parameters()))
        fit(step, steps, dist.get_rank(), watch)
        told = watch.tell(model.parameters())
        if dist.get_rank() == 0:
            Path(given["folder"], "told").write_text(json.dumps(told))

    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend=backend) if backend else None,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        trainer.fit()
        ray.shutdown()
        return dict(json.loads(Path(folder, "told").read_text()))


def deepspeed(stage: int, backend: str | None, steps: int) -> dict[str, Any]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    if backend:
        ds.init_distributed(dist_backend=backend)
    model, watch = make_model(), Watch()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()

    fit(step, steps, dist.get_rank(), watch)
    with ds.zero.GatheredParameters(list(engine.parameters()), enabled=stage == 3):
        return watch.tell(engine.parameters())


def torchft(
    backend: str | None, steps: int, wrap: Callable[..., contextlib.AbstractContextManager[Any]]
) -> dict[str, Any]:
    """A replica group a rank; torchft makes its process groups itself."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    rank, watch = int(os.environ["RANK"]), Watch()
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=2)
        store.set("lighthouse", lighthouse.address())
    timeout = datetime.timedelta(seconds=60)
    if backend:
        from ringreduce.torchft import ProcessGroupRingReduce

        group: Any = ProcessGroupRingReduce(timeout)
    else:
        group = ProcessGroupGloo(timeout)
    model = make_model()
    own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=group, min_replica_size=2, use_async_quorum=False, timeout=timeout, rank=0, world_size=1,
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        replica_id=f"replica{rank}", store_addr="localhost", store_port=own.port,
        lighthouse_addr=store.get("lighthouse").decode(), init_sync=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    with wrap(manager, model, optimizer):
        fit(plain_step(model, optimizer), steps, rank, watch)
    told = watch.tell(model.parameters())
    told["backend"] = group.getBackendName().removeprefix("torchft-")
    store.set(f"done{rank}", "")
    store.wait(["done0", "done1"])
    manager.shutdown(wait=False)
    return told


def torchft_local_sgd(backend: str | None, steps: int) -> dict[str, Any]:
    from torchft.local_sgd import LocalSGD

    return torchft(backend, steps, lambda m, net, opt: LocalSGD(m, net, opt, sync_every=4))


def torchft_diloco(backend: str | None, steps: int) -> dict[str, Any]:
    from torchft.local_sgd import DiLoCo

    def wrap(manager: Any, net: nn.Module, opt: torch.optim.Optimizer) -> Any:
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return DiLoCo(manager, [net], opt, outer, sync_every=4, pin_memory=False)

    return torchft(backend, steps, wrap)


@dataclasses.dataclass(frozen=True)
class Framework:
    package: str
    train: Callable[[str | None, int], dict[str, Any]]
    ranks: int = 2
    launched: bool = True  # by torchrun
    ways: tuple[str, ...] = WAYS


FRAMEWORKS = {
    "torch-ddp": Framework("torch", torch_ddp),
    "torch-fsdp2-tp": Framework("torch", torch_fsdp2_tp, ranks=4),
    "torch-post-local-sgd": Framework("torch", torch_post_local_sgd),
    "lightning-ddp": Framework("lightning", lightning_ddp),
    "lightning-ddp-hook": Framework("lightning", lightning_ddp_hook, ways=("gloo", "named")),
    "lightning-model-parallel": Framework("lightning", lightning_model_parallel),
    "ignite": Framework("pytorch-ignite", ignite, ways=("gloo", "switch")),
    "accelerate": Framework("accelerate", accelerate),
    "transformers-trainer": Framework("transformers", transformers),
    "ray-train": Framework("ray", ray_train, launched=False),
    "deepspeed-zero1": Framework("deepspeed", lambda b, s: deepspeed(1, b, s)),
    "deepspeed-zero2": Framework("deepspeed", lambda b, s: deepspeed(2, b, s)),
    "deepspeed-zero3": Framework("deepspeed", lambda b, s: deepspeed(3, b, s)),
    "torchft-local-sgd": Framework("torchft", torchft_local_sgd, ways=("gloo", "named")),
    "torchft-diloco": Framework("torchft", torchft_diloco, ways=("gloo", "named")),
}


# ---- The runs


def be_a_rank(name: str, way: str, folder: str, steps: int) -> None:
    """Writes what it tells, or its error, into a file of the folder."""
    torch.set_num_threads(1)
    try:
        told = FRAMEWORKS[name].train(NAME if way == "named" else None, steps)
    except Exception:
        told = {"error": traceback.format_exc()}
    Path(folder, os.environ.get("RANK", "0")).write_text(json.dumps(told))
    if "error" in told:
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(name: str, way: str, steps: int) -> dict[str, Any]:
    """What rank 0 told, or {"error": why}."""
    framework = FRAMEWORKS[name]
    command = [sys.executable]
    if framework.launched:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={framework.ranks}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (SWITCH if way == "switch" else {})
    with tempfile.TemporaryDirectory() as folder:
        command += [str(Path(__file__).resolve()), "--rank-of", name, way, folder]
        command += ["--steps", str(steps)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return {"error": "more than 600 s"}
        told = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    errors = [one for one in told if "error" in one]
    if errors or not told or done.returncode != 0:
        return (errors or [{"error": "\n".join((done.stdout + done.stderr).splitlines()[-40:])}])[0]
    return dict(told[0])


def compare(
    name: str, steps: int, rounds: int, runs: dict[str, list[dict[str, Any]]]
) -> tuple[str, bool]:
    """A row of the table, and whether all was right; adds what ranks told to `runs`, by way."""
    framework, right = FRAMEWORKS[name], True
    version = importlib.metadata.version(framework.package)
    runs |= {way: [] for way in framework.ways}
    for _ in range(rounds):
        for way in framework.ways:
            runs[way].append(run(name, way, steps))
    gloo = runs["gloo"][0]
    cells = []
    for way in WAYS:
        if way not in runs:
            cells.append("-")
            continue
        errors = [told["error"] for told in runs[way] if "error" in told]
        if errors:
            print(f"{name}, {way}:\n{errors[0]}\n", file=sys.stderr)
            cells.append("fails")
            right = False
            continue
        ms = statistics.median(told["ms"] for told in runs[way])
        by_us = {told["backend"] == NAME for told in runs[way]} == {way != "gloo"}
        equal = {told["weights"] for told in runs[way]} == {gloo.get("weights")}
        right = right and by_us and equal
        said = [] if way == "gloo" else ["same bits" if equal else "other bits"]
        said += [] if by_us else [f"made by {runs[way][0]['backend']}"]
        cells.append(", ".join([f"{ms:.2f} ms", *said]))
    row = [f"{name} ({framework.package} {version})", str(framework.ranks), *cells]
    return f"| {' | '.join(row)} |", right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way, by turns")
    parser.add_argument("--out", type=Path, help="a file for all runs")
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        be_a_rank(*given.rank_of, given.steps)
        return 0
    print("| framework | ranks | gloo | switch | named |\n|---|---|---|---|---|", flush=True)
    all_right = True
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in given.only:
        try:
            importlib.metadata.version(FRAMEWORKS[name].package)
        except importlib.metadata.PackageNotFoundError:
            print(f"| {name} | | not installed | | |", flush=True)
            continue
        found[name] = {}
        row, right = compare(name, given.steps, given.rounds, found[name])
        all_right = all_right and right
        print(row, flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
