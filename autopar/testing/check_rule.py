"""Numerical check of a rule: the op on shards, recombined, must equal the op on whole tensors.

`check_rule` takes an operator and example arguments, builds the graph of that one op, and for every
choice that the rule offers runs the op on all ranks of a mesh in one process. The operands are
scattered as the rule needs them, the results recombined as the rule supplies them, and outputs and
gradients compared with those of the op on whole tensors. autopar's own rules are tested with it; it
is also meant for users who `register` a rule for their own operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import RuleError
from autopar.base.torch_private import FakeTensorMode, canonical_call, is_overload, overloads_named
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Ref, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    P,
    Placements,
    R,
    State,
    format_placements,
    is_valid,
    local_shape,
    paddings,
)
from autopar.ir.tracing import trace_fx
from autopar.rules.choice import enumerate_choices, needs, padded_dims, supplies
from autopar.rules.context import LocalContext
from autopar.rules.local import call_op, run_local
from autopar.rules.registry import rule_of, space_of
from autopar.rules.space import Space
from autopar.testing.lockstep import LockstepMachine, Shards, gather, scatter

MESHES = (
    Mesh(("a",), (2,)),
    Mesh(("a",), (3,)),
    Mesh(("a",), (4,)),
    Mesh(("a", "b"), (2, 2)),
    Mesh(("a", "b"), (2, 3)),
)
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float32: 2e-4}
_DOUBLE_TOLERANCE = 1e-8
_FURTHER_DIGITS = (2, 3)
_UNINITIALIZED = ("aten.empty_like.default", "aten.new_empty.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedChoice:
    """A choice on a mesh that was compared with the unsplit op."""

    mesh: Mesh
    choice: Choice


def check_rule(
    target: Any, *args: Any, mesh: Mesh | None = None, **kwargs: Any
) -> tuple[CheckedChoice, ...]:
    """Compare every choice of a rule with the unsplit op; returns the choices compared.

    ``target`` is an operator overload such as ``torch.ops.aten.mm.default`` or
    ``torch.ops.mylib.op.default``; ``args`` and ``kwargs`` are example arguments for it, whole
    tensors and plain values. Every choice is tried on ``mesh``, by default on meshes of 2, 3, 4, 2
    x 2 and 2 x 3; sizes divisible by these offer the most choices. Outputs are compared, and the
    gradients of all floating-point operands (or, if some tensor of ``args`` requires a gradient, of
    those that do), within the tolerance of their dtype. For random ops and uninitialized memory
    only shapes are compared.

    Raises RuleError naming the target, the choice, and the operand or output that differs; also if
    the target has no rule, or no size is divisible so that nothing could be tried.
    """
    if not is_overload(target):
        raise RuleError(_what_to_pass(target))
    call = _WholeCall(target, args, kwargs)
    if rule_of(call.op) is None:
        raise RuleError(
            f"{call.op.target_name} has no rule, so it is computed redundantly; register one:\n"
            f"    @autopar.rules.register({call.op.target_name!r})\n"
            "    def space(op, inputs, outputs): ..."
        )
    space = space_of(call.op, call.values)
    if space is None:
        return ()
    _check_layouts(call, space)
    checked = []
    for on in MESHES if mesh is None else (mesh,):
        for choice in enumerate_choices(space, on, _further_digits(space)):
            _SplitCall(call, space, choice, on).check()
            checked.append(CheckedChoice(mesh=on, choice=choice))
    if mesh is None and space.splittable() and all(c.choice.is_redundant for c in checked):
        raise RuleError(
            f"rule of {call.op.target_name}: no split was tried, as no dimension of "
            f"{dict(space.sizes)} is divisible by 2, 3 or 4; pass example arguments of sizes 4, 6 "
            "or 12"
        )
    return tuple(checked)


def _what_to_pass(target: Any) -> str:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name.removeprefix("torch.ops.").removeprefix("aten.").partition(".")[0]
    found = overloads_named(name)
    fix = " or ".join(found[:4]) or "torch.ops.mylib.product.default"
    return (
        f"check_rule({target!r}): a rule belongs to one overload of an operator; write "
        f"check_rule({fix}, ...)"
    )


def _further_digits(space: Space) -> dict[str, tuple[int, ...]]:
    """Candidates for ``outer`` of each dimension, such as heads in a fused projection."""
    return {
        name: tuple(d for d in _FURTHER_DIGITS if size % d == 0 and size > d)
        for name, size in space.sizes.items()
    }


def _check_layouts(call: _WholeCall, space: Space) -> None:
    """Raise RuleError unless each layout matches the rank and the sizes of its tensor."""
    op, values = call.op, call.values
    sides = [("operand", i, v, lay) for i, (v, lay) in enumerate(zip(op.inputs, space.inputs))]
    sides += [("output", i, v, lay) for i, (v, lay) in enumerate(zip(op.outputs, space.outputs))]  # type: ignore[misc]
    if len(space.inputs) != len(op.inputs) or len(space.outputs) != len(op.outputs):
        raise RuleError(
            f"rule of {op.target_name}: {len(space.inputs)} operand and {len(space.outputs)} "
            f"output layouts for {len(op.inputs)} operands and {len(op.outputs)} outputs; return "
            "one layout for each tensor, in order of the arguments"
        )
    for side, position, index, layout in sides:
        if index is None:
            continue
        shape = values[index].shape
        for dim, factors in enumerate(layout):
            size = torch.Size(space.sizes[f] for f in factors).numel()
            if len(layout) != len(shape) or (factors and size != shape[dim]):
                raise RuleError(
                    f"rule of {op.target_name}: layout {layout} of {side} {position} gives "
                    f"dimension {dim} the size {size}, but its shape is {shape}"
                )


class _WholeCall:
    """The op on whole tensors: the one-op graph, its results and its gradients."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values: list[Value] = []
        self.operands: list[Tensor] = []
        self.chosen: list[bool] = []
        args, kwargs = canonical_call(target, args, kwargs)
        op = Op(
            index=0, name="op", target=target, args=self._read(args),
            kwargs=tuple((k, self._read(v)) for k, v in kwargs.items()),
            outputs=(), module_path="",
        )  # fmt: skip
        self.is_random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        self.is_random |= op.target_name in _UNINITIALIZED
        floating = [v.differentiable for v in self.values]
        chosen = self.chosen if any(self.chosen) else floating
        self.flows = (False,) * len(chosen) if self.is_random else tuple(chosen)
        self._run(op)
        outputs: list[int | None] = []
        for result in self.results:
            outputs.append(None if result is None else len(self.values))
            if result is not None:
                self._add("output", result, ValueKind.ACTIVATION, result.requires_grad)
        self.op = replace(op, outputs=tuple(outputs))

    def _read(self, node: Any) -> Any:
        if isinstance(node, Tensor):
            index = self._add("operand", node, ValueKind.INPUT, node.is_floating_point())
            self.operands.append(node.detach())
            self.chosen.append(node.requires_grad)
            return Ref(index)
        if isinstance(node, list | tuple):
            return tuple(self._read(item) for item in node)
        return node

    def _add(self, name: str, tensor: Tensor, kind: ValueKind, differentiable: bool) -> int:
        index = len(self.values)
        value = Value(
            index=index, name=f"{name}{index}", kind=kind, shape=tuple(tensor.shape),
            dtype=tensor.dtype, differentiable=differentiable,
        )  # fmt: skip
        self.values.append(value)
        return index

    def _run(self, op: Op) -> None:
        try:
            leaves, self.results = self._call(op, self.flows)
        except RuntimeError as error:
            if "not differentiable with respect to" not in str(error):
                raise
            self.flows = self._differentiable(op)
            leaves, self.results = self._call(op, self.flows)
        self.wanted = tuple(
            i for i, r in enumerate(self.results) if r is not None and r.requires_grad
        )
        if not self.wanted:
            self.flows = (False,) * len(self.flows)
        generator = torch.Generator().manual_seed(0)
        sources = [r for r in self.results if r is not None and r.requires_grad]
        self.cotangents = [_random_like(r, generator) for r in sources]
        try:
            self.gradients = _gradients(
                self.results, self.wanted, leaves, self.flows, self.cotangents
            )
        except (NotImplementedError, RuntimeError) as error:
            if "not implemented" not in str(error):
                raise
            # Without a derivative there are only outputs to compare.
            self.wanted, self.cotangents = (), []
            self.flows = (False,) * len(self.flows)
            self.gradients = [None] * len(leaves)

    def _call(self, op: Op, flows: Sequence[bool]) -> tuple[list[Tensor], list[Tensor | None]]:
        leaves = _leaves(self.operands, flows)
        args, kwargs = op.bind(list(leaves))
        with torch.enable_grad():
            return leaves, _tensors(call_op(op, args, kwargs))

    def _differentiable(self, op: Op) -> tuple[bool, ...]:
        """Which operands the operator is differentiable in, found by trying each alone."""
        flows = []
        for position, flow in enumerate(self.flows):
            alone = [flow and i == position for i in range(len(self.flows))]
            try:
                self._call(op, alone)
                flows.append(flow)
            except RuntimeError:
                flows.append(False)
        return tuple(flows)


