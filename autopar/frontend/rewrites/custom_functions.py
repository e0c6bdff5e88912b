"""A model's own ``torch.autograd.Function`` as operators, so that its backward pass is kept.

``torch.export`` records what such a function computes and loses its gradient, which may differ from
that of the recorded operators (a straight-through estimator, a clipped gradient). While a model is
exported, each call becomes a call of an operator whose gradient is the function's own, computed by
running the function once more. A function whose forward and backward passes are element-wise is
tagged as such and split like any other element-wise op; the others are computed whole on every
device.

Functions that draw random numbers (the second run would draw others), or that take modules or other
objects, are refused: their gradient is not a function of their tensors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from autopar.base.accelerators import kept_generators
from autopar.base.errors import CaptureError
from autopar.base.torch_private import FakeTensorMode, autograd_again, outside_of_tracing, pytree
from autopar.ir.tracing import trace_fx

_NAMESPACE = "autopar_functions"
_Function = torch.autograd.Function
_apply = _Function.__dict__["apply"].__func__
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_known: dict[str, type] = {}
_calls: dict[str, tuple[FunctionCall, tuple[tuple[torch.Size, torch.dtype], ...]]] = {}
_FACTORS = (1e-3, 1.0, 1e3)


@functools.cache
def adds_up(operator: str) -> bool:
    """Whether gradients through an operator may be summed behind it instead of before.

    True unless the operator is an autograd function whose backward pass is not linear in the
    gradients that it is given, as a clipped gradient or its sign. It runs on random operands.
    """
    return operator not in _calls or _is_linear(*_calls[operator])


@contextlib.contextmanager
def functions_as_operators() -> Iterator[None]:
    """A context in which calls of a user's functions that need a gradient are calls of operators.

    It applies to this thread alone: another one may be training.
    """
    here = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return _apply(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            return _without_checkpoint(args)
        tensors = [a for a in args if isinstance(a, Tensor)]
        needed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if not needed or cls.__module__.partition(".")[0] == "torch":
            return _apply(cls, *args, **kwargs)
        return _call(cls, args, kwargs)

    _Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _Function.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]


def _without_checkpoint(args: tuple[Any, ...]) -> Any:
    """The function inside ``checkpoint(..., use_reentrant=True)``, run directly.

    Autograd runs the function again in the backward pass and gives its parameters a gradient only
    where one of its tensors needs one; so no gradient flows otherwise here either.
    """
    function, _, *operands = args
    is_recorded = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in operands
    )
    with torch.set_grad_enabled(is_recorded):
        return function(*operands)


def _call(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    others = [a for a in args if not isinstance(a, Tensor)]
    if kwargs or not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(others)):
        raise CaptureError(
            f"the autograd function {cls.__qualname__} is called with more than tensors and plain "
            "values, so its gradient cannot be kept. Pass it the tensors that it uses, one by one"
        )
    call = FunctionCall(cls, tuple(None if isinstance(a, Tensor) else (a,) for a in args))
    operands = [a for a in args if isinstance(a, Tensor)]
    result = _operator_of(call, operands)(*operands)
    return result if call.returns_tuple else result[0]


class FunctionCall:
    """A function with its plain arguments bound, which leaves its tensors.

    ``plain`` has None in place of each tensor, and a 1-tuple of the value elsewhere.
    """

    def __init__(self, cls: Any, plain: tuple[tuple[Any] | None, ...]) -> None:
        self.cls, self.plain = cls, plain
        self.returns_tuple = False
        self.has_gradient: tuple[bool, ...] = ()

    def apply(self, operands: Sequence[Tensor]) -> list[Tensor]:
        tensors = iter(operands)
        args = [next(tensors) if value is None else value[0] for value in self.plain]
        result = _apply(self.cls, *args)
        self.returns_tuple = isinstance(result, tuple)
        return list(result) if isinstance(result, tuple) else [result]

    def forward(self, *operands: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [x.clone() for x in self.apply(operands)]

    def backward(self, operands: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
        with autograd_again():
            gradients = self.gradients(operands, cotangents)
        return [g.clone() for g in gradients if g is not None]

    def gradients(
        self, operands: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """One gradient per operand; None where the function returns none."""
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
        outputs = zip(self.apply(leaves), cotangents)
        results = [(output, given) for output, given in outputs if output.requires_grad]
        found = torch.autograd.grad(
            [output for output, _ in results],
            [x for x in leaves if x.requires_grad],
            [given for _, given in results],
            allow_unused=True,
        )
        rest = iter(found)
        return [next(rest) if x.requires_grad else None for x in leaves]


def _operator_of(call: FunctionCall, operands: Sequence[Tensor]) -> Any:
    """The operator of such calls, created on first use; ``call`` records what it returns."""
    tags = _studied(call, operands)
    kinds = [(x.dtype, x.is_floating_point()) for x in operands]
    cls = call.cls
    key = f"{cls.__module__}.{cls.__qualname__}{call.plain}{kinds}{call.has_gradient}{tags}"
    name = re.sub(r"\W", "_", cls.__name__) + hashlib.sha256(key.encode()).hexdigest()[:16]
    while _known.setdefault(name, cls) is not cls:  # another class of the same name was defined
        name += "_"
    found = getattr(getattr(torch.ops, _NAMESPACE), name, None)
    operator = found.default if found is not None else _define(name, call, len(operands), tags)
    _calls.setdefault(str(operator), (call, tuple((x.shape, x.dtype) for x in operands)))
    return operator


def _is_linear(call: FunctionCall, operands: Sequence[tuple[torch.Size, torch.dtype]]) -> bool:
    """Whether the backward pass is linear in its gradients, on random operands of these kinds."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    with kept_generators(torch.device("cpu")):
        values = [drawn(*kind) for kind in operands]
        try:
            with torch.no_grad():
                outputs = call.apply(values)
            for factor in _FACTORS:
                one, other = ([factor * drawn(x.shape, x.dtype) for x in outputs] for _ in range(2))
                both = [a + b for a, b in zip(one, other)]
                with torch.enable_grad():
                    parts = [call.gradients(values, given) for given in (one, other, both)]
                for a, b, whole in zip(*parts):
                    if whole is not None and not _is_sum(whole, a, b):
                        return False
        except Exception:  # it does not run on such operands: nothing is known
            return False
    return True


