"""A plain model in another library's loop, trained as a compiled one.

In: the model, and the optimizer and scheduler that the loop made over it. Out: training steps and
forward passes of a `Compiled`; and the loop's own objects, brought up to date where it reads them
(to save them, and when training ends). The loop goes on to step its optimizer, which finds no
gradients and does nothing, and its scheduler, so that it logs the learning rates that are used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import compile as compile_model
from autopar.base.errors import InputError, OptimizerError
from autopar.base.torch_private import pytree
from autopar.frontend.signature import Arguments
from autopar.integrations.optimizers import same_optimizer, same_scheduler
from autopar.runtime.compiled import Compiled
from autopar.runtime.runners.given_devices import Devices
from autopar.runtime.runners.spmd import is_spmd

_BY_THE_LOOP = "optimizer", "lr_scheduler", "example_inputs", "nonfinite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of a training: its steps, and their samples, tokens and seconds.

    The first step, which compiles, is among the steps alone.
    """

    num_steps: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    time_s: float = 0.0

    def after(self, call: Arguments, time_s: float) -> Totals:
        """The totals with one more step."""
        if self.num_steps == 0:
            return replace(self, num_steps=1)
        num_samples, num_tokens = sizes(call)
        return Totals(
            num_steps=self.num_steps + 1,
            num_samples=self.num_samples + num_samples,
            num_tokens=self.num_tokens + num_tokens,
            time_s=self.time_s + time_s,
        )


class Hosted:
    """A model that the first training step compiles for ``devices``.

    ``options`` are keywords of `autopar.compile`; raises InputError for those that the loop sets.
    """

    def __init__(self, model: nn.Module, devices: Devices, options: Mapping[str, Any]) -> None:
        check_options(options)
        self.model = model
        self.compiled: Compiled | None = None
        self.totals = Totals()
        self._devices = devices
        self._options = options
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_ahead = False

    def train_step(
        self, call: Arguments, optimizer: torch.optim.Optimizer, scheduler: Any
    ) -> Tensor:
        """One training step on a batch; the loss, a scalar without gradient.

        The first one compiles for batches like it, with the optimizer and the scheduler (None for
        a constant rate) as they are at that moment, including state that was loaded.
        """
        if self.compiled is None:
            self.compiled = self._compile(call, optimizer, scheduler)
            self.totals = Totals()
        started_s = time.perf_counter()
        loss = self.compiled.train_step(*call.args, **call.kwargs)
        self.totals = self.totals.after(call, time.perf_counter() - started_s)
        self._is_ahead = True
        return loss

    def __call__(self, call: Arguments, *, training: bool) -> Any:
        """The output, without gradients; of the plain model until there is a compiled one."""
        if self.compiled is None:
            return self.model(*call.args, **call.kwargs)
        return self.compiled.train(training)(*call.args, **call.kwargs)

    def _compile(
        self, call: Arguments, optimizer: torch.optim.Optimizer, scheduler: Any
    ) -> Compiled:
        if is_spmd():
            raise InputError(
                "this process was started by torchrun, and its loop would split the batches among "
                "processes; start one process, python script.py, which starts a worker per device"
            )
        compiled = compile_model(
            self.model, self._devices, call, optimizer=same_optimizer(optimizer, self.model),
            lr_scheduler=None if scheduler is None else same_scheduler(scheduler), **self._options,
        )  # fmt: skip
        self._optimizer = optimizer
        try:
            self._check_names(compiled)
            if optimizer.state:  # loaded from a checkpoint
                compiled.load_optimizer_state_dict(self._named_state(optimizer))
                optimizer.state.clear()
        except BaseException:
            compiled.close()
            raise
        return compiled

    def _check_names(self, compiled: Compiled) -> None:
        """Raise OptimizerError unless the optimizer got the parameters in the model's order."""
        own = [name for name, p in self.model.named_parameters() if p.requires_grad]
        found = [p.name for p in compiled.program.parameters if p.trainable]
        if own != found:
            wrong = next(((a, b) for a, b in zip(own, found) if a != b), (len(own), len(found)))
            raise OptimizerError(
                f"the captured model has other trainable parameters than the plain one, or in "
                f"another order: {wrong[1]!r} instead of {wrong[0]!r}, so parameter groups would "
                "be mixed up. Give the model each parameter under one name"
            )

    def _named_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state as `Compiled.load_optimizer_state_dict` takes it."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            "state": {names[id(p)]: dict(held) for p, held in optimizer.state.items()},
            "param_groups": [
                {**group, "params": [names[id(p)] for p in group["params"]]}
                for group in optimizer.param_groups
            ],
        }

    def optimizer_state(self) -> dict[str, Any] | None:
        """The devices' optimizer state, as ``state_dict()`` of the loop's own optimizer would be;
        None until there is a compiled model."""
        if self.compiled is None:
            return None
        named = self.compiled.optimizer_state_dict()
        names = [name for group in named["param_groups"] for name in group["params"]]
        places = {name: place for place, name in enumerate(names)}
        return {
            "state": {places[name]: held for name, held in named["state"].items()},
            "param_groups": [
                {**group, "params": [places[name] for name in group["params"]]}
                for group in named["param_groups"]
            ],
        }

    def pull(self) -> None:
        """Copy the present weights and buffers into the plain model."""
        if self.compiled is not None and self._is_ahead:
            self.compiled.copy_to(self.model)
            self._is_ahead = False

    def push(self) -> None:
        """Give the devices the weights and buffers that the loop loaded into the plain model."""
        if self.compiled is not None:
            self.compiled.load_state_dict(self.model.state_dict())
            self._is_ahead = False

    def close(self) -> None:
        """End the workers; the plain model and the optimizer have what was trained."""
        state = self.optimizer_state()
        if self.compiled is None or self._optimizer is None or state is None:
            return
        self.pull()
        self._optimizer.load_state_dict(state)
        self.compiled.close()
        self.compiled = self._optimizer = None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InputError for keywords of `autopar.compile` that the loop itself decides."""
    if given := [f"{name}={options[name]!r}" for name in _BY_THE_LOOP if name in options]:
        raise InputError(
            f"{', '.join(given)}: the optimizer, its schedule and the batches are those of the "
            "loop, whose steps are never skipped; leave this out, and set it there"
        )
    precision = options.get("precision")
    if getattr(precision, "is_scaled", precision == "fp16"):
        raise InputError(
            f"precision={precision!r} skips steps that overflow, and the loop's learning-rate "
            "schedule would not know of it; use precision='bf16'"
        )


def call_of(batch: Any) -> Arguments:
    """The model's arguments of a batch: keywords of a mapping, positions of a tuple or list."""
    if isinstance(batch, Mapping):
        return Arguments((), dict(batch))
    if isinstance(batch, tuple | list):
        return Arguments(tuple(batch), {})
    return Arguments((batch,), {})


def sizes(call: Arguments) -> tuple[int, int]:
    """The samples of a batch, and its tokens: the size of the first two-dimensional integer tensor
    (0 without one), as in `autopar.pricing.utilisation`."""
    tensors = [leaf for leaf in pytree.tree_leaves(tuple(call)) if isinstance(leaf, Tensor)]
    ids = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    num_samples = next((len(t) for t in tensors if t.dim() > 0), 0)
    return num_samples, ids[0].numel() if ids else 0
