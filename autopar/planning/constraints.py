"""Constraints: what the user forces, forbids or pins; each narrows the choices of the search.

``Force("zero3", axis="dp")`` and ``Forbid("tensor_parallel")`` name known strategies on one mesh
axis or on all; `autopar.planning.known` lists them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autopar.base.errors import ConstraintError, PlanError
from autopar.base.spelling import did_you_mean
from autopar.ir.choice import Choice, parse_choice
from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    Placements,
    R,
    check_placements,
    format_placements,
    parse_placement,
)
from autopar.ir.shared_names import SharedNames
from autopar.planning.known import Mask, Masks, Parallelism, forbid_masks, force_masks
from autopar.planning.meshes import AXIS_NAMES
from autopar.pricing.nodes import NodeKind
from autopar.pricing.problem import PricedGraph
from autopar.pricing.tables import Array, OpTable, ValueTable
from autopar.rules.choice import is_valid_choice

_Word = TypeVar("_Word")

MOST_NAMED = 12
"""Choices of a node that an error names."""

FORBIDDABLE = (Parallelism.DATA_PARALLEL, Parallelism.ZERO3, Parallelism.TENSOR_PARALLEL)


@dataclass(frozen=True, slots=True)
class Force:
    """Use a known strategy on one mesh axis, or on every axis if ``axis`` is None."""

    parallelism: str
    axis: str | None = None

    def __post_init__(self) -> None:
        _check_parallelism(self.parallelism)
        _check_axis(self)


@dataclass(frozen=True, slots=True)
class Forbid:
    """Do not split what this strategy splits, on one mesh axis or on all.

    ``parallelism`` is ``data_parallel`` (the batch), ``zero3`` (parameters as stored) or
    ``tensor_parallel`` (parameters as used).
    """

    parallelism: str
    axis: str | None = None

    def __post_init__(self) -> None:
        _check_parallelism(self.parallelism, FORBIDDABLE)
        _check_axis(self)


@dataclass(frozen=True, slots=True)
class Pin:
    """Fix the choice of ops, or the stored placement of parameters and inputs, by name.

    ``pattern`` is a shell pattern over op names, module paths, parameter and input names, such as
    ``"layers.3.*"``; any name of a shared module or parameter will do. ``choice`` (``"n -"``) and
    ``stored`` (``"S0 R"``) are written as in plans.
    """

    pattern: str
    choice: str | None = None
    stored: str | None = None

    def __post_init__(self) -> None:
        if (self.choice is None) == (self.stored is None):
            raise ConstraintError(
                f"Pin({self.pattern!r}) needs exactly one of choice= and stored=, such as "
                "Pin('layers.0.*', choice='m0 -') or Pin('*.weight', stored='S0 R')"
            )
        for given in (self.pattern, self.choice, self.stored):
            if not isinstance(given, str | None):
                raise ConstraintError(f"{self}: {given!r} is not a string; write {self.fix()}")
        try:
            wanted = self.choice_wanted if self.stored is None else self.stored_wanted
        except PlanError as error:
            raise ConstraintError(f"{self}: {error}; write {self.fix()}") from error
        is_whole = isinstance(wanted, Choice) or all(p == R or p.dim >= 0 for p in wanted)
        if not is_whole:
            raise ConstraintError(
                f"{self}: parameters and inputs can only be stored replicated (R) or split (S0, "
                "S1, ...); "
                f"write {self.fix()}"
            )

    @property
    def choice_wanted(self) -> Choice:
        """The dimension that each mesh axis splits, parsed from ``choice``."""
        return parse_choice(self.choice or "")

    @property
    def stored_wanted(self) -> Placements:
        """The placement on each mesh axis, read from ``stored``."""
        return tuple(parse_placement(word) for word in (self.stored or "").split())

    def fix(self, num_axes: int = 2) -> str:
        """An example with one entry for each of so many mesh axes."""
        given = _example(num_axes, is_choice=self.stored is None)
        axes = {1: "one axis", 2: "two axes"}.get(num_axes, f"{num_axes} axes")
        return f"Pin({self.pattern!r}, {given}) for a mesh of {axes}"


def _example(num_axes: int, *, is_choice: bool) -> str:
    """A split on the first of so many mesh axes, as an argument of `Pin`."""
    what, split, rest = ("choice", "m0", "-") if is_choice else ("stored", "S0", "R")
    return f"{what}={' '.join((split, *(rest,) * (num_axes - 1)))!r}"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A limit on memory per device: bytes, or text such as ``"60GiB"``.

    It limits the tensors, as plans count them. Whatever the budget, they must also fit the device
    together with the allocator's fragmentation, retained memory and libraries.
    """

    size: int | str

    @property
    def size_bytes(self) -> int:
        """The limit as a number of bytes on each device."""
        return parse_bytes(self.size)

    def __post_init__(self) -> None:
        parse_bytes(self.size)