def _is_sum(whole: Tensor, one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return False
    size = one.abs() + other.abs()
    tolerance = 8 * torch.finfo(whole.dtype).eps * size
    return bool(((whole - (one + other)).abs() <= tolerance + torch.finfo(whole.dtype).tiny).all())


def _studied(call: FunctionCall, operands: Sequence[Tensor]) -> tuple[torch.Tag, ...]:
    """Run the call and its gradient on stand-ins; returns the tags of its operator."""
    with outside_of_tracing(), FakeTensorMode() as mode:
        fakes = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in operands]
        with torch.no_grad():
            outputs = call.apply(fakes)
        if not all(isinstance(x, Tensor) for x in outputs):
            raise CaptureError(
                f"the autograd function {call.cls.__qualname__} returns more than tensors, which a "
                "captured graph cannot hold"
            )
        cotangents = [torch.empty_like(x) for x in outputs]

        def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
            with torch.enable_grad():
                return [*call.apply(primals), *call.gradients(primals, tangents)]

        module = trace_fx(joint, mode, fakes, cotangents)
    results = next(n for n in module.graph.nodes if n.op == "output").args[0]
    call.has_gradient = tuple(g is not None for g in results[len(outputs) :])
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    tags = [set(getattr(target, "tags", ())) for target in targets]
    if any(torch.Tag.nondeterministic_seeded in found for found in tags):
        raise CaptureError(
            f"the autograd function {call.cls.__qualname__} draws random numbers, so its gradient "
            "cannot be found by running it again. Draw them outside, and pass them to it"
        )
    alike = len({x.shape for x in (*operands, *outputs)}) == 1
    identities = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
    element_wise = all(
        torch.Tag.pointwise in found or target in identities for target, found in zip(targets, tags)
    )
    return (torch.Tag.pointwise,) if alike and element_wise else ()


def _define(name: str, call: FunctionCall, num_operands: int, tags: tuple[torch.Tag, ...]) -> Any:
    qualified = f"{_NAMESPACE}::{name}"
    operand_list = ", ".join(f"Tensor x{i}" for i in range(num_operands))
    forward = torch.library.custom_op(
        qualified, call.forward, mutates_args=(), schema=f"({operand_list}) -> Tensor[]", tags=tags
    )
    backward = torch.library.custom_op(
        f"{qualified}_backward",
        call.backward,
        mutates_args=(),
        schema="(Tensor[] operands, Tensor[] cotangents) -> Tensor[]",
    )

    def fake(*operands: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [torch.empty_like(x) for x in call.apply(operands)]

    def fake_backward(operands: Sequence[Tensor], _: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty_like(x) for x, has in zip(operands, call.has_gradient) if has]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.outputs = [(x.shape, x.dtype, x.device) for x in output]

    def differentiate(ctx: Any, cotangents: Sequence[Tensor | None]) -> Any:
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x
            for x, (shape, dtype, device) in zip(cotangents, ctx.outputs)
        ]
        found = iter(backward(list(ctx.saved_tensors), given))
        gradients = [next(found) if has else None for has in call.has_gradient]
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    forward.register_fake(fake)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default
