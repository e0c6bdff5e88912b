"""The type of a rule, and the registry of the rules of all operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from autopar.base.errors import PlanError, RuleError
from autopar.cost_models.calls import OpCall
from autopar.cost_models.op_work import WorkFn, set_work
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.rules.context import LocalContext
from autopar.rules.derivative import KEEPS_OPERANDS, Keeps
from autopar.rules.kernels import InternalCollective, LocalCall
from autopar.rules.space import Space
from autopar.rules.totals import MeanFn

SpaceFn = Callable[[Op, Sequence[Value], Sequence[Value | None]], Space | None]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments, with tensors, or their specs where a call is priced."""
ArgumentsFn = Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], Arguments]
LowerFn = Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], Any]
CollectivesFn = Callable[[Op, Space, Choice, Mesh, Sequence[Value]], tuple[InternalCollective, ...]]
KernelsFn = Callable[[Op, Space, Choice, Mesh, OpCall], tuple[LocalCall, ...] | None]


class Layer(StrEnum):
    """Layer types that known strategies treat differently."""

    DENSE = "dense"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The knowledge about one op family; everything but ``space`` has a default.

    On a shard a device calls the operator itself, or ``runs_as``, with the ``arguments`` adapted to
    the shard. Where that is not enough, ``lower`` runs the op there, ``collectives`` lists the
    communication inside it, and ``kernels`` the calls it makes (None where they are the op's own).
    ``keeps``: what the derivative reads. ``mean``: for an op that computes a mean, how it is a sum
    divided by a total. ``layer``: the layer type for known strategies, if any; ``heads``: the
    dimensions of an attention that are its heads. ``work``: operations and bytes of a call, for
    operators without a formula in the cost models.
    """

    space: SpaceFn
    arguments: ArgumentsFn | None = None
    runs_as: Any = None
    lower: LowerFn | None = None
    collectives: CollectivesFn | None = None
    kernels: KernelsFn | None = None
    keeps: Keeps = KEEPS_OPERANDS
    mean: MeanFn | None = None
    layer: Layer | None = None
    heads: frozenset[str] = frozenset()
    work: WorkFn | None = None


OpRuleFn = Callable[[Op], Rule]
"""Makes the rule of an op, for operators that have none of their own."""

_RULES: dict[str, Rule] = {}


def register(
    *targets: str,
    arguments: ArgumentsFn | None = None,
    runs_as: Any = None,
    lower: LowerFn | None = None,
    collectives: CollectivesFn | None = None,
    kernels: KernelsFn | None = None,
    keeps: Keeps = KEEPS_OPERANDS,
    mean: MeanFn | None = None,
    layer: Layer | None = None,
    heads: Iterable[str] = (),
    work: WorkFn | None = None,
) -> Callable[[SpaceFn], SpaceFn]:
    """Register the rule of operators named as in ``str(op)``: ``"mylib.product.default"``.

    The decorated function states how the work of the op divides. It gets the `Op` and the `Value`
    of each tensor operand and output (None for an unused output) and returns a `Space`, or None
    where this call cannot be split. For ``product(x[m, k], w[k, n]) -> [m, n]``::

        @autopar.rules.register("mylib.product.default")
        def product_space(op, inputs, outputs):
            (m, k), n = inputs[0].shape, inputs[1].shape[1]
            builder = autopar.rules.SpaceBuilder()
            m, k, n = builder.dim("m", m), builder.dim("k", k), builder.dim("n", n)
            layout = autopar.rules.layout
            return builder.build(
                [layout(m, k), layout(k, n)], [layout(m, n)],
                sums=frozenset({k}),  # the output lacks k: split on it, outputs are partial sums
                anchor=True,
            )

    ``builder.whole(size)`` makes a dimension that cannot be split. The options:

    * ``arguments(context, args, kwargs)``: the arguments for a shard, where they depend on whole
      shapes (the groups of a convolution: ``context.num_shards("g")`` is the number of devices that
      share a dimension).
    * ``runs_as``: an operator to call on a shard instead of this one.
    * ``lower(context, args, kwargs)``: runs the op on a shard, where it has to do something else;
      ``context.all_reduce`` sums over devices.
    * ``collectives``: the communication inside ``lower``, for the cost model.
    * ``kernels``: the calls that ``lower`` makes, where they are not the op itself.
    * ``keeps``: what the derivative reads, for the count of memory, where that is not every
      floating-point operand.
    * ``mean``: how the op is a sum divided by a total, where it computes a mean.
    * ``layer``, ``heads``: the layer type of the op, and its dimensions of attention heads, for
      known strategies such as tensor parallelism.
    * ``work(call)``: operations and bytes of a call (see `autopar.cost_models.work`); without, the
      op is priced by the bytes of its tensors.

    The op itself needs a fake implementation and, to be trained through, a registered derivative.
    `check_rule` checks a rule: it compares every choice with the unsplit op.

    Raises RuleError for a malformed name, and PlanError for an operator that has a rule already.
    """
    _check_names(targets)

    def wrap(space: SpaceFn) -> SpaceFn:
        for target in targets:
            if target in _RULES:
                raise PlanError(f"operator {target} has a rule already")
            _RULES[target] = Rule(
                space=space,
                arguments=arguments,
                runs_as=runs_as,
                lower=lower,
                collectives=collectives,
                kernels=kernels,
                keeps=keeps,
                mean=mean,
                layer=layer,
                heads=frozenset(heads),
                work=work,
            )
            if work is not None:
                set_work(target, work)
        return space

    return wrap


def _check_names(targets: Sequence[Any]) -> None:
    for target in targets or ("",):
        parts = target.split(".") if isinstance(target, str) else ()
        if len(parts) != 3 or not all(part.isidentifier() for part in parts):
            raise RuleError(
                f"cannot register a rule for {target!r}; an operator is named as in str(op), with "
                "namespace, name and overload: @autopar.register_rule('mylib.product.default') is "
                "the rule of torch.ops.mylib.product.default"
            )


def unregister(target: str) -> None:
    """Remove the rule of an operator, for example to register another.

    Raises PlanError for an operator without a rule.
    """
    if target not in _RULES:
        raise PlanError(f"operator {target} has no rule")
    if _RULES.pop(target).work is not None:
        set_work(target, None)


def register_pointwise(rule: OpRuleFn) -> OpRuleFn:
    """Register the function that makes the rule of an operator that torch tags as pointwise.

    It applies to operators without a rule of their own.
    """
    global _POINTWISE
    _POINTWISE = rule
    return rule


_POINTWISE: OpRuleFn | None = None


def register_namespace(namespace: str) -> Callable[[OpRuleFn], OpRuleFn]:
    """Register the function that makes the rules of all operators of a namespace."""

    def wrap(rule: OpRuleFn) -> OpRuleFn:
        _NAMESPACES[namespace] = rule
        return rule

    return wrap


_NAMESPACES: dict[str, OpRuleFn] = {}


def rule_of(op: Op) -> Rule | None:
    """The rule of an op; None if it has none."""
    rule = _RULES.get(op.target_name)
    if rule is None and (made := _NAMESPACES.get(op.target_name.partition(".")[0])) is not None:
        return made(op)
    if rule is None and torch.Tag.pointwise in getattr(op.target, "tags", ()):
        return None if _POINTWISE is None else _POINTWISE(op)
    return rule


def registered_targets() -> tuple[str, ...]:
    """The names of all operators with a registered rule, sorted."""
    return tuple(sorted(_RULES))


def space_of(op: Op, values: Sequence[Value]) -> Space | None:
    """The iteration space of an op; None without a rule or where all outputs are fixed.

    ``values`` are all values of the op's graph.
    """
    rule = rule_of(op)
    if rule is None or all(o is None or values[o].fixed for o in op.outputs):
        return None
    outputs = tuple(None if o is None else values[o] for o in op.outputs)
    return rule.space(op, tuple(values[i] for i in op.inputs), outputs)


def keeps_of(op: Op) -> Keeps:
    """The values that the derivative of an op reads.

    An overload without a rule is treated like another overload of the operator that has one.
    """
    rule = rule_of(op)
    if rule is None:
        operator = op.target_name.rpartition(".")[0] + "."
        rule = next((r for target, r in _RULES.items() if target.startswith(operator)), None)
    return KEEPS_OPERANDS if rule is None else rule.keeps
