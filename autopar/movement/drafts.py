"""Tensors whose uses are being noted, and the step that they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from autopar.base.torch_private import largest_bytes, returns_views
from autopar.comm.ops import MASK, SHARD
from autopar.cost_models.allocator import Allocator, Category
from autopar.movement.counted import CountedAt
from autopar.movement.execution import OpPlace, ProgramStep, Run, Sum
from autopar.movement.lifetimes import Lifetime, StepLifetimes


@dataclass(slots=True)
class Draft:
    """A tensor whose uses are being noted."""

    name: str
    category: Category
    size_bytes: int
    persistent: bool = False
    uses: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    stored: tuple[int, int] | None = None  # a parameter, and which state of it
    result: int | None = None  # its number among the results of the operation that makes it
    leaves: bool = False  # it is sent to another stage


class Drafts:
    """The operations of a step in order, and its tensors, as both are being noted.

    ``at``: for each operation the action, from 1, and the place of the count of the program's
    memory that it is part of; "" where it is part of none.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.ops: list[str] = []
        self.places: list[OpPlace] = []
        self.at: list[CountedAt] = []
        self.action = 0
        self.workspace: list[int] = []
        self.tensors: list[Draft] = []
        self.coming: dict[int, list[int]] = {}
        """By block, the stored parameters of which gathers for it may be under way."""
        self.shown: list[tuple[int, int]] = []
        """Tensors that may be views of others on some ranks, and those."""

    def _tensor(
        self, name: str, category: Category, size_bytes: int, *, persistent: bool = False
    ) -> int:
        self.tensors.append(Draft(name.replace(" ", "_"), category, size_bytes, persistent))
        return len(self.tensors) - 1

    def _op(
        self,
        name: str,
        reads: Iterable[int],
        writes: Iterable[int],
        workspace_bytes: int = 0,
        place: OpPlace = None,
        counted_at: str = "",
    ) -> None:
        op, written = len(self.ops), set(writes)
        for index in written.union(reads):
            self.tensors[index].uses.append(op)
            if index in written:
                self.tensors[index].writes.append(op)
        self.ops.append(name)
        self.places.append(place)
        self.at.append((self.action, counted_at))
        self.workspace.append(workspace_bytes)

    def _run(
        self,
        name: str,
        module: fx.GraphModule,
        arguments: Sequence[int | None],
        category: Category,
        workspace_bytes: int,
        place: Run | None = None,
        counted_at: str = "",
    ) -> list[int | None]:
        """Run a graph on tensors, for which gathered parameters have arrived."""
        found, made, reads = self._made(name, module, arguments, category)
        if made or workspace_bytes:
            created = sum(self.tensors[index].size_bytes for index in made)
            reads += self.coming.pop(place.block, []) if place is not None else []
            self._op(name, reads, made, max(0, workspace_bytes - created), place, counted_at)
        return found

    def _made(
        self,
        name: str,
        module: fx.GraphModule,
        arguments: Sequence[int | None],
        category: Category,
    ) -> tuple[list[int | None], list[int], list[int]]:
        """The results of a graph, those that are new tensors, and the arguments that it reads; a
        result that is a view of another tensor is that tensor."""
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        owner: dict[int, int] = {}
        for node, argument in zip(given, arguments):
            value = node.meta.get("val")
            if isinstance(value, Tensor) and argument is not None:
                owner.setdefault(id(value.untyped_storage()), argument)
        results: Any = module.graph.output_node().args[0]
        found: list[int | None] = []
        made = []
        for number, node in enumerate(results):
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if not isinstance(value, Tensor):
                found.append(None)
                continue
            storage = value.untyped_storage()
            if id(storage) not in owner:
                size = self.allocator.rounded(largest_bytes(storage))
                owner[id(storage)] = self._tensor(f"{name}:{number}", category, size)
                self.tensors[-1].result = number
                made.append(owner[id(storage)])
                self._note_view(node, made[-1], owner)
            found.append(owner[id(storage)])
        reads = [a for node, a in zip(given, arguments) if a is not None and node.users]
        return found, made, reads

    def _note_view(self, node: fx.Node, index: int, owner: Mapping[int, int]) -> None:
        """Note that a result of a shard or a mask may be a view of its operand: neither moves, but
        for a stored one, which does where nothing uses the view."""
        shown: Any = node
        while isinstance(shown, fx.Node) and _is_view(shown):
            shown = shown.args[0]
        value = shown.meta.get("val") if isinstance(shown, fx.Node) else None
        if shown is not node and isinstance(value, Tensor):
            base = owner.get(id(value.untyped_storage()), index)
            if base != index:
                self.shown.append((index, base))
                self.tensors[index].result = self.tensors[base].result = None

    def extend_shown(self) -> None:
        """Let stored tensors be used as long as what may be a view of them."""
        for index, base in reversed(self.shown):
            if self.tensors[base].persistent:
                self.tensors[base].uses += self.tensors[index].uses

    def _created(self, name: str, category: Category, size_bytes: int) -> int:
        """A tensor that the next operation creates."""
        index = self._tensor(name, category, size_bytes)
        self.tensors[index].uses.append(len(self.ops))
        self.tensors[index].writes.append(len(self.ops))
        return index


def _is_view(node: fx.Node) -> bool:
    return node.target in (SHARD, MASK) or returns_views(node.target)


def step_of_drafts(
    ops: Sequence[str],
    places: Sequence[OpPlace],
    workspace_bytes: Sequence[int],
    drafts: Sequence[Draft],
    *,
    keeps_gradients: bool,
) -> ProgramStep:
    """Persistent tensors that nothing uses are part of every operation's workspace."""
    idle = sum(t.size_bytes for t in drafts if t.persistent and not t.uses)
    names: dict[str, int] = {}
    found = []
    made, stored = dict[str, int](), dict[str, tuple[int, int]]()
    for draft in drafts:
        if not draft.uses or not draft.size_bytes:
            continue
        count = names[draft.name] = names.get(draft.name, 0) + 1
        name = draft.name if count == 1 else f"{draft.name}#{count}"
        found.append(
            Lifetime(
                name=name,
                category=draft.category,
                size_bytes=draft.size_bytes,
                uses=tuple(sorted(set(draft.uses))),
                writes=tuple(sorted(set(draft.writes))),
                persistent=draft.persistent,
            )
        )
        place = places[draft.uses[0]]
        is_gradient = draft.category is Category.GRADIENTS
        is_of_forward = isinstance(place, Run) and place.graph == "F" and not draft.persistent
        is_announced = is_of_forward or (is_gradient and isinstance(place, Run | Sum))
        if is_announced and draft.result is not None and not draft.leaves:
            made[name] = draft.result
        if draft.stored is not None:
            stored[name] = draft.stored
    step = StepLifetimes(
        ops=tuple(ops),
        tensors=tuple(found),
        workspace_bytes=tuple(size + idle for size in workspace_bytes),
    )
    return ProgramStep(
        step=step, places=tuple(places), made=made, stored=stored, keeps_gradients=keeps_gradients
    )
