"""A ``LightningModule`` that trains on the devices of a compiled model.

``AutoparModule(model, devices=4, optimizer=...)`` is fitted by a ``lightning.Trainer`` with one
device of its own, ``Trainer(accelerator="cpu", devices=1)``: autopar splits the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import InputError, PackageError
from autopar.frontend.signature import Arguments
from autopar.integrations.hosted import Hosted, call_of
from autopar.integrations.throughput import Throughput
from autopar.runtime.compiled import Compiled
from autopar.runtime.runners.given_devices import Devices
from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise PackageError(
        f"autopar.integrations.lightning needs lightning ({error}): "
        "pip install 'autopar[lightning]'"
    ) from error


class AutoparModule(LightningModule):
    """Trains ``model`` on ``devices``; calling the module runs the compiled forward pass.

    * ``devices``, ``optimizer``, ``lr_scheduler`` and ``compile_options``: as in `autopar.compile`
      (``max_grad_norm=1.0``, ``num_microbatches=4``); the schedule steps once per batch. A subclass
      may define ``configure_optimizers`` instead, with one optimizer and at most one scheduler.

    A batch is the model's arguments: a mapping of keywords, a tuple or list, or one tensor. The
    first one compiles; until then, as in Lightning's sanity check, calls run the plain model.
    ``train_loss``, ``learning_rate`` and, with ``max_grad_norm``, ``grad_norm`` are logged. Define
    ``validation_step`` as ever, with calls of ``self(...)``. While training runs the weights are on
    the devices; ``state_dict()`` fetches them, as checkpoints do, and ``model`` has them when
    training has ended.

    Raises InputError where Lightning runs several processes or several optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Devices,
        *,
        optimizer: MakeOptimizer | None = None,
        lr_scheduler: MakeScheduler | None = None,
        **compile_options: Any,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.hosted = Hosted(model, devices, compile_options)
        self._make_optimizer = optimizer
        self._make_scheduler = lr_scheduler

    @property
    def compiled(self) -> Compiled | None:
        """The compiled model; None before the first batch."""
        return self.hosted.compiled

    def configure_optimizers(self) -> Any:
        """The optimizer and scheduler of the constructor, over the plain model."""
        if self._make_optimizer is None:
            raise InputError(
                "there is no optimizer: AutoparModule(model, devices, "
                "optimizer=functools.partial(torch.optim.AdamW, lr=3e-4)), or define "
                "configure_optimizers"
            )
        made = self._make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        return made if self._make_scheduler is None else ([made], [self._make_scheduler(made)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model forward, in train or eval mode, without gradients."""
        return self.hosted(Arguments(args, kwargs), training=self.training)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Train on a batch, and log its loss, the learning rate used and the gradients' norm."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        if isinstance(optimizer, list) or isinstance(scheduler, list):
            raise InputError(
                "configure_optimizers returned several optimizers or schedulers; a compiled model "
                "trains with one of each: give the optimizer several parameter groups"
            )
        plain = optimizer.optimizer
        rate = plain.param_groups[0]["lr"]
        loss = self.hosted.train_step(call_of(batch), plain, scheduler)
        optimizer.step()  # without gradients: Lightning counts its steps
        if scheduler is not None:
            scheduler.step()
        self.log("train_loss", loss, prog_bar=True)
        self.log("learning_rate", rate)
        if self.hosted.compiled is not None and self.hosted.compiled.grad_norm is not None:
            self.log("grad_norm", self.hosted.compiled.grad_norm)
        return loss

    def on_fit_start(self) -> None:
        """Begin with the optimizer that Lightning has just made."""
        if self.trainer.world_size > 1:
            raise InputError(
                f"Lightning runs {self.trainer.world_size} processes; leave the devices to "
                "autopar: Trainer(accelerator='cpu', devices=1)"
            )
        self.hosted.close()

    def on_train_end(self) -> None:
        """Have the trained weights in ``model``."""
        self.hosted.pull()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As ever, with the present weights."""
        self.hosted.pull()
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As ever, also onto the devices."""
        found = super().load_state_dict(state_dict, *args, **kwargs)
        self.hosted.push()
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the devices' optimizer state instead of Lightning's, which has none."""
        state = self.hosted.optimizer_state()
        if state is not None and "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [state]


class ThroughputCallback(Callback):
    """Logs MFU, tokens or samples a second and peak memory of an `AutoparModule`.

    See `autopar.integrations.throughput.Throughput`. Lightning passes on to its loggers what is
    logged in every ``log_every_n_steps``-th step, so ``every`` should be a multiple of that.
    """

    def __init__(self, every: int = 50) -> None:
        self._throughput = Throughput(every)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, value in self._throughput.after_step(pl_module.hosted).items():
            pl_module.log(name, torch.tensor(value))
