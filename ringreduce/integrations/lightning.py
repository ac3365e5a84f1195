"""Gives Lightning's DDP the hook, exact or compressed, beside any backend.

    from ringreduce.integrations.lightning import CommHook
    Trainer(strategy="ddp", callbacks=[CommHook(codec="int8")])

Lightning's own argument for it, `DDPStrategy(ddp_comm_hook=...)`, has no effect on CPUs, and takes
a state before the model exists.  Where both packages are installed, lightning and
pytorch_lightning, import the one that you use before this module.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from ringreduce.compression import CompressionState
from ringreduce.hooks import register_comm_hook

__all__ = ["CommHook"]


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