class _SplitCall:
    """The op on the shards of every rank, under one choice."""

    def __init__(self, whole: _WholeCall, space: Space, choice: Choice, mesh: Mesh) -> None:
        self.whole, self.mesh, self.choice = whole, mesh, choice
        self.needs = needs(space, choice, mesh, whole.flows)
        self.supplies = supplies(space, choice, mesh, len(whole.op.outputs))
        for side, placements in (("operand", self.needs), ("output", self.supplies)):
            self._check_placements(side, placements)
        self.context = LocalContext(
            op=whole.op,
            space=space,
            choice=choice,
            mesh=mesh,
            output_shapes=tuple(
                () if r is None else local_shape(tuple(r.shape), p, mesh)
                for r, p in zip(whole.results, self.supplies)
            ),
        )

    def check(self) -> None:
        """Raise RuleError unless outputs and gradients equal those of the whole call."""
        generator = torch.Generator().manual_seed(1)
        operands = [
            _scatter(x, need, self.mesh, generator)
            for x, need in zip(self.whole.operands, self.needs)
        ]
        cotangents = [
            scatter(c, self.supplies[i], self.mesh)
            for i, c in zip(self.whole.wanted, self.whole.cotangents)
        ]
        try:
            outputs, gradients = self._run_ranks(operands, cotangents)
        except RuleError:
            raise
        except Exception as error:
            raise self._error("the op on shards", f"fails with {error!r}") from error
        for i, expected in enumerate(self.whole.results):
            if expected is not None:
                self._compare(f"output {i}", outputs[i], self.supplies[i], expected)
        for i, expected in enumerate(self.whole.gradients):
            if expected is not None:
                placements = tuple(_OF_GRADIENT.get(p.state, p) for p in self.needs[i])
                self._compare(f"the gradient of operand {i}", gradients[i], placements, expected)

    def _run_ranks(
        self, operands: Sequence[Shards], cotangents: Sequence[Shards]
    ) -> tuple[list[Shards], list[Shards]]:
        """Outputs and gradients, each as one shard per rank."""
        ranks = range(self.mesh.num_devices)
        is_plain = rule_of(self.whole.op).lower is None  # type: ignore[union-attr]
        if is_plain and not padded_dims(self.context.space, self.choice, self.mesh):
            each = [
                self._joint([x[r] for x in operands], [c[r] for c in cotangents]) for r in ranks
            ]
            flat = [list(parts) for parts in zip(*each)]
        else:
            flat = self._run_traced(operands, cotangents)
        cut = len(self.whole.results)
        return flat[:cut], flat[cut:]

    def _run_traced(self, operands: Sequence[Shards], cotangents: Sequence[Shards]) -> list[Shards]:
        """Trace once over fake tensors and run on all ranks in lockstep, as the compiler does."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake_operands, fake_cotangents = (
                [torch.empty(x[0].shape, dtype=x[0].dtype) for x in side]
                for side in (operands, cotangents)
            )

        def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
            return self._joint(primals, tangents)

        module = trace_fx(joint, mode, fake_operands, fake_cotangents)
        return LockstepMachine(self.mesh).run(module, [*operands, *cotangents])

    def _joint(self, operands: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
        """Outputs on one rank, then the gradients of all operands (zeros where there is none)."""
        leaves = _leaves(operands, self.whole.flows)
        with torch.enable_grad():
            results = _tensors(run_local(self.context, leaves))
        for i, result in enumerate(results):
            expected = self.context.output_shapes[i]
            if result is not None and tuple(result.shape) != expected:
                raise self._error(
                    f"output {i}", f"has local shape {tuple(result.shape)}, not {expected}"
                )
        grads = _gradients(results, self.whole.wanted, leaves, self.whole.flows, cotangents)
        filled = [torch.zeros_like(x) if g is None else g for x, g in zip(operands, grads)]
        return [torch.zeros(()) if r is None else r.detach() for r in results] + filled

    def _compare(self, what: str, shards: Shards, placements: Placements, expected: Tensor) -> None:
        if self.whole.is_random:
            return
        tolerance = _TOLERANCE.get(expected.dtype, _DOUBLE_TOLERANCE)
        summed = _sum_partial(shards, placements, self.mesh)
        complete = tuple(R if p == P else p for p in placements)
        alike = tuple(a for a, p in enumerate(complete) if p == R)
        for group in self.mesh.groups(alike):
            for rank in group[1:]:
                text = f"that on rank {group[0]}, though both should be the same"
                self._close(
                    f"{what} on rank {rank}", summed[rank], summed[group[0]], tolerance, text
                )
        got = gather(summed, complete, expected.shape, self.mesh)
        if any(paddings(complete, expected.shape, self.mesh).values()):
            again = scatter(got, complete, self.mesh)
            for rank, (own, clean) in enumerate(zip(summed, again)):
                text = "zeros in its padding; list the dimension under padded, not under clean"
                self._close(f"{what} on rank {rank}", own, clean, tolerance, text)
        text = f"the unsplit op's (recombined as '{format_placements(placements)}')"
        self._close(what, got, expected, tolerance, text)

    def _close(
        self, what: str, got: Tensor, expected: Tensor, tolerance: float, other: str
    ) -> None:
        if got.dtype == expected.dtype and torch.equal(got, expected):
            return
        finite = expected[expected.isfinite()]
        scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
        same_kind = got.dtype == expected.dtype and got.shape == expected.shape
        if same_kind and torch.allclose(got, expected, tolerance, tolerance * scale, True):
            return
        try:
            torch.testing.assert_close(
                got, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True
            )
        except AssertionError as error:
            raise self._error(what, f"differs from {other}:\n{error}") from error

    def _check_placements(self, side: str, placements: Sequence[Placements]) -> None:
        op = self.whole.op
        indices = op.inputs if side == "operand" else op.outputs
        for position, (index, each) in enumerate(zip(indices, placements)):
            if index is not None:
                shape = self.whole.values[index].shape
                if not is_valid(each, shape, self.mesh):
                    text = f"cannot have the placement '{format_placements(each)}' (shape {shape})"
                    raise self._error(f"{side} {position}", text)

    def _error(self, what: str, text: str) -> RuleError:
        op = self.whole.op
        operands = ", ".join(
            f"{i}: {list(v.shape)} as '{format_placements(need)}'"
            for i, (v, need) in enumerate(zip(self.whole.values, self.needs))
        )
        return RuleError(
            f"rule of {op.target_name}, choice '{self.choice}' on mesh {self.mesh}: {what} {text}\n"
            f"operands {operands}"
        )


_OF_GRADIENT = {State.VARYING: P, State.PARTIAL: R}


def _scatter(whole: Tensor, need: Placements, mesh: Mesh, generator: torch.Generator) -> Shards:
    """One shard per rank; along axes that need a partial sum, random summands of the value."""
    shards = scatter(whole, need, mesh)
    partial = tuple(a for a, p in enumerate(need) if p.state is State.PARTIAL)
    for group in mesh.groups(partial):
        rest = shards[group[0]]
        for rank in group[1:]:
            shards[rank] = _random_like(rest, generator)
            rest = rest - shards[rank]
        shards[group[0]] = rest
    return shards


def _sum_partial(shards: Shards, placements: Placements, mesh: Mesh) -> Shards:
    """Each rank's shard, summed over the axes on which it is a partial sum."""
    partial = tuple(a for a, p in enumerate(placements) if p == P)
    if mesh.size(partial) == 1:
        return shards
    result = list(shards)
    for group in mesh.groups(partial):
        total = torch.stack([shards[rank] for rank in group]).sum(0).to(shards[0].dtype)
        for rank in group:
            result[rank] = total
    return result


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.dtype.is_floating_point:
        return torch.randint(-4, 4, x.shape, generator=generator).to(x.dtype)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)


def _leaves(tensors: Sequence[Tensor], flows: Sequence[bool]) -> list[Tensor]:
    return [x.detach().requires_grad_(flow) for x, flow in zip(tensors, flows)]


def _tensors(result: Any) -> list[Tensor | None]:
    results = result if isinstance(result, list | tuple) else [result]
    return [r if isinstance(r, Tensor) else None for r in results]


def _gradients(
    results: Sequence[Tensor | None],
    wanted: Sequence[int],
    leaves: Sequence[Tensor],
    flows: Sequence[bool],
    cotangents: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradient of each operand, None where there is none."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for i, cotangent in zip(wanted, cotangents):
        result = results[i]
        if result is not None and result.requires_grad:
            pairs.append((result, cotangent))
    sources = [x for x, flow in zip(leaves, flows) if flow]
    if not pairs or not sources:
        return [None] * len(leaves)
    found = iter(
        torch.autograd.grad(
            [r for r, _ in pairs], sources, [c for _, c in pairs], allow_unused=True
        )
    )
    return [next(found) if flow else None for flow in flows]
