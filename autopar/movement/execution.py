"""Movement plans as a rank executes them: where it meets each operation and each tensor.

The operations of a plan that the runtime announces are the runs of blocks' graphs, the gathers of
their parameters, the sums of their gradients, and the updates; the others (sums of activations'
gradients, reductions) happen in between. So a tensor is `movable` if it is a result of a block's
forward pass, a stored parameter or an optimizer state, and announced operations alone use it. The
gradient of a parameter moves between the contributions to it; from the last one on it stays, as
whoever reduces, inspects, clips or applies it next is not announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.base.errors import MovementError
from autopar.cost_models.allocator import Category
from autopar.movement.lifetimes import Lifetime, StepLifetimes
from autopar.movement.plan import MovementPlan
from autopar.movement.verify import verify


class Run(NamedTuple):
    """A run of a graph (F, I or W) of the block at a position of the program."""

    graph: str
    block: int
    microbatch: int


class Update(NamedTuple):
    """The update of these parameters, together."""

    values: tuple[int, ...]


class Gather(NamedTuple):
    """The gathers or casts of these parameters for a block, begun together."""

    block: int
    values: tuple[int, ...]


class Sum(NamedTuple):
    """The addition of one more contribution to the gradient of a parameter."""

    value: int


OpPlace = Run | Update | Gather | Sum | None
"""Where the runtime announces an operation; None if it does not."""

PARAMETER = -1
"""In place of the number of an optimizer state: the parameter itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStep:
    """The lifetimes of a program's step, and where the runtime finds them.

    ``places`` has one entry for each operation. ``made``: by tensor, its number among the results
    of its first use, which runs a graph or sums a gradient. ``stored``: by persistent tensor, the
    parameter and the number of its optimizer state, or `PARAMETER`. Unless the step
    ``keeps_gradients`` until its end, their updates release them.
    """

    step: StepLifetimes
    places: tuple[OpPlace, ...]
    made: Mapping[str, int]
    stored: Mapping[str, tuple[int, int]]
    keeps_gradients: bool

    def movable(self) -> StepLifetimes:
        """The lifetimes as the runtime has them: with gradients as long as it keeps them, and with
        the tensors marked that it can move."""
        return replace(self.step, tensors=tuple(map(self._in_runtime, self.step.tensors)))

    def _in_runtime(self, tensor: Lifetime) -> Lifetime:
        is_known = tensor.name in self.made or tensor.name in self.stored
        is_applied = isinstance(self.places[tensor.last], Update) and not tensor.persistent
        uses = met = tensor.uses
        if is_applied or tensor.category == Category.GRADIENTS:
            last = self.step.num_ops - 1 if is_applied and self.keeps_gradients else tensor.last
            added = [op for op in uses if isinstance(self.places[op], Run | Sum)]
            complete = max(added, default=tensor.first)
            met = tuple(op for op in uses if op <= complete)
            uses = (*met[:-1], *range(complete, last + 1))
        is_met = all(self.places[op] is not None for op in met)
        return replace(tensor, uses=uses, movable=is_known and is_met)

    def execution(self, plan: MovementPlan, capacity_bytes: int) -> Movement:
        """The plan with its places in the runtime.

        Raises MovementError if it is not for this step, exceeds the capacity, or moves a tensor
        that the runtime cannot.
        """
        step = self.movable()
        verify(plan, step, capacity_bytes)
        names = {*plan.starts_on_host, *(transfer.tensor for transfer in plan.transfers)}
        for name in sorted(names):
            if not step.tensors[step.index_of[name]].movable:
                raise MovementError(
                    f"the plan moves {name}, which the runtime cannot: it moves results of forward "
                    "passes that stay on the device, parameters as they are stored, optimizer "
                    "states, and gradients of parameters while contributions to them are missing"
                )
        return Movement(
            plan=plan,
            places=self.places,
            made={
                name: (step.tensors[step.index_of[name]].first, number)
                for name, number in self.made.items()
                if name in names
            },
            stored={name: place for name, place in self.stored.items() if name in names},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """A movement plan with the places of its operations and of the tensors that it moves.

    ``made``: the operation that makes a tensor, and its number among the results.
    """

    plan: MovementPlan
    places: tuple[OpPlace, ...]
    made: Mapping[str, tuple[int, int]]
    stored: Mapping[str, tuple[int, int]]

    @property
    def parameters_on_host(self) -> Mapping[int, str]:
        """The parameters that are on the host when a step starts, with their names in the plan."""
        names = (name for name in self.plan.starts_on_host if name in self.stored)
        places = ((*self.stored[name], name) for name in names)
        return {value: name for value, number, name in places if number == PARAMETER}