Constraint = Force | Forbid | Pin | MemoryBudget

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or text such as ``60GiB``; raises ConstraintError."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)\s*", str(size))
    found = 0
    if match is not None and match[2].upper() in _UNITS:
        found = int(float(match[1]) * _UNITS[match[2].upper()])
    if found <= 0:
        raise ConstraintError(
            f"memory size {size!r} is neither a positive number of bytes nor text such as '60GiB'"
        )
    return found


def _check_parallelism(name: str, known: Sequence[Parallelism] = tuple(Parallelism)) -> None:
    if name not in known:
        hint = did_you_mean(str(name), known)
        if str(name).lower() in ("zero1", "zero2", "zero-1", "zero-2"):
            hint = (
                "; states and gradients are sharded, and parameters gathered once a step, by "
                "Force('zero3') with reshard_after_forward=False"
            )
        raise ConstraintError(f"unknown strategy {name!r}; known are: {', '.join(known)}{hint}")


def _check_axis(constraint: Force | Forbid) -> None:
    if not isinstance(constraint.axis, str | None):
        raise ConstraintError(
            f"{constraint}: axis is {constraint.axis!r}; it is the name of one mesh axis, such as "
            "axis='dp', or None for all"
        )


def narrow(priced: PricedGraph, constraints: Sequence[Constraint]) -> tuple[Array, ...]:
    """Node costs with +inf where a constraint forbids a choice.

    Nodes with the same costs and mask share one narrowed array, so that the search still recognizes
    repeated nodes. Raises ConstraintError if a constraint matches nothing or leaves a node no
    choice.
    """
    given: dict[int, list[tuple[str, Mask]]] = {}
    for constraint in constraints:
        if isinstance(constraint, MemoryBudget):
            continue
        for node, mask in _masks(priced, constraint).items():
            given.setdefault(node, []).append((str(constraint), mask))
            _check_choices(priced, node, given[node])
    together = {node: np.logical_and.reduce([m for _, m in each]) for node, each in given.items()}
    return narrowed(priced, together)


def _check_choices(priced: PricedGraph, node: int, given: Sequence[tuple[str, Mask]]) -> None:
    """Raise ConstraintError if no choice is left, naming the constraints that contradict."""
    if np.logical_and.reduce([mask for _, mask in given]).any():
        return
    name, last = given[-1]
    clash = [other for other, mask in given[:-1] if not (mask & last).any()]
    named = [name] if not last.any() else [*(clash[:1] or [n for n, _ in given[:-1]]), name]
    decision = priced.nodes[node]
    fix = "remove one"
    if not last.any() and name.startswith("Pin("):
        fix = f"it can have {_choices_text(priced.tables[node])}"
    raise ConstraintError(
        f"no choice is left for {decision.kind} {decision.name!r} under {' and '.join(named)}; "
        f"{fix}"
    )


def _choices_text(table: OpTable | ValueTable) -> str:
    """The first choices of a node, as pins name them."""
    if isinstance(table, OpTable):
        name, texts = "choice", [str(choice) for choice in table.choices]
    else:
        name, texts = "stored", [format_placements(each) for each in table.placements.distinct]
    texts = list(dict.fromkeys(texts))
    more = f" or {len(texts) - MOST_NAMED} others" if len(texts) > MOST_NAMED else ""
    return f"{name}={', '.join(map(repr, texts[:MOST_NAMED]))}{more}"


def narrowed(priced: PricedGraph, masks: Masks) -> tuple[Array, ...]:
    """Node costs with +inf outside of the masks; equal ones share one array."""
    shared: dict[tuple[int, bytes], Array] = {}
    costs = list(priced.costs)
    for node, mask in masks.items():
        key = (id(costs[node]), mask.tobytes())
        if key not in shared:
            shared[key] = np.where(mask, costs[node], np.inf)
        costs[node] = shared[key]
    return tuple(costs)


def named_axes(
    constraints: Sequence[Constraint] | Constraint, axes: Iterable[str]
) -> frozenset[str]:
    """The mesh axes that constraints name; all ``axes`` for a pin, which has a word for each."""
    given = constraints if isinstance(constraints, Sequence) else [constraints]
    if any(isinstance(each, Pin) for each in given):
        return frozenset(axes)
    named = (each.axis for each in given if isinstance(each, Force | Forbid))
    return frozenset(axis for axis in named if axis is not None)


def forced_axes(
    constraints: Sequence[Constraint] | Constraint, axes: Iterable[str]
) -> frozenset[str | None]:
    """The axes that strategies are forced on, None for all of a mesh, and those of ``axes`` that
    pins split."""
    given, names = constraints if isinstance(constraints, Sequence) else [constraints], list(axes)
    found: set[str | None] = {each.axis for each in given if isinstance(each, Force)}
    for pin in given:
        if isinstance(pin, Pin):
            words = pin.stored_wanted if pin.choice is None else pin.choice_wanted.splits
            found |= {name for name, word in zip(names, words) if word not in (None, R)}
    return frozenset(found)


