"""``Compiled``, which ``autopar.compile`` returns, under ``torchrun`` and in one process alike."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.base.closing import Closing
from autopar.base.errors import InputError, MissingError
from autopar.base.torch_private import runs_uncompiled
from autopar.cost_models.hardware import is_count
from autopar.frontend.autocast import refuse_autocast
from autopar.frontend.capture import Captured, check_model
from autopar.frontend.copies import without_data
from autopar.lowering.types import RankProgram
from autopar.movement.execution import Movement
from autopar.plans.text import inputs_text
from autopar.runtime.checkpointing import PeriodicCheckpoints
from autopar.runtime.habits import (
    IN_EVAL_MODE,
    ModuleHabits,
    has_gradients_on,
    refusing_backward,
    with_loss,
)
from autopar.runtime.loop import (
    ClassicLoop,
    LoopOptimizer,
    check_has_optimizer,
    why_no_loop,
)
from autopar.runtime.measured_report import MeasuredReport
from autopar.runtime.measured_steps import Measurement
from autopar.runtime.options import RunOptions
from autopar.runtime.profile import Profile
from autopar.runtime.runners.spmd import is_spmd
from autopar.runtime.runners.start import rank_options, started
from autopar.runtime.state.checkpoint_paths import Path
from autopar.runtime.state.model_optimizers import ModelState
from autopar.runtime.step.executor import ActionTime
from autopar.runtime.step.forward_programs import ForwardPrograms, LowerForward
from autopar.runtime.step.training_programs import LowerTraining, TrainingPrograms
from autopar.runtime.step_log import StepLog
from autopar.runtime.step_times import StepTimes


class Compiled(ModuleHabits, Closing):
    """A model compiled for its devices: train it, call it, read its state.

    Arguments:

    * ``captured``: the graph and the signature of the model's call.
    * ``program``: the lowered training program (``lower(strategy)``).
    * ``forward_program``: makes the forward program of the training strategy
      (``lower(strategy, training=False)``) when it is first needed; ``lower_forward`` that of
      any other call or mode (see `autopar.runtime.step.forward_programs`); ``lower_training`` the
      training program for batches of other shapes, None if they are to be refused.
    * ``movement``: what moves to the host, by pipeline rank; empty if nothing does.
    * ``plan``: returned as ``compiled.plan``.
    * ``devices``: one per rank (``resolve_devices``). Under ``torchrun`` each process uses that of
      its ``LOCAL_RANK``, and only their number matters.
    * ``model``: its parameters and buffers are the initial state; it is not changed.
    * ``options``: how it trains, see `autopar.runtime.options`.

    Under ``torchrun`` all ranks must call every method. In a single process a model for one CPU
    runs in this process; for other devices workers are started, which end with `close`, at the end
    of a ``with`` block, and with the interpreter.
    """

    def __init__(
        self,
        *,
        captured: Captured,
        program: RankProgram,
        movement: tuple[Movement, ...] = (),
        forward_program: Callable[[], RankProgram],
        lower_forward: LowerForward,
        lower_training: LowerTraining | None = None,
        plan: Any,
        devices: Sequence[torch.device],
        model: nn.Module,
        options: RunOptions,
    ) -> None:
        self.plan = plan
        self.program = program
        self.training = model.training
        self._captured = captured
        self._step_times = StepTimes()
        self._last_batch: tuple[tuple[Any, ...], dict[str, Any], bool] = (), {}, False
        self._profile: Profile | None = None
        self._has_optimizer = options.optimizer is not None
        self._name = type(model).__name__
        ranks = rank_options(captured, program, model, options, movement)
        self._runner = started(program, model, ranks, devices, options)
        self._checkpoints = PeriodicCheckpoints(self._runner)
        self._why_no_loop = why_no_loop(program, ranks, was_training=model.training)
        self._loop = ClassicLoop(self._runner, program, ranks, self._checkpoints.step)
        self._has_loss_fn = options.loss_fn is not None
        for text in self._runner.not_compiled:
            warnings.warn(text, stacklevel=3)
        empty, loss_fn = without_data(model, options.loss_fn)
        self._trainings = TrainingPrograms(
            captured=captured,
            program=program,
            model=empty,
            loss_fn=loss_fn,
            lower=None if options.array is not None else lower_training,
            runner=self._runner,
        )
        self._forwards = ForwardPrograms(
            captured=captured,
            program=program,
            model=empty,
            loss_fn=loss_fn,
            lower_own=forward_program,
            lower_other=lower_forward,
            runner=self._runner,
        )

    @runs_uncompiled
    def train_step(self, *args: Any, local: bool = False, **kwargs: Any) -> Tensor:
        """Run one forward, backward and update on the global batch; the scalar loss.

        The batch may have other sizes than the example, as the last one of a loader or sequences of
        another length do: the first one of its shapes is captured and planned, for parameters as
        they are stored; the last `autopar.runtime.step.training_programs.MAX_PROGRAMS` programs
        are kept. Not with ``offload``.

        With ``local``, under ``torchrun``, each rank passes its own shard of the batch; shards of
        other sizes than the example's have the same sizes on all ranks. If the loss or a gradient
        is not finite, raises NonFiniteError and changes nothing; see ``nonfinite`` of
        `autopar.compile`.
        """
        if self.program.loss is None:
            raise InputError(
                "the model returns no scalar loss, so it cannot be trained; pass "
                "autopar.compile(..., loss_fn=torch.nn.functional.cross_entropy)"
            )
        check_has_optimizer(self._has_optimizer)
        refuse_autocast(self.program.device_type, "train_step was called")
        self._loop.check_no_gradients()
        self._loop.send_hyper_parameters()
        started_s = time.perf_counter()
        call = self._trainings.call(args, kwargs, local=local)
        with self._checkpoints.step():
            loss = self._runner.train_step(call.tensors, local=local, slot=call.slot)
        time_s = time.perf_counter() - started_s
        self._step_times.note(loss, time_s, is_planned=call.has_sizes_of_example)
        if call.slot == 0:
            self._last_batch = args, kwargs, local
        self._loop.end_update()
        return loss

    def log_every(self, num_steps: int) -> None:
        """Log a line after every so many calls of `train_step` from now on: the loss, the time of a
        step, tokens or samples a second, MFU, and the growth of memory on the fullest device.

        It goes to the logger ``autopar.training`` of the first rank, and where logging is not
        configured to standard error. Raises InputError unless ``num_steps`` is at least 1.
        """
        self._step_times.log = StepLog(
            num_steps, self.plan, self.memory_growth_bytes,
            speaks=not is_spmd() or dist.get_rank() == 0,
        )  # fmt: skip

    @runs_uncompiled
    def __call__(self, *args: Any, local: bool = False, **kwargs: Any) -> Any:
        """Run the model; what the model itself returns, whole.

        Any call that the model takes is possible: another batch size, or no labels. The first call
        of a kind, or in a mode, is captured and planned; the last
        `autopar.runtime.step.forward_programs.MAX_PROGRAMS` programs are kept. With a ``loss_fn``,
        its targets may be passed as in training or left out. With ``local``, under ``torchrun``,
        each rank passes its own shard of a call like those trained with, perhaps of other sizes.

        In train mode, unless under ``torch.no_grad()``, a call like those trained with also runs
        the backward pass and changes buffers, as the plain model does: its loss is ready for
        ``loss.backward()``, `optimizer` for an update. With a ``loss_fn`` and targets it returns
        the loss alone. Of several outputs only the loss has gradients. ``backward()`` raises
        InputError where there are none, as in eval mode or with an early update; see `train_step`.
        """
        refuse_autocast(self.program.device_type, "the compiled model was called")
        if not has_gradients_on():
            self._warn_of_kept_buffers()
            return self._forward(args, kwargs, local)
        reason = self._why_no_loop if self.training else IN_EVAL_MODE
        reason = reason or self._why_no_pass(args, kwargs, local)
        if reason is not None:
            return refusing_backward(self._forward(args, kwargs, local), reason)
        signature, outputs = self._captured.signature, None
        if not (self._has_loss_fn or signature.returns_one_tensor):
            outputs = self._forward(args, kwargs, local, as_training_pass=True)
        call = self._trainings.call(args, kwargs, local=local)
        loss = self._loop.run(call.tensors, local=local, slot=call.slot)
        if self._has_loss_fn:
            return loss
        return signature.output_of([loss]) if outputs is None else with_loss(outputs, loss)

    def _forward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        local: bool,
        *,
        as_training_pass: bool = False,
    ) -> Any:
        with self._runner.watched("a forward pass"):
            return self._forwards.run(
                args, kwargs, training=self.training, local=local,
                as_training_pass=as_training_pass,
            )  # fmt: skip

    def _warn_of_kept_buffers(self) -> None:
        if self.training and any(b.following is not None for b in self.program.buffers):
            warnings.warn(
                "a call in train mode under torch.no_grad() leaves the buffers of a compiled model "
                "(such as running statistics) as they are, which the plain model would change; "
                "they change in training steps, and in calls that have gradients",
                stacklevel=5,
            )

    def _why_no_pass(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], local: bool
    ) -> str | None:
        """Why a call has no gradients; None if it is like those trained with.

        Raises InputError for one with targets that cannot be used, as it has no output but a loss.
        """
        try:
            self._trainings.check(args, kwargs, local=local)
        except InputError as error:
            if self._has_loss_fn and self._captured.signature.has_structure_of(args, kwargs):
                raise
            return f"the call is unlike those trained with: {error}"
        return None

    @property
    def takes_other_shapes(self) -> bool:
        """Whether it trains on batches of other sizes than the example's."""
        return self._trainings.takes_other_shapes

    @property
    def optimizer(self) -> LoopOptimizer:
        """The optimizer of a loop of calls, ``loss.backward()`` and ``optimizer.step()``.

        Its ``param_groups`` can be read and set, so torch's learning-rate schedulers take it.
        Raises MissingError where calls have no gradients, such as with an early update.
        """
        if self._why_no_loop is not None:
            raise MissingError(f"a compiled model has no .optimizer here: {self._why_no_loop}")
        return self._loop.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that ``backward()`` calls have accumulated, or set them to zero."""
        self._loop.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the accumulated gradients to at most this global 2-norm; the norm before.

        Raises InputError for another ``norm_type`` than 2.
        """
        return self._loop.clip(max_norm, norm_type)

    def train(self, mode: bool = True) -> Self:
        """Run later calls in train mode: each submodule in its mode when the model was compiled.

        Training steps always run in the mode that the model was compiled in.
        """
        self.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Run later calls in eval mode, as `nn.Module.eval`: running statistics, no dropout."""
        return self.train(False)

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of all gradients of the last step, before clipping.

        A scalar, as ``torch.nn.utils.clip_grad_norm_`` returns it; None without ``max_grad_norm``
        and before the first step.
        """
        return self._runner.grad_norm

    @property
    def num_skipped_steps(self) -> int:
        """How many training steps were skipped: with ``nonfinite="skip"``, or because gradients in
        float16 overflowed."""
        return self._runner.num_skipped_steps

    @property
    def loss_scale(self) -> float:
        """Scale of the loss in the next step; 1 but with ``precision="fp16"``."""
        return self._runner.loss_scale

    @property
    def step_time_s(self) -> float | None:
        """Median wall time in seconds of the last steps on batches of the example's sizes; None
        before the first."""
        return self._step_times.median_s

    def memory_growth_bytes(self) -> list[int]:
        """Per rank, by how much the memory at the peak of training exceeds that before loading."""
        return self._runner.memory_growth_bytes()

    def peak_tensor_bytes(self, *args: Any, local: bool = False, **kwargs: Any) -> list[int]:
        """Per rank, the peak bytes of tensors in training; runs six steps on a batch.

        This is what ``plan.prediction.memory_bytes`` predicts: parameters, gradients, optimizer
        state, activations, buffers of collectives; without an allocator's fragmentation, libraries,
        or a batch that workers read from the caller's memory. On CPUs torch's profiler counts. It
        misses what threads of the process group free, and then counts too little; so the result is
        the maximum of three counts, each over two steps: the second holds nothing from before the
        first.
        """
        self._trainings.call(args, kwargs, local=local)  # refuse a wrong batch before counting
        with self._measurement(args, kwargs, local) as measurement:
            return measurement.peak_tensor_bytes()

    def action_times(self) -> list[list[ActionTime]]:
        """Per rank, when the actions of its schedule ran in the last training step; none where that
        was replayed as a CUDA graph."""
        return [[*rank.actions] for rank in self._runner.step_times()]

    def profile(
        self, *args: Any, num_steps: int = 10, local: bool = False, **kwargs: Any
    ) -> Profile:
        """Measure training steps on a batch, beside the prediction; ``print`` the result. Without a
        batch it is the last one that was trained on.

        The steps train as `train_step` does; the first one is not measured, and further ones, as
        many but at most `autopar.runtime.measured_steps.MOST_OP_STEPS`, time each op by itself.
        Twice as many then count tensors, as `peak_tensor_bytes` does. On a GPU they are launched op
        by op, also where training replays CUDA graphs. Raises InputError for a batch of other sizes
        than the example's, or with masks that the plan leaves out, for which it predicts nothing.
        """
        if not is_count(num_steps):
            raise InputError(f"num_steps is {num_steps!r}; it must be a whole number, at least 1")
        if not (args or kwargs):
            args, kwargs, local = self._last_batch
            if not (args or kwargs):
                raise InputError(
                    "profile() needs a batch, because no step was on one that the plan predicts: "
                    f"{inputs_text(self.plan)}"
                )
        if self._trainings.call(args, kwargs, local=local).slot:
            raise InputError(
                f"the plan predicts steps of batches of {inputs_text(self.plan)}; profile() "
                "compares with it, so pass such a batch"
            )
        with self._measurement(args, kwargs, local) as measurement:
            found = measurement.profile(self.plan, self._captured, self.program, num_steps)
        self._profile = found
        self._step_times.seconds.extend(found.step_times_s)
        return found

    @contextlib.contextmanager
    def _measurement(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], local: bool
    ) -> Iterator[Measurement]:
        """Measures steps, whose times are not among those of training, nor logged: measuring takes
        time."""
        with self._step_times.paused():
            yield Measurement(self._runner, lambda: self.train_step(*args, local=local, **kwargs))

    def report(self, detail: str = "screen") -> str:
        """The plan in this detail, as `Plan.report` gives it, and measurements since."""
        return self.measured().text(detail)

    def save_report(self, path: str | Path) -> None:
        """Write the plan's report with what was measured as one HTML file, as `Plan.save_report`
        writes that of the plan alone."""
        self.measured().save(path)

    def _repr_html_(self) -> str | None:
        return self.measured().page()._repr_html_()

    def figure(self, name: str) -> tuple[Any, Any]:
        """A figure and its axes, of matplotlib: one of the plan (see `Plan.figure`), or of the last
        `profile`, predicted against measured: phases, stages, ops or peak_memory.

        Raises InputError for another, and where nothing was measured or the plan has nothing of it.
        """
        return self.measured().figure(name)

    def measured(self) -> MeasuredReport:
        """The report as its parts: `report`, `figure` and a notebook's page are made of it."""
        return MeasuredReport(
            plan=self.plan, notes=(*self._runner.not_compiled, *self._runner.graph_notes()),
            step_times_s=tuple(self._step_times.seconds), profile=self._profile,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers under the original model's keys.

        Under ``torchrun`` parameters are DTensors; in one process plain whole tensors.
        """
        return self._runner.state_dict()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the original model's keys, as the plain model loads them."""
        return self._runner.full_state_dict()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step, or accumulated since, as `state_dict` has parameters.

        With ``max_grad_norm`` they are clipped, as the optimizer saw them. Raises InputError after
        an early update, which releases them.
        """
        if self.program.early is not None and not self.program.early.keeps_gradients:
            raise InputError(
                "the gradients are gone: update='early' releases each one when its parameter is "
                "updated. Keep them by autopar.compile(..., "
                "update=autopar.Update(keep_gradients=True)), or use update='at_end'"
            )
        return self._runner.gradients()

    def set_gradients(self, given: Mapping[str, Tensor]) -> None:
        """Replace some accumulated gradients by whole tensors, or DTensors, as `gradients` has."""
        self._loop.set_gradients(given)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict`, `full_state_dict` or the plain model's returned."""
        self._runner.load_state_dict(state)

    def copy_to(self, model: nn.Module) -> None:
        """Copy the present weights and buffers into the plain model.

        Raises InputError for anything but the model that was compiled, or a copy of it.
        """
        check_model(model)
        state = self.full_state_dict()
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise InputError(
                f"the {type(model).__name__} given to copy_to is not the model that was compiled: "
                f"{error}\nPass that model or a copy of it: compiled.copy_to(model)"
            ) from error

    def optimizer_state_dict(self) -> dict[str, Any]:
        """``{"state": {parameter name: {...}}, "param_groups": [...]}``."""
        return self._loop.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state_dict` returned; raises InputError if it does not fit."""
        self._loop.load_state_dict(state)

    def model_states(self) -> list[ModelState]:
        """Each array model's training state: optimizer, scheduler and number of steps."""
        return self._runner.model_states()

    def load_model_states(self, states: Sequence[ModelState]) -> None:
        """Go on from what `model_states` gave."""
        self._runner.load_model_states(states)

    def save(self, path: Path, *, allow_nonfinite: bool = False) -> None:
        """Write model, optimizer, schedule and seed to a folder: safetensors and plain JSON.

        An earlier checkpoint in the folder stays until this one is complete. Raises InputError if
        it cannot be written, or a weight is not finite, unless ``allow_nonfinite``.
        """
        self._loop.send_hyper_parameters()
        self._runner.save(path, allow_nonfinite=allow_nonfinite)

    def load(self, path: Path) -> None:
        """Read what `save` or ``torch.distributed.checkpoint`` wrote, on these devices or others.

        No code in it is run. Raises InputError, and changes nothing, if anything in it is damaged
        or does not fit.
        """
        self._runner.load(path)
        self._loop.take_hyper_parameters()

    def checkpoint_every(self, num_steps: int, folder: Path, *, keep: int = 3) -> int:
        """Save after every so many training steps, and go on from the newest checkpoint there.

        Returns the number of steps that it had done, skipped ones included, 0 without one, so that
        a script that is started again leaves out their batches. A damaged checkpoint is logged, and
        the one before it is taken. Each is a folder ``step-00000100`` in ``folder``, which all
        ranks must reach, as `save` writes it; the newest ``keep`` are kept. Training waits for
        copies in the host's memory; files are written in the background. What goes wrong there
        raises InputError at the beginning of the next step, or in `close`, which waits for the
        last checkpoint. A scheduler of the script's own is not saved: pass lr_scheduler= to
        `autopar.compile`. Raises InputError if there are checkpoints and none can be loaded.
        """
        check_has_optimizer(self._has_optimizer)
        num_done = self._checkpoints.begin(num_steps, folder, keep)
        self._loop.take_hyper_parameters()
        return num_done

    def close(self) -> None:
        """End the workers, free what a rank in this process holds, or leave the process group if
        it was joined here."""
        try:
            self._checkpoints.finish()
        finally:
            self._runner.close()

    def __repr__(self) -> str:
        return f"<Compiled {self._name}: {self.plan!r}>"
