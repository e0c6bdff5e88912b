"""Hugging Face ``Trainer`` that trains on the devices of a compiled model.

``AutoparTrainer(..., devices=4)`` is used as ``Trainer`` is, with its arguments, callbacks, logs
and checkpoints, which either of the two resumes. ``per_device_train_batch_size`` is the global
batch, as it is for a ``Trainer`` on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import InputError, PackageError
from autopar.frontend.signature import Arguments
from autopar.integrations.hosted import Hosted, check_options
from autopar.integrations.throughput import Throughput
from autopar.runtime.compiled import Compiled
from autopar.runtime.runners.given_devices import Devices

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise PackageError(
        f"autopar.integrations.transformers needs transformers and accelerate ({error}): "
        "pip install 'autopar[transformers]'"
    ) from error

_PLANNED = "leave it out: the plan splits the model over devices="
_LOSS = "compute the loss in the model's forward"
_REFUSED = {
    "deepspeed": _PLANNED,
    "fsdp": _PLANNED,
    "parallelism_config": _PLANNED,
    "fp16": "use bf16=True",
    "fp16_full_eval": "leave it out: evaluation computes as training does",
    "bf16_full_eval": "leave it out: evaluation computes as training does",
    "tf32": "use bf16=True",
    "torch_compile": "use compile_options={'kernels': 'compiled'}",
    "activation_checkpointing": "use compile_options={'recompute': 'full'}, or leave it out: what "
    "does not fit the memory is recomputed",
    "gradient_checkpointing": "use compile_options={'recompute': 'full'}, or leave it out: what "
    "does not fit the memory is recomputed",
    "label_smoothing_factor": _LOSS,
    "neftune_noise_alpha": "add the noise in the model's forward",
    "use_liger_kernel": "use compile_options={'kernels': 'compiled'}",
    "auto_find_batch_size": "leave it out: the plan fits the batch into the memory",
    "debug": "leave it out: a step that is not finite names its block and line",
}
"""Arguments that the devices would not see, each with what to write instead."""


class AutoparTrainer(Trainer):
    """A ``Trainer`` whose training steps, evaluation and prediction run on ``devices``.

    * ``devices``: as `autopar.compile` takes them; worker processes are started. With
      ``TrainingArguments(use_cpu=True)`` the Trainer's own copy of the model stays in host memory.
    * ``compile_options``: further keywords of `autopar.compile`, such as ``{"mesh": {"dp": 2}}``.
      ``max_grad_norm``, ``bf16``, optimizer and learning-rate scheduler are those of ``args``.

    The first batch compiles; until then evaluation runs the plain model. With
    ``gradient_accumulation_steps`` the batches of an update are joined into one, split into as many
    micro-batches, so they must have one shape, and a batch norm sees all of them; a model that does
    not take the number of items (``accepts_loss_kwargs``) has the mean over all as its loss. A step
    whose loss or gradients are not finite raises NonFiniteError. While training runs the weights
    are on the devices; the model has them in checkpoints, after ``save_model`` and when training
    has ended.

    Raises InputError for arguments that the devices would not see, and OptimizerError for an
    optimizer or a schedule that cannot be made on each of them.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        devices: Devices,
        compile_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        _refuse(args, type(self), others)
        self._devices = devices
        self._options = _with_arguments(compile_options or {}, args)
        self._hosted: Hosted | None = None
        self._module: nn.Module | None = None
        self._held: list[Mapping[str, Any]] = []
        if args.n_gpu > 1:  # else batches would be split over GPUs once more
            args._n_gpu = 1
        super().__init__(model, args, *more, **others)

    @property
    def compiled(self) -> Compiled | None:
        """The compiled model; None before the first batch."""
        return None if self._hosted is None else self._hosted.compiled

    @property
    def hosted(self) -> Hosted | None:
        """The model of the present training, with its totals; None before training."""
        return self._hosted

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Train on the batches of an update when the last of them has come; its loss, else 0."""
        assert self._hosted is not None
        self._held.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batch, self._held = joined(self._held), []
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            batch["num_items_in_batch"] = num_items_in_batch
        model.train()
        call = Arguments((), batch)
        loss = self._hosted.train_step(call, self._plain_optimizer(), self.lr_scheduler)
        return loss.to(self.args.device)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        found = self.optimizer
        found = found.optimizer if isinstance(found, AcceleratedOptimizer) else found
        assert isinstance(found, torch.optim.Optimizer)
        return found

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """The module that Trainer's loops call; each training has a new one."""
        if training or self._hosted is None:
            if self._hosted is not None:
                self._hosted.close()
            self._held = []
            assert isinstance(self.model, nn.Module)
            self._hosted = Hosted(self.model, self._devices, self._options)
            self._module = _OnDevices(self._hosted)
        return self._module

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return None if self.compiled is None else self.compiled.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._hosted is not None:
            self._hosted.pull()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = None if self._hosted is None else self._hosted.optimizer_state()
        if state is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        own = self._plain_optimizer()
        own.load_state_dict(state)
        super()._save_optimizer_and_scheduler(output_dir)
        own.state.clear()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._hosted is not None:
            self._hosted.push()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._hosted is not None
        self._hosted.pull()
        return super()._finalize_training(*args, **kwargs)


