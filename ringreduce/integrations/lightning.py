"""Callbacks for Lightning: the hook for its DDP, exact or compressed; outer steps between sites.

    from ringreduce.integrations.lightning import CommHook, DiLoCo
    Trainer(strategy="ddp", callbacks=[CommHook(codec="int8")])
    Trainer(strategy="ddp", callbacks=[DiLoCo(sync_every=30)])

Lightning's own argument for it, `DDPStrategy(ddp_comm_hook=...)`, has no effect on CPUs, and takes
a state before the model exists.  Where both packages are installed, lightning and
pytorch_lightning, import the one that you use before this module.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.compression import CompressionState
from ringreduce.core.backend import ringreduce_group
from ringreduce.hooks import register_comm_hook

__all__ = ["CommHook", "DiLoCo"]


def _find() -> Any:
    """Lightning, under the name that the program imports it by."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError(
        "Lightning is not installed; install it with `pip install 'ringreduce[lightning]'`"
    )


if TYPE_CHECKING:
    Callback = object
else:
    Callback = _find().Callback


class CommHook(Callback):
    """Registers `ringreduce.register_comm_hook` on the model's DDP when its training starts.

    Args:
        codec, settings: as `ringreduce.register_comm_hook` has them; the same on all ranks.

    Attributes:
        state: the CompressionState of the training, None before and without a codec.  Each rank has
            its own residuals: Lightning's checkpoints, which rank 0 writes, do not hold them.
    """

    def __init__(self, codec: str | None = None, **settings: Any) -> None:
        self.codec, self.settings = codec, settings
        self.state: CompressionState | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning calls this before the first batch.

        Raises:
            TypeError: the strategy trains without DistributedDataParallel, on several ranks.
            ValueError, TypeError, Mismatch: as `ringreduce.register_comm_hook`.
        """
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            register: Callable[..., CompressionState | None] = register_comm_hook
            self.state = register(model, self.codec, **self.settings)
        elif trainer.world_size > 1:
            raise TypeError(
                "CommHook is for strategies with DistributedDataParallel, such as 'ddp', not for "
                f"{type(trainer.strategy).__name__}"
            )


def _strategy_error(trainer: Any) -> str:
    return (
        "DiLoCo is for strategies with DistributedDataParallel, such as 'ddp', not for "
        f"{type(trainer.strategy).__name__}"
    )


def _ranks_of_this_host() -> dist.ProcessGroup:
    """A group of them.  Collective."""
    hosts = ringreduce.topology.of(ringreduce_group(None)).hosts
    made = {ranks: dist.new_group(list(ranks)) for ranks in hosts}
    mine: dist.ProcessGroup = next(made[ranks] for ranks in hosts if dist.get_rank() in ranks)
    return mine


class DiLoCo(Callback):
    """Trains by outer steps: DDP averages within a host, and `ringreduce.DiLoCo` between hosts.

    Args:
        settings: as `ringreduce.DiLoCo` has them, but for `sync_seconds`: Lightning needs as many
            batches on all ranks; the same on all ranks.
        site: a function that makes the process group whose ranks train as one; all ranks call it.
            None: the ranks of a host.

    Attributes:
        diloco: the `ringreduce.DiLoCo` of the training, None before.

    Lightning's checkpoints, which rank 0 writes, hold the global parameters and the outer optimizer
    beside rank 0's own parameters.  A training that goes on from one begins at the global ones, on
    all ranks, without what ranks have learned since the last round.  At the training's end all
    ranks have the same parameters.

    Lightning itself sends a flag between all ranks in each batch, so each step takes a round trip
    of the line.

    Raises:
        ValueError: `sync_seconds` was given.
    """

    def __init__(
        self, site: Callable[[], dist.ProcessGroup] | None = None, **settings: Any
    ) -> None:
        if settings.get("sync_seconds") is not None:
            raise ValueError(
                "under Lightning rounds go by steps (sync_every), not by time (sync_seconds): it "
                "needs as many batches on all ranks"
            )
        self.site, self.settings = site, settings
        self.diloco: ringreduce.DiLoCo | None = None
        self._loaded: dict[str, Any] = {}
        self._rounds = contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning calls this once ranks are connected, and before it makes its DDP.

        Raises:
            ValueError: the site has all ranks.
            TypeError: the strategy trains without DistributedDataParallel, on several ranks.
        """
        self._loaded = {}  # of an earlier training; that of this one is restored after this
        if stage != "fit" or trainer.world_size == 1:
            return
        kwargs = getattr(trainer.strategy, "_ddp_kwargs", None)
        if kwargs is None:
            raise TypeError(_strategy_error(trainer))
        site = self.site() if self.site else _ranks_of_this_host()
        if site.size() == trainer.world_size:
            raise ValueError(
                "DiLoCo is for several sites, and all ranks are in one: ranks of one host, unless "
                "site= makes other groups"
            )
        kwargs["process_group"] = site

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning calls this before the first batch.

        Raises:
            TypeError: the strategy trains without DistributedDataParallel, on several ranks.
            ValueError: there is not one optimizer; or a GradScaler, which skips steps of a rank.
            ValueError, TypeError, Mismatch: as `ringreduce.DiLoCo`.
        """
        if trainer.world_size == 1:
            return
        if not isinstance(trainer.strategy.model, DistributedDataParallel):
            raise TypeError(_strategy_error(trainer))
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                'precision="16-mixed" skips steps of one site alone, whose rounds would then be '
                'other ones than those of the other sites; take "bf16-mixed"'
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(f"DiLoCo is for one optimizer, not for {len(trainer.optimizers)}")
        self.diloco = ringreduce.DiLoCo(
            trainer.strategy.model, trainer.optimizers[0], **self.settings
        )
        if self._loaded:
            self.diloco.load_state_dict({**self._loaded, "rank": None})
        self._rounds.enter_context(self.diloco)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning calls this after the last batch: a last round of all fragments."""
        self._rounds.close()
        if self.diloco is not None:
            self.diloco.sync()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning calls this when training fails: rounds under way are dropped."""
        self._rounds.__exit__(type(exception), exception, None)

    def state_dict(self) -> dict[str, Any]:
        """Lightning puts this into checkpoints."""
        return {} if self.diloco is None else self.diloco.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls this with what a checkpoint has."""
        self._loaded = state_dict