def _masks(priced: PricedGraph, constraint: Constraint) -> Masks:
    if isinstance(constraint, Pin):
        return _pin_masks(priced, constraint)
    assert isinstance(constraint, Force | Forbid)
    masks: Masks = {}
    mesh = priced.pricing.mesh
    for axis in _axes(mesh, constraint):
        make = force_masks if isinstance(constraint, Force) else forbid_masks
        for node, mask in make(priced, Parallelism(constraint.parallelism), axis).items():
            masks[node] = masks[node] & mask if node in masks else mask
    return masks


def _axes(mesh: Mesh, constraint: Force | Forbid) -> tuple[int, ...]:
    name = constraint.axis
    if name is None:
        return tuple(range(mesh.num_axes))
    if name not in mesh.axis_names:
        fix = " or ".join(f"axis={each!r}" for each in mesh.axis_names)
        if mesh.axis_names == AXIS_NAMES[: mesh.num_axes]:
            other = "tp" if name == "dp" else "dp"
            sizes = dict.fromkeys((name, other)[: mesh.num_axes])
            fix += f", or name the axes, whose sizes are then searched, with mesh={sizes}"
        raise ConstraintError(
            f"{constraint}: the mesh ({mesh}) has no axis {name!r}; write {fix}"
            + did_you_mean(name, mesh.axis_names)
        )
    return (mesh.axis_names.index(name),)


def _pin_masks(priced: PricedGraph, pin: Pin) -> Masks:
    graph, mesh = priced.pricing.graph, priced.pricing.mesh
    shared = SharedNames(graph.shared)
    masks = {}
    for node, (decision, table) in enumerate(zip(priced.nodes, priced.tables)):
        if isinstance(table, OpTable):
            names = [decision.name, *shared.every(graph.ops[decision.index].module_path)]
        else:
            names = shared.every(decision.name)
        if not any(fnmatch.fnmatchcase(name, pin.pattern) for name in names):
            continue
        if isinstance(table, OpTable) and pin.choice is not None:
            choice = pin.choice_wanted
            _check_axes(pin, len(choice.splits), mesh)
            space = priced.pricing.analysis.spaces[decision.index]
            exists = choice.is_redundant or (space and is_valid_choice(space, choice, mesh))
            choice = Choice(_where_split(choice.splits, mesh, None))
            masks[node] = np.array([bool(exists) and c == choice for c in table.choices])
        elif decision.kind == NodeKind.STORED and pin.stored is not None:
            assert isinstance(table, ValueTable)
            wanted = pin.stored_wanted
            _check_axes(pin, len(wanted), mesh)
            _check_dims(pin, wanted, decision.name, graph.values[decision.index].shape, mesh)
            wanted = _where_split(wanted, mesh, R)
            distinct = np.array([p == wanted for p in table.placements.distinct])
            masks[node] = distinct[table.placements.index]
    if not masks:
        raise _matches_nothing(priced, pin)
    return masks


def _where_split(words: Iterable[_Word], mesh: Mesh, whole: _Word) -> tuple[_Word, ...]:
    """The words of a pin; that of an axis of size 1, which splits nothing, becomes ``whole``."""
    return tuple(w if size > 1 else whole for w, size in zip(words, mesh.axis_sizes))


def _matches_nothing(priced: PricedGraph, pin: Pin) -> ConstraintError:
    graph = priced.pricing.graph
    ops = {name for op in graph.ops for name in (op.name, op.module_path)} - {""}
    stored = {node.name for node in priced.nodes if node.kind == NodeKind.STORED}
    wants_op, axes = pin.choice is not None, priced.pricing.mesh.num_axes
    names, others = (ops, stored) if wants_op else (stored, ops)
    if fnmatch.filter(others, pin.pattern):
        kind, what = ("a parameter or input", "stored=")
        if not wants_op:
            kind, what = "an op or module", "choice="
        given = _example(axes, is_choice=not wants_op)
        return ConstraintError(
            f"{pin} matches {kind}, which takes {what}: write Pin({pin.pattern!r}, {given})"
        )
    what = "op" if wants_op else "parameter or input"
    where = (
        "[op.name for op in autopar.capture(model, inputs).graph.ops] (with full_masks=() where "
        "masks are always applied: with offload or batch_norm='local')"
        if wants_op
        else "[name for name, _ in model.named_parameters()]"
    )
    return ConstraintError(
        f"{pin} matches no {what}; print the names with {where}" + did_you_mean(pin.pattern, names)
    )


def _check_axes(pin: Pin, num: int, mesh: Mesh) -> None:
    if num != mesh.num_axes:
        raise ConstraintError(
            f"{pin} has {num} entries, but the mesh has {mesh.num_axes} axes ({mesh}), and each "
            f"needs one: '-' or R where it splits nothing; write {pin.fix(mesh.num_axes)}, or "
            "name as many axes as there are entries, as in mesh={'dp': 2, 'tp': 2}"
        )


def _check_dims(
    pin: Pin, wanted: Placements, name: str, shape: tuple[int, ...], mesh: Mesh
) -> None:
    try:
        check_placements(wanted, shape, mesh)
    except PlanError as error:
        raise ConstraintError(
            f"{pin} is impossible for {name!r} of shape {shape}: {error}; split another "
            "dimension, or narrow the pattern"
        ) from error