class ThroughputCallback(TrainerCallback):
    """Logs MFU, tokens or samples a second and peak memory of an `AutoparTrainer`.

    Use: ``trainer.add_callback(ThroughputCallback(trainer, every=50))``. See
    `autopar.integrations.throughput.Throughput`.
    """

    def __init__(self, trainer: AutoparTrainer, every: int = 50) -> None:
        self._trainer = trainer
        self._throughput = Throughput(every)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if found := self._throughput.after_step(self._trainer.hosted):
            self._trainer.log(found)


class _OnDevices(nn.Module):
    """The plain model to the Trainer's loops; a call runs on the devices."""

    def __init__(self, hosted: Hosted) -> None:
        super().__init__()
        self.model = hosted.model
        self._hosted = hosted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._hosted(Arguments(args, kwargs), training=self.training)


def joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Batches as one, their tensors concatenated; raises InputError where they do not fit."""
    first, *others = map(dict, batches)
    for other in others:
        for name, value in first.items():
            fits = name in other and other.keys() == first.keys()
            if fits and isinstance(value, Tensor) and isinstance(other[name], Tensor):
                fits = value.dim() > 0 and value.shape[1:] == other[name].shape[1:]
            elif fits:
                fits = value == other[name]
            if not fits:
                raise InputError(
                    f"batches of one update differ in {name!r}: {_described(value)} and "
                    f"{_described(other.get(name))}. With gradient_accumulation_steps they are "
                    "joined into one; pad all to one length"
                )
    return {
        name: torch.cat([batch[name] for batch in batches]) if isinstance(value, Tensor) else value
        for name, value in first.items()
    }


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _with_arguments(options: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """The keywords of `autopar.compile`, with those that the Trainer's arguments mean."""
    given = dict(options)
    if "max_grad_norm" in given:
        raise InputError(
            f"max_grad_norm={given['max_grad_norm']!r} in compile_options; set "
            "TrainingArguments(max_grad_norm=...)"
        )
    if args.max_grad_norm and args.max_grad_norm > 0:
        given["max_grad_norm"] = args.max_grad_norm
    if args.bf16:
        given.setdefault("precision", "bf16")
    if args.gradient_accumulation_steps > 1 and not given.keys() & {"plan", "num_microbatches"}:
        given["num_microbatches"] = args.gradient_accumulation_steps
    check_options(given)
    return given


def _refuse(args: TrainingArguments, kind: type, others: Mapping[str, Any]) -> None:
    """Raise InputError for arguments that the devices would not see."""
    if args.world_size > 1:
        raise InputError(
            f"the Trainer runs in {args.world_size} processes, each with its own part of the "
            "batch; start one, python script.py, which starts a worker for each of devices="
        )
    for name, fix in _REFUSED.items():
        if value := getattr(args, name, None):
            raise InputError(f"{name}={value!r} does not reach the devices; {fix}")
    if others.get("compute_loss_func") is not None:
        raise InputError(f"compute_loss_func does not reach the devices; {_LOSS}")
    if kind.compute_loss is not Trainer.compute_loss:  # type: ignore[attr-defined]
        raise InputError(f"{kind.__name__}.compute_loss does not reach the devices; {_LOSS}")
