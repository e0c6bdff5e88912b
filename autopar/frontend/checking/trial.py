"""The numbers of one training step, by the user's model in eager mode and by its captured graph.

Everything runs on copies: the model, its buffers and gradients, and the states of the random number
generators are unchanged afterwards. Both sides draw the same random numbers.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.accelerators import kept_generators
from autopar.base.torch_private import pytree
from autopar.frontend.assignments import HeldTensors
from autopar.frontend.capture import Captured, Step
from autopar.frontend.checking.attributes import plain_attributes
from autopar.frontend.checking.draws import FixedDraws
from autopar.frontend.checking.evaluation import Watch, evaluate
from autopar.frontend.copies import copy_with
from autopar.frontend.reader import is_random, loss_fn_name
from autopar.frontend.signature import Arguments
from autopar.frontend.targets import LossFn, find_targets
from autopar.ir.graph import ValueKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The results of one step; a gradient is None where the parameter gets none."""

    loss: Tensor
    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


class Trial:
    """One call of a model, run either way as often as needed.

    ``device``: where it runs. ``checked``: the parameters whose gradients are computed.
    ``draws_elsewhere``: whether the model took random numbers from Python or NumPy, which differ in
    each run.
    """

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        loss_fn: LossFn | None,
        call: Arguments,
        device: torch.device,
        checked: Sequence[str],
    ) -> None:
        self.graph, self.signature = captured.graph, captured.signature
        self.precision = captured.precision
        self.model, self.loss_fn, self.call = model, loss_fn, call
        self.device, self.checked = device, tuple(checked)
        self.num_runs = 0
        self.draws_elsewhere = False
        self.is_random = any(is_random(op.target) for op in self.graph.ops)

    def eager(
        self,
        change: Callable[[Tensor], Tensor] | None = None,
        recording: contextlib.AbstractContextManager[Any] | None = None,
        warns: bool = False,
    ) -> Numbers:
        """The numbers by the model itself; ``change`` replaces its parameters.

        ``recording`` is entered around its forward pass; ``warns``: whether warnings are let
        through.
        """

        def make(tensor: Tensor) -> Tensor:
            made = self._copied(tensor)
            if change is None or not isinstance(tensor, nn.Parameter):
                return made
            return change(made)

        with self._set_up(warns=warns):
            step, args, kwargs = self._step(make)
            before = _seed_elsewhere(self.num_runs)
            self.num_runs += 1
            with recording or contextlib.nullcontext():
                loss, *outputs = step(*args, **kwargs)
            self.draws_elsewhere |= _state_elsewhere() != before
            parameters = dict(step.model.named_parameters())
            return self._numbers(loss, outputs, parameters, _buffers_of(step))

    def second_call(self) -> tuple[Numbers, tuple[str, ...]]:
        """The numbers of a call of a copy that was called before, without gradients.

        The first call has the rows in another order. Parameters and buffers are restored behind
        it, so that only other state of the model is left of it. Also returns the names of the
        numbers among its attributes that a call changes.
        """
        with self._set_up():
            step, args, kwargs = self._step(self._copied)
            held, buffers = HeldTensors(step), _buffers_of(step)
            kept = {name: buffer.clone() for name, buffer in buffers.items()}
            attributes = plain_attributes(step.model, step.loss_fn)
            _seed_elsewhere(self.num_runs)
            other_args, other_kwargs = pytree.tree_map_only(Tensor, _reversed, (args, kwargs))
            try:
                step(*other_args, **other_kwargs)
            except Exception:  # the rows have an order, as sequences sorted by length
                step(*args, **kwargs)
            after = plain_attributes(step.model, step.loss_fn)
            changed = [name for name, x in after.items() if attributes.get(name, x) != x]
            held.put_back()
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(kept[name])
            _seed_elsewhere(self.num_runs)
            loss, *outputs = step(*args, **kwargs)
            found = Numbers(
                loss=loss.detach(),
                outputs=tuple(x.detach() for x in outputs),
                gradients={},
                buffers={name: buffer.detach() for name, buffer in _buffers_of(step).items()},
            )
        return found, tuple(changed)

    def _step(self, make: Callable[[Tensor], Tensor]) -> tuple[Step, Any, Any]:
        """A copy of the model and its loss, and of the call's arguments."""
        memo: dict[int, Any] = {}
        args, kwargs = pytree.tree_map_only(Tensor, self._copied, tuple(self.call))
        targets = None
        if self.loss_fn is not None:
            targets = find_targets(self.loss_fn, self.model, args, kwargs)
        step = Step(
            copy_with(make, self.model, memo),
            copy_with(make, self.loss_fn, memo),
            targets,
            with_loss=True,
            precision=self.precision,
        )
        return step, args, kwargs

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, copy=True)

    def of_graph(self, watch: Watch | None = None) -> Numbers:
        """The numbers by the captured graph."""
        graph = self.graph
        args, kwargs = self.call
        inputs = [x.detach().to(self.device) for x in self.signature.flatten(args, kwargs)]
        state: dict[str, Tensor] = {}
        for owner, name_of in ((self.model, str), (self.loss_fn, loss_fn_name)):
            if isinstance(owner, nn.Module):
                for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
                    state[name_of(name)] = tensor.detach().to(self.device)
        with self._set_up():
            for value in graph.parameters:
                if value.differentiable and value.target is not None:
                    state[value.target] = state[value.target].detach().requires_grad_()
            found = evaluate(graph, state, inputs, self.device, watch)
            assert graph.loss is not None
            names = {v.index: v.target for v in graph.values if v.kind is ValueKind.BUFFER}
            buffers = {str(name): state[str(name)] for name in names.values()}
            buffers |= {str(names[old]): found[new] for old, new in graph.mutations}
            outputs = [found[index] for index in graph.outputs]
            return self._numbers(found[graph.loss], outputs, state, buffers)

    def _numbers(
        self,
        loss: Tensor,
        outputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> Numbers:
        for name, parameter in parameters.items():
            if name not in self.checked and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        if loss.requires_grad:
            loss.sum().backward()
        grads = {name: parameters[name].grad for name in self.checked}
        return Numbers(
            loss=loss.detach(),
            outputs=tuple(x.detach() for x in outputs),
            gradients={
                name: g.to_dense() if g is not None and g.is_sparse else g
                for name, g in grads.items()
            },
            buffers={name: buffer.detach() for name, buffer in buffers.items()},
        )

    @contextlib.contextmanager
    def _set_up(self, *, warns: bool = False) -> Iterator[None]:
        draws = FixedDraws(self.device) if self.is_random else contextlib.nullcontext()
        with (
            kept_randomness(self.device),
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.enable_grad(),
            draws,
        ):
            if not warns:
                warnings.simplefilter("ignore")
            yield


def _reversed(x: Tensor) -> Tensor:
    return x.flip(0) if x.dim() else x


def _buffers_of(step: Step) -> dict[str, Tensor]:
    buffers = dict(step.model.named_buffers())
    if isinstance(step.loss_fn, nn.Module):
        buffers |= {loss_fn_name(name): x for name, x in step.loss_fn.named_buffers()}
    return buffers


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextlib.contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """A context after which every random number generator is in the state it had before."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with kept_generators(device):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _seed_elsewhere(seed: int) -> str:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return _state_elsewhere()


def _state_elsewhere() -> str:
    """The state of Python's and NumPy's generators."""
    text = repr(random.getstate())
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state()
        text += repr((keys.tobytes(), *rest))
    return text


def off_by(got: Tensor | None, expected: Tensor | None) -> tuple[float, float]:
    """The 2-norm of the difference, and that of the expected tensor; None counts as zero."""
    if got is None or expected is None:
        given = got if got is not None else expected
        size = 0.0 if given is None else norm_of(given)
        return size, size if got is None else 0.0
    if got.shape != expected.shape:
        return math.inf, norm_of(expected)
    same = (got == expected) | (got.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0, norm_of(expected)
    # Equal infinities or NaNs on both sides are no difference; a NaN on one side alone is one.
    difference = torch.where(same, 0, got.to(_wide(got)) - expected.to(_wide(expected)))
    size = norm_of(difference)
    return (math.inf if math.isnan(size) else size), norm_of(expected)


def norm_of(x: Tensor) -> float:
    wide = x.detach().to(_wide(x))
    return float(torch.linalg.vector_norm(wide))


def _wide(x: Tensor) -> torch.dtype:
    if x.is_complex():
        return torch.complex128
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else _own(x)


def _own(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float64
