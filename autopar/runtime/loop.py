"""The classic loop over a compiled model: call, ``loss.backward()``, ``optimizer.step()``.

In: calls in train mode. A call runs the forward and the backward pass of the whole training
program on the devices, where the gradients of the loss stay. Out: a loss whose ``backward()`` adds
these gradients, times the derivative with respect to it, to the accumulated ones; and an optimizer
that has the devices update with them. So several backward passes before one update add up, a
scaled loss has scaled gradients, and learning-rate schedulers of torch work on the optimizer.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from autopar.base.errors import InputError, NonFiniteError
from autopar.base.spelling import did_you_mean
from autopar.lowering.types import RankProgram
from autopar.runtime.state.optimizers import HyperParameters, make_optimizer
from autopar.runtime.step.rank_options import RankOptions

_PARAMETERS = (
    "the parameters of compiled.optimizer are shards on their devices, which this process does not "
    "have: compiled.clip_grad_norm_(max_norm) clips their gradients, compiled.gradients() has "
    "these by name, and compiled.full_state_dict() the parameters. A torch.amp.GradScaler is not "
    "needed: precision='fp16' of autopar.compile scales the loss, and no other precision needs it"
)
_INSTEAD = "write loss = compiled.train_step(...), which runs forward, backward and update"


class LoopRunner(Protocol):
    """Runs passes and updates on the ranks, see `autopar.runtime.step.loop.LoopRuntime`."""

    def check_open(self) -> None:
        """Raise WorkerError after `close`."""
        ...

    def training_pass(
        self,
        tensors: Sequence[Tensor],
        number: int,
        dropped: Sequence[int],
        *,
        local: bool = False,
        slot: int = 0,
    ) -> Tensor: ...

    def accumulate(self, number: int, factor: float) -> None: ...

    def update(self, changes: HyperParameters) -> bool: ...

    def zero_gradients(self, to_none: bool) -> None: ...

    def set_gradients(self, given: Mapping[str, Tensor]) -> None: ...

    def clip_gradients(self, limit: float) -> Tensor: ...

    def hyper_parameters(self) -> HyperParameters | None: ...

    def set_hyper_parameters(self, changes: HyperParameters) -> None: ...

    def optimizer_state_dict(self) -> dict[str, Any]: ...

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None: ...


def why_no_loop(program: RankProgram, options: RankOptions, *, was_training: bool) -> str | None:
    """Why a model compiled like this has no classic loop, and what to write; None if it has."""
    if program.loss is None:
        return (
            "the model returns no scalar loss: pass autopar.compile(..., "
            "loss_fn=torch.nn.functional.cross_entropy)"
        )
    if options.optimizer is None:
        return (
            "there is no optimizer: autopar.compile(..., "
            "optimizer=functools.partial(torch.optim.AdamW, lr=3e-4))"
        )
    if options.array is not None:
        return f"several models are trained as one: {_INSTEAD}"
    if not was_training:
        return (
            f"the model was compiled in eval mode: {_INSTEAD}, or call model.train() before "
            "autopar.compile"
        )
    if program.early is not None:
        return (
            f"its plan updates weights within the backward pass (update='early'): {_INSTEAD}, or "
            "pass autopar.compile(..., update='at_end')"
        )
    if options.movement:
        return (
            f"its plan moves tensors to the host during each step (offload): {_INSTEAD}, or pass "
            "autopar.compile(..., offload=False)"
        )
    return None


def check_has_optimizer(has_optimizer: bool) -> None:
    """Raise InputError where there is none to train with."""
    if not has_optimizer:
        raise InputError(
            "train_step needs an optimizer: autopar.compile(..., "
            "optimizer=functools.partial(torch.optim.AdamW, lr=3e-4))"
        )


class ClassicLoop:
    """The passes of one compiled model, and the gradients that they have added up.

    ``has_gradients`` says that there are any, ``is_waiting`` that no update has used them yet. Each
    update runs within ``around_update()``, as a training step does. ``num_updates`` counts them,
    those of training steps too.
    """

    def __init__(
        self,
        runner: LoopRunner,
        program: RankProgram,
        options: RankOptions,
        around_update: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._runner = runner
        self._around_update = around_update
        self._program = program
        self._options = options
        self._numbers = itertools.count()
        self._dropped: list[int] = []
        self._optimizer: LoopOptimizer | None = None
        self.has_gradients = False
        self.is_waiting = False
        self.num_updates = 0

    def run(self, tensors: Sequence[Tensor], *, local: bool, slot: int) -> Tensor:
        """Run a pass; a loss with a ``backward()``."""
        number = next(self._numbers)
        dropped = tuple(self._dropped)
        loss = self._runner.training_pass(tensors, number, dropped, local=local, slot=slot)
        del self._dropped[: len(dropped)]
        held = _Pass(number, self)
        weakref.finalize(held, self._dropped.append, number).atexit = False
        anchor = torch.zeros((), requires_grad=True)
        result: Tensor = _Loss.apply(loss, anchor, held)
        return result

    def accumulate(self, number: int, factor: float) -> None:
        """Add the gradients of a pass, times a factor."""
        self._runner.accumulate(number, factor)
        self.has_gradients = self.is_waiting = True

    @property
    def optimizer(self) -> LoopOptimizer:
        if self._optimizer is None:
            make = self._options.optimizer
            assert make is not None
            made = make_optimizer(
                make, {}, self._program.parameters, self._program.mesh, may_be_elsewhere=True
            )
            self._optimizer = LoopOptimizer(made, self)
            self.take_hyper_parameters()
        return self._optimizer

    def take_hyper_parameters(self) -> None:
        """Take over the ranks' hyper-parameters, which may have changed."""
        if self._optimizer is not None:
            self._optimizer.take(self._runner.hyper_parameters())

    def end_update(self) -> None:
        """Note that weights were updated, after which the ranks' own scheduler has stepped."""
        self.is_waiting = False
        self.num_updates += 1
        if self._options.lr_scheduler is not None:
            self.take_hyper_parameters()

    def send_hyper_parameters(self) -> None:
        """Have the ranks use the hyper-parameters that were set here."""
        changes = self._changes()
        if any(changes):
            self._runner.set_hyper_parameters(changes)

    def _changes(self) -> HyperParameters:
        return [] if self._optimizer is None else self._optimizer.changes()

    def check_no_gradients(self) -> None:
        """Raise InputError where a training step would lose accumulated gradients."""
        if self.is_waiting:
            raise InputError(
                "train_step was called while gradients of loss.backward() wait for their update: "
                "call compiled.optimizer.step() or compiled.optimizer.zero_grad() first"
            )
        self.has_gradients = False

    def _check_gradients(self, what: str) -> None:
        self._runner.check_open()
        if not self.has_gradients:
            raise InputError(
                f"{what} was called without gradients: call loss = compiled(...) in train mode and "
                "loss.backward() before it"
            )

    def update(self) -> None:
        """Update with the accumulated gradients."""
        self._check_gradients("compiled.optimizer.step()")
        with self._around_update():
            if not self._runner.update(self._changes()):
                raise NonFiniteError(
                    "the accumulated gradients are not finite, while those of each call were: "
                    "their sum overflows, or a factor of a loss. Weights have not changed: call "
                    "compiled.optimizer.zero_grad(), and scale the losses down"
                )
        self.end_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients, or set them to zero."""
        if self.has_gradients:
            self._runner.zero_gradients(bool(set_to_none))
        self.is_waiting = False
        self.has_gradients = self.has_gradients and not set_to_none

    def clip(self, max_norm: Any, norm_type: Any = 2.0) -> Tensor:
        """Clip the accumulated gradients; their global 2-norm before."""
        if norm_type != 2:
            raise InputError(
                f"norm_type is {norm_type!r}; a compiled model clips the 2-norm alone: "
                "compiled.clip_grad_norm_(1.0). compiled.gradients() and compiled.set_gradients() "
                "read and replace gradients for any other rule"
            )
        if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
            max_norm = max_norm.item()
        is_number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
        if not is_number or not max_norm > 0:
            raise InputError(
                f"max_norm is {max_norm!r}; it must be a positive number, the largest 2-norm of "
                "all gradients together, such as compiled.clip_grad_norm_(1.0)"
            )
        self._check_gradients("compiled.clip_grad_norm_()")
        return self._runner.clip_gradients(float(max_norm))

    def set_gradients(self, given: Mapping[str, Tensor]) -> None:
        """Replace some accumulated gradients, by name of the parameter."""
        self._check_gradients("compiled.set_gradients()")
        shapes = {p.name: p.shape for p in self._program.parameters if p.trainable}
        for name, gradient in given.items():
            if name not in shapes:
                raise InputError(
                    f"{name!r} is no parameter that is trained: set_gradients takes the names that "
                    f"compiled.gradients() gives{did_you_mean(str(name), list(shapes))}"
                )
            if not isinstance(gradient, Tensor) or tuple(gradient.shape) != shapes[name]:
                found = tuple(gradient.shape) if isinstance(gradient, Tensor) else repr(gradient)
                raise InputError(
                    f"the gradient of {name!r} is {found}; it must be a tensor of the parameter's "
                    f"shape, {shapes[name]}"
                )
        self._runner.set_gradients({name: given[name].detach() for name in given})

    def state_dict(self) -> dict[str, Any]:
        self.send_hyper_parameters()
        return self._runner.optimizer_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._runner.load_optimizer_state_dict(state)
        self.take_hyper_parameters()


class _Pass:
    """A pass whose gradients the ranks hold until its ``backward()``, or until it is gone."""

    def __init__(self, number: int, loop: ClassicLoop) -> None:
        self.number = number
        self.loop = loop
        self.is_used = False
        self.num_updates = loop.num_updates

    def accumulate(self, factor: float) -> None:
        if self.is_used:
            raise InputError(
                "backward() was called again on a loss of a compiled model, whose gradients were "
                "added to the others by the first call: call the model again for more of them, or "
                "scale the loss, as in (2 * loss).backward()"
            )
        if self.loop.num_updates != self.num_updates:
            raise InputError(
                "backward() was called on a loss that was computed before the last update, so its "
                "gradients are those of other weights: call the model again after "
                "compiled.optimizer.step()"
            )
        self.is_used = True
        self.loop.accumulate(self.number, factor)


class _Loss(torch.autograd.Function):
    """The loss of a pass; its derivative with respect to the parameters is on the devices."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, held: _Pass) -> Tensor:
        ctx.held = held
        return loss.clone()  # a view could not be changed in place, as in loss /= 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        if torch.is_grad_enabled():
            raise InputError(
                "backward(create_graph=True) was called on a loss of a compiled model, which has "
                "first derivatives only: leave out create_graph"
            )
        ctx.held.accumulate(float(gradient))
        return None, None, None


