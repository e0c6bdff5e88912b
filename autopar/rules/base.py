"""What a rule is: the iteration space of an op, and what follows from it.

Every op is a nest of named dimensions; a tensor operand is a layout over them, one tuple of
dimension names per tensor dimension (several names where a tensor dimension is their product, as
after a flattening view). A *choice* gives each mesh axis one dimension to split, or none. From the
space and the choice follow, for every axis,

- what the op needs of each operand: ``S`` where the dimension is in its layout, else ``V`` (each
  device computes with the whole operand on another share of the work) or ``R`` where no gradient
  flows; ``P`` for operands that enter a sum once, such as a bias, when the sum is split;
- what it supplies for each output: ``S`` where the dimension is in its layout, else ``P``, a
  partial sum; ``R`` where the op reduces inside (batch-norm statistics).

No axis assigned means ``R`` all over: computed redundantly. An op with no rule has only that.

A dimension whose size does not divide is padded with zeros (see autopar.ir.placement). A rule names
the dimensions where its op bears that: its outputs stay finite, and so do its gradients where the
gradient of the output is zero. What the op then leaves behind the end is zeroed, in the value and
in the gradient, unless the rule says that zeros stay zeros.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import PlanError, RuleError
from autopar.comm.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_MAX,
    AXIS_INDEX,
    apply_step,
    identity,
    with_gradient,
)
from autopar.cost_models.calls import OpCall
from autopar.ir.graph import Op, Ref, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import P, Placement, Placements, R, S, Step, StepKind, V, is_valid
from autopar.rules.kernels import LocalCall

Layout = tuple[tuple[str, ...], ...]
"""Per tensor dimension, the iteration dimensions whose product it is (outermost first)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The iteration space of one op: named dimensions, and each operand's layout over them.

    ``sizes``: size of each dimension. ``sums``: dimensions that an output without them sums
    over. ``whole``: dimensions that cannot be split. ``partial_inputs``: operands that enter the
    sum once. ``reduced``: dimensions over which the op reduces inside, so that outputs without
    them come out complete. ``plain``: dimensions that take the contiguous split only. ``padded``:
    dimensions that may be split into parts that do not divide them; ``clean``: those of them where
    zeros behind the end stay zeros by themselves, in outputs and gradients. ``linear``: operands
    that may be partial sums, the outputs then being partial sums too. ``anchor``: whether a split
    of this op is worth carrying to its neighbours (products, attention), or the op only goes along
    (element-wise ops, views).
    """

    sizes: Mapping[str, int]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    sums: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    partial_inputs: frozenset[int] = frozenset()
    reduced: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    padded: frozenset[str] = frozenset()
    clean: frozenset[str] = frozenset()
    linear: frozenset[int] = frozenset()
    anchor: bool = False

    def splittable(self) -> tuple[str, ...]:
        """Dimensions that may be split, in order: every output must have them or sum over them."""
        return tuple(
            name
            for name, size in self.sizes.items()
            if size > 1 and name not in self.whole and self._outputs_allow(name)
        )

    def _outputs_allow(self, name: str) -> bool:
        return all(
            name in self.sums or name in self.reduced or any(name in factors for factors in layout)
            for layout in self.outputs
        )


@dataclass(frozen=True, slots=True)
class Split:
    """One axis's part in a choice: the dimension and where in it the digit starts."""

    dim: str
    base: int = 1

    def __str__(self) -> str:
        return self.dim + (f"/{self.base}" if self.base != 1 else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """How each mesh axis splits one op; None computes redundantly along that axis."""

    splits: tuple[Split | None, ...]

    def __str__(self) -> str:
        return " ".join("-" if s is None else str(s) for s in self.splits)

    def axes_of(self, dim: str) -> tuple[int, ...]:
        return tuple(a for a, s in enumerate(self.splits) if s is not None and s.dim == dim)

    @property
    def is_redundant(self) -> bool:
        return all(split is None for split in self.splits)


_BASE = re.compile(r"[1-9][0-9]{0,17}")


def parse_choice(text: str) -> Choice:
    """Read back ``str(choice)``; raises PlanError on anything else."""
    splits: list[Split | None] = []
    for word in text.split():
        dim, slash, base = word.partition("/")
        if word == "-":
            splits.append(None)
        elif not dim.isidentifier() or (slash and not _BASE.fullmatch(base)):
            raise PlanError(
                f"choice {text!r}: {word!r} is neither '-' nor 'dim' nor 'dim/base', where base is "
                "at least 1"
            )
        else:
            splits.append(Split(dim, int(base or 1)))
    return Choice(tuple(splits))


LINEAR_SPLIT = Split("+")
"""The part of an op that is linear: of partial sums it makes a partial sum."""

Bases = Mapping[str, tuple[int, ...]]
"""Per dimension, the further digits (beside 1) at which it may be split."""


def enumerate_choices(space: Space | None, mesh: Mesh, bases: Bases) -> tuple[Choice, ...]:
    """All valid choices of an op, the redundant one first; only that for an op with no rule."""
    if space is None:
        return (Choice((None,) * mesh.num_axes),)
    options: list[Split | None] = [None]
    for dim in space.splittable():
        options.extend(Split(dim, base) for base in (1, *bases.get(dim, ())))
    choices = map(Choice, itertools.product(options, repeat=mesh.num_axes))
    return tuple(choice for choice in choices if is_valid_choice(space, choice, mesh))


def is_valid_choice(space: Space, choice: Choice, mesh: Mesh) -> bool:
    """Whether every split is a disjoint digit, whole or padded, of a dimension that allows it."""
    names = list(space.sizes)
    allowed = set(space.splittable())
    for split in choice.splits:
        if split is None or (split == LINEAR_SPLIT and space.linear):
            continue
        if split.dim not in allowed or (split.base != 1 and split.dim in space.plain):
            return False
    placements = tuple(
        R if split is None or split == LINEAR_SPLIT else S(names.index(split.dim), outer)
        for split, outer in zip(choice.splits, _outers(choice, mesh))
    )
    if not is_valid(placements, tuple(space.sizes.values()), mesh):
        return False
    return all(_may_pad(space, dim) for dim in padded_dims(space, choice, mesh))


def padded_dims(space: Space, choice: Choice, mesh: Mesh) -> tuple[str, ...]:
    """The dimensions that ``choice`` splits into parts that do not divide them."""
    split = {s.dim for s in choice.splits if s is not None}
    return tuple(
        d for d in space.sizes if d in split and space.sizes[d] % mesh.size(choice.axes_of(d))
    )


def _may_pad(space: Space, dim: str) -> bool:
    """Whether the rule allows it, and ``dim`` is a tensor dimension of its own everywhere."""
    return dim in space.padded and all(
        all(f == dim or space.sizes[f] == 1 for f in factors)
        for operand in (*space.inputs, *space.outputs)
        for factors in operand
        if dim in factors
    )


def _outers(choice: Choice, mesh: Mesh) -> list[int]:
    """Where each axis's digit starts: behind those of earlier axes with the same split."""
    outers: list[int] = []
    for axis, split in enumerate(choice.splits):
        if split is None:
            outers.append(1)
            continue
        earlier = (a for a in range(axis) if choice.splits[a] == split)
        outers.append(split.base * math.prod(mesh.axis_sizes[a] for a in earlier))
    return outers


def needs(
    space: Space | None, choice: Choice, mesh: Mesh, differentiable: Sequence[bool]
) -> tuple[Placements, ...]:
    """Per operand, what the op needs under ``choice``."""
    if space is None:
        return tuple(_whole(mesh, flows) for flows in differentiable)
    outers = _outers(choice, mesh)
    result = []
    for operand, layout in enumerate(space.inputs):
        placements = []
        whole = _whole(mesh, differentiable[operand])
        for axis, (split, outer) in enumerate(zip(choice.splits, outers)):
            found = _locate(space, layout, split, outer)
            if split is None:
                placements.append(whole[axis])
            elif split == LINEAR_SPLIT and operand in space.linear:
                placements.append(P)
            elif found is not None:
                placements.append(found)
            elif operand in space.partial_inputs and split.dim in space.sums:
                placements.append(P)
            else:
                placements.append(V if differentiable[operand] else R)
        result.append(tuple(placements))
    return tuple(result)


def supplies(
    space: Space | None, choice: Choice, mesh: Mesh, num_outputs: int
) -> tuple[Placements, ...]:
    """Per output, what the op supplies under ``choice``."""
    whole = _whole(mesh, True)
    if space is None:
        return (whole,) * num_outputs
    outers = _outers(choice, mesh)
    result = []
    for layout in space.outputs:
        placements = []
        for axis, (split, outer) in enumerate(zip(choice.splits, outers)):
            found = _locate(space, layout, split, outer)
            if split is None or (found is None and split.dim in space.reduced):
                placements.append(whole[axis])
            else:
                placements.append(found if found is not None else P)
        result.append(tuple(placements))
    return tuple(result)


def _whole(mesh: Mesh, flows: bool) -> Placements:
    """A value that an op does not split: replicated; along an axis in time varying, so that its
    gradient is accumulated there.
    """
    return tuple(V if flows and mesh.is_sequential(a) else R for a in range(mesh.num_axes))


def _locate(space: Space, layout: Layout, split: Split | None, outer: int) -> Placement | None:
    if split is None:
        return None
    for tensor_dim, factors in enumerate(layout):
        if split.dim in factors:
            before = factors[: factors.index(split.dim)]
            return S(tensor_dim, math.prod(space.sizes[f] for f in before) * outer)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalCollective:
    """Communication inside a lowered op, for the price: bytes on one device, over these axes."""

    kind: str
    axes: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContext:
    """What a lowering function knows: the op, its choice, and the local shapes around it."""

    op: Op
    space: Space
    choice: Choice
    mesh: Mesh
    output_shapes: tuple[tuple[int, ...], ...]
    device: torch.device | None = None
    """Where the program runs, for arguments that name the device of the capture."""

    def axes_of(self, *dims: str) -> tuple[int, ...]:
        return tuple(sorted(a for dim in dims for a in self.choice.axes_of(dim)))

    def num_shards(self, *dims: str) -> int:
        return self.mesh.size(self.axes_of(*dims))

    def all_reduce(self, x: Tensor, axes: tuple[int, ...], *, varying: bool = False) -> Tensor:
        """Sum over the group; ``varying`` where each device uses the sum on its own share."""
        if self.mesh.size(axes) == 1:
            return x
        target = V if varying else R
        step = Step(StepKind.ALL_REDUCE, axes, P, target, 1, 1, 0, 0, tuple(x.shape))
        return apply_step(x, step, self.mesh)

    def all_reduce_max(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Maximum over the group; no gradient flows."""
        if self.mesh.size(axes) == 1:
            return x
        result: Tensor = ALL_REDUCE_MAX(
            x.detach(), self.mesh.axes_label(axes), self.mesh.size(axes)
        )
        return result

    def all_reduce_data(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sum over the group of values that no gradient flows through (counts, statistics)."""
        if self.mesh.size(axes) == 1:
            return x
        result: Tensor = ALL_REDUCE(x.detach(), self.mesh.axes_label(axes), self.mesh.size(axes))
        return result

    def all_gather_data(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """``[num, *shape]``: the values of all devices of the group, through which no gradient
        flows, in the group's order."""
        own = x.detach().unsqueeze(0)
        if self.mesh.size(axes) == 1:
            return own
        result: Tensor = ALL_GATHER(own, self.mesh.axes_label(axes), self.mesh.size(axes), 0, 1)
        return result

    def local_size(self, dim: str) -> int:
        """This device's part of ``dim``, padding included."""
        return -(-self.space.sizes[dim] // self.num_shards(dim))

    def shard_start(self, like: Tensor, dim: str) -> Tensor | int:
        """Global index of this device's first element of ``dim`` (a plain split only)."""
        axes = self.axes_of(dim)
        if self.mesh.size(axes) == 1:
            return 0
        index: Tensor = AXIS_INDEX(like, self.mesh.axes_label(axes), self.mesh.size(axes))
        return index * self.local_size(dim)

    def weighted(self, mean: Tensor, *dims: str) -> Tensor:
        """A mean over this device's part of ``dims``, times its share of them."""
        share = math.prod(self.local_size(d) / self.space.sizes[d] for d in dims)
        return mean if share == 1 else mean * share

    def is_padded(self, dim: str) -> bool:
        return self.space.sizes[dim] % self.num_shards(dim) != 0

    def is_filled(self, like: Tensor, dim: str) -> Tensor:
        """For each local element of ``dim``, whether it lies before the end: ``bool[local]``."""
        local = torch.arange(self.local_size(dim), device=like.device)
        return local + self.shard_start(like, dim) < self.space.sizes[dim]


SpaceFn = Callable[[Op, Sequence[Value], Sequence[Value | None]], Space | None]
LowerFn = Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], Any]
CollectivesFn = Callable[[Op, Space, Choice, Mesh, Sequence[Value]], tuple[InternalCollective, ...]]
KernelsFn = Callable[[Op, Space, Choice, Mesh, OpCall], tuple[LocalCall, ...] | None]


def call_op(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the operator itself; tuples among the arguments become the lists it expects."""
    return op.target(*_lists(args), **{k: _lists(v) for k, v in kwargs.items()})


_RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default"})


def call_target(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The lowering of most rules: the same operator on the local shards.

    Views become reshapes: a shard may have other strides than the whole tensor had at capture.
    """
    if context.op.target_name in _RESHAPES:
        return args[0].reshape(args[1])
    return call_op(context.op, args, kwargs)


def _lists(node: Any) -> Any:
    return [_lists(n) for n in node] if isinstance(node, tuple) else node


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule of one op family: its space, how it runs on shards, what it communicates inside.

    ``kernels`` gives the calls that ``lower`` makes where they are not the op's own, which it gets
    at its local shapes; None where they are.
    """

    space: SpaceFn
    lower: LowerFn = call_target
    collectives: CollectivesFn | None = None
    kernels: KernelsFn | None = None


_RULES: dict[str, Rule] = {}


def register(
    *targets: str,
    lower: LowerFn | None = None,
    collectives: CollectivesFn | None = None,
    kernels: KernelsFn | None = None,
) -> Callable[[SpaceFn], SpaceFn]:
    """Register the rule of operators named as in ``str(op)``: ``"mylib.product.default"``.

    The decorated function says how the op's work divides. It gets the `Op` and the `Value` of
    each tensor operand and output (None for an output that nobody uses) and returns a `Space`, or
    None where this call cannot be split. For ``product(x[m, k], w[k, n]) -> [m, n]``::

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

    ``builder.whole(size)`` makes a dimension that cannot be split. Where the op needs other
    arguments on a shard, ``lower(context, args, kwargs)`` runs it there:
    ``context.num_shards("k")`` tells how many devices share a dimension, ``context.all_reduce``
    adds over them. ``collectives`` lists such communication for the cost model, ``kernels`` what
    ``lower`` calls where that is not the op itself. The op itself
    needs a fake implementation and, to be trained through, a registered derivative. Check a rule
    with `check_rule`, which compares every choice with the unsplit op.

    Raises RuleError for what is no such name, and PlanError for one that has a rule already.
    """
    _check_names(targets)

    def wrap(space: SpaceFn) -> SpaceFn:
        for target in targets:
            if target in _RULES:
                raise PlanError(f"operator {target} has a rule already")
            _RULES[target] = Rule(
                space=space,
                lower=lower or call_target,
                collectives=collectives,
                kernels=kernels,
            )
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
    """Remove the rule of an operator, as before registering another; PlanError if it has none."""
    if target not in _RULES:
        raise PlanError(f"operator {target} has no rule")
    del _RULES[target]


def register_pointwise(rule: Rule) -> None:
    """The rule of every operator that torch itself tags as pointwise and that has none."""
    global _POINTWISE
    _POINTWISE = rule


_POINTWISE: Rule | None = None


def rule_of(op: Op) -> Rule | None:
    """The rule of an op, or None."""
    rule = _RULES.get(op.target_name)
    if rule is None and torch.Tag.pointwise in getattr(op.target, "tags", ()):
        return _POINTWISE
    return rule


def registered_targets() -> tuple[str, ...]:
    """Every operator that has a rule."""
    return tuple(sorted(_RULES))


def space_of(op: Op, values: Sequence[Value]) -> Space | None:
    """The iteration space of an op, or None: no rule, or nothing to split (fixed values)."""
    rule = rule_of(op)
    if rule is None or all(o is None or values[o].fixed for o in op.outputs):
        return None
    outputs = tuple(None if o is None else values[o] for o in op.outputs)
    space = rule.space(op, tuple(values[i] for i in op.inputs), outputs)
    return None if space is None else replace(space, linear=linear_operands(op))


_LINEAR = frozenset(
    {
        "add", "sub", "neg", "sum", "mean", "clone", "contiguous", "_to_copy", "to", "view",
        "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose",
        "t", "permute", "expand", "slice", "narrow", "select", "stack", "cat", "alias",
    }
)  # fmt: skip
"""Linear in all operands together."""


def linear_operands(op: Op) -> frozenset[int]:
    """Operands that may be partial sums together, the outputs then being partial sums.

    A constant that is added is no sum over anything, so ``x + 1`` has none.
    """
    name = op.target_name.split(".")[1]
    if name in ("add", "sub") and len(op.inputs) < 2:
        return frozenset()
    if name in ("mul", "div"):
        return frozenset({0})
    return frozenset(range(len(op.inputs))) if name in _LINEAR else frozenset()


def run_local(context: LocalContext, operands: Sequence[Tensor]) -> list[Any]:
    """Run one op on its local operands as its choice asks; returns its outputs."""
    rule, op = rule_of(context.op), context.op
    if rule is None or context.choice.is_redundant:
        return _as_list(call_target(context, *_arguments(context, operands)))
    space = context.space
    dims = [d for d in padded_dims(space, context.choice, context.mesh) if d not in space.clean]
    for dim in dims:
        operands = [_shield(context, x, lay, dim) for x, lay in zip(operands, space.inputs)]
    results = _as_list(rule.lower(context, *_arguments(context, operands)))
    for dim in dims:
        results = [
            r if o is None else _clear(context, r, lay, dim)
            for r, o, lay in zip(results, op.outputs, space.outputs)
        ]
    return results


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def _arguments(
    context: LocalContext, operands: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = context.op.bind(list(operands))
    if context.device is None:
        return args, kwargs
    return _on_device(args, context.device), _on_device(kwargs, context.device)


def _on_device(node: Any, device: torch.device) -> Any:
    """Arguments with every captured device replaced by the one the program runs on."""
    if isinstance(node, torch.device):
        return device
    if isinstance(node, dict):
        return {k: _on_device(v, device) for k, v in node.items()}
    if isinstance(node, tuple) and not isinstance(node, Ref):
        return tuple(_on_device(n, device) for n in node)
    return node


def _clear(context: LocalContext, x: Tensor, layout: Layout, dim: str) -> Tensor:
    """Zeros behind the end of ``dim``."""
    tensor_dim = next((d for d, factors in enumerate(layout) if dim in factors), None)
    if tensor_dim is None:
        return x
    filled = context.is_filled(x, dim)
    return torch.where(filled.view(-1, *[1] * (x.dim() - 1 - tensor_dim)), x, x.new_zeros(()))


def _shield(context: LocalContext, x: Tensor, layout: Layout, dim: str) -> Tensor:
    """``x``, with zeros behind the end of ``dim`` in its gradient."""
    if not x.requires_grad or not any(dim in factors for factors in layout):
        return x
    return with_gradient(x, identity, lambda grad: _clear(context, grad, layout, dim))


class SpaceBuilder:
    """Names the dimensions of a space one by one."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.kept_whole: set[str] = set()

    def dim(self, name: str, size: int) -> str:
        """A dimension that may be split."""
        self.sizes[name] = size
        return name

    def dims(self, prefix: str, sizes: Sequence[int]) -> tuple[str, ...]:
        """One dimension per size: ``prefix0 prefix1 ...``."""
        return tuple(self.dim(f"{prefix}{i}", size) for i, size in enumerate(sizes))

    def whole(self, size: int) -> str:
        """A dimension that cannot be split."""
        name = self.dim(f"w{len(self.kept_whole)}", size)
        self.kept_whole.add(name)
        return name

    def build(
        self,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        *,
        padded: Iterable[str] = (),
        clean: Iterable[str] = (),
        **options: Any,
    ) -> Space:
        """A space of the dimensions named so far; ``clean`` ones need not be in ``padded``."""
        return Space(
            sizes=self.sizes,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            whole=frozenset(self.kept_whole),
            padded=frozenset(padded) | frozenset(clean),
            clean=frozenset(clean),
            **options,
        )


def layout(*dims: str | tuple[str, ...]) -> Layout:
    """A layout from names; a tuple is a product of names."""
    for dim in dims:
        factors = (dim,) if isinstance(dim, str) else dim
        if not isinstance(factors, tuple) or not all(isinstance(f, str) for f in factors):
            raise RuleError(
                f"layout{dims} has {dim!r}; each tensor dimension is the name of an iteration "
                "dimension, or a tuple of names whose product it is: builder.dim('k', size) makes "
                "one that may be split, builder.whole(size) one that may not"
            )
    return tuple((d,) if isinstance(d, str) else d for d in dims)