class _Elsewhere:
    """The parameters of a group, which are on other devices."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise InputError(_PARAMETERS)

    __iter__ = __len__ = __getitem__ = __contains__ = _refuse

    def __repr__(self) -> str:
        return "<shards on their devices>"


class LoopOptimizer(torch.optim.Optimizer):
    """``compiled.optimizer``: the ranks' optimizer, for a loop and a learning-rate scheduler.

    ``param_groups`` has the hyper-parameters, which may be set: the ranks use them from the next
    update on. The parameters and their state are on the devices.
    """

    def __init__(self, made: torch.optim.Optimizer, loop: ClassicLoop) -> None:
        placeholder = nn.Parameter(torch.empty(0), requires_grad=False)
        groups = [
            {**copy.deepcopy(_without_parameters(group)), "params": [copy.copy(placeholder)]}
            for group in made.param_groups
        ]
        super().__init__(groups, dict(made.defaults))
        for group in self.param_groups:
            group["params"] = _Elsewhere()
        self._loop = loop
        self._kind: Callable[..., torch.optim.Optimizer] = type(made)
        self._name = type(made).__name__
        self._known = [_without_parameters(group) for group in self.param_groups]

    def take(self, found: HyperParameters | None) -> None:
        """Take over the ranks' hyper-parameters."""
        if found is None:
            return
        for group, known in zip(self.param_groups, found, strict=True):
            group.update(copy.deepcopy(known))
        self._known = found

    def changes(self) -> HyperParameters:
        """Hyper-parameters set since the last call, by group; InputError for another type."""
        changes: HyperParameters = []
        for group, known in zip(self.param_groups, self._known):
            if missing := known.keys() - group.keys():
                raise InputError(
                    f"{min(missing)!r} was deleted from compiled.optimizer.param_groups; set it "
                    f"again, as it was: {known[min(missing)]!r}"
                )
            changed = {k: group[k] for k, v in known.items() if not _is_same(group[k], v)}
            for key, value in changed.items():
                _check_kind(key, value, known[key])
            self._check_goes_on(known, changed)
            changes.append(copy.deepcopy(changed))
        for known, changed in zip(self._known, changes):
            known.update(copy.deepcopy(changed))
        return changes

    def _check_goes_on(self, known: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Raise InputError where the optimizer cannot go on from its state with what was switched
        on or off, by trying it on one number."""
        if all(bool(value) == bool(known[key]) for key, value in changed.items()):
            return
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)
        try:
            made = self._kind([{**copy.deepcopy(dict(known)), "params": [parameter]}])
            made.step()
        except Exception:  # it does not work on one number of the CPU
            return
        try:
            made.param_groups[0].update(copy.deepcopy(dict(changed)))
            made.step()
        except Exception as error:
            text = ", ".join(f"{key!r} to {value!r}" for key, value in changed.items())
            raise InputError(
                f"compiled.optimizer.param_groups was set, {text}, and {self._name} cannot go on "
                f"from its state with it ({type(error).__name__}: {error}): pass it to "
                "autopar.compile(..., optimizer=...) from the beginning"
            ) from error

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights with the accumulated gradients; what ``closure`` returns, if given.

        Raises InputError without gradients, and NonFiniteError if they are not finite.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._loop.update()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients, or set them to zero."""
        self._loop.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: later raises InputError."""
        if hasattr(self, "_loop"):
            raise InputError(
                "parameter groups are those that the function given as optimizer= made: "
                "autopar.compile(..., optimizer=lambda parameters: torch.optim.AdamW([...]))"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As `Compiled.optimizer_state_dict`, with what a scheduler has noted in each group."""
        found = self._loop.state_dict()
        noted = [_without_parameters(group) for group in self.param_groups]
        groups = [{**own, **group} for own, group in zip(noted, found["param_groups"])]
        return {**found, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `Compiled.load_optimizer_state_dict`."""
        self._loop.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "compiled.optimizer cannot be pickled or copied, as its state is on other devices or "
            "in other processes. compiled.optimizer.state_dict() has the state, and "
            "compiled.save(folder) writes it with the model's"
        )

    def __repr__(self) -> str:
        groups = [_without_parameters(group) for group in self.param_groups]
        return f"<{self._name} of a compiled model: {groups}>"


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _type_name(value: Any) -> str | None:
    """The type of a hyper-parameter: ``"flag"`` for a bool or None, ``"number"`` for a scalar,
    ``"2 numbers"`` for a pair; None for any other type."""
    if value is None or isinstance(value, bool):
        return "flag"
    is_sequence = isinstance(value, tuple | list)
    items = value if is_sequence else (value,)
    if not all(isinstance(v, Real | Tensor) and not isinstance(v, bool) for v in items):
        return None
    return f"{len(items)} numbers" if is_sequence else "number"


def _check_kind(key: str, value: Any, known: Any) -> None:
    kind = _type_name(value)
    if kind != _type_name(known) or kind is None:
        raise InputError(
            f"{key!r} of compiled.optimizer.param_groups was set to {value!r}; it must be of the "
            f"kind of {known!r}, as in compiled.optimizer.param_groups[0][{key!r}] = {known!r}"
        )
    if kind != "flag" and torch.as_tensor(value).isnan().any():
        raise InputError(
            f"{key!r} of compiled.optimizer.param_groups was set to {value!r}, with which every "
            f"updated parameter becomes nan; set it to a number, such as {known!r}"
        )
