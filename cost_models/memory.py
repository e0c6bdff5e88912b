"""The peak memory of a graph whose nodes run in order, by liveness.

In: an ``fx.Graph`` whose nodes have fake or real values in ``meta["val"]`` (as torch.export and
make_fx produce), and the category of each input. Out: the peak, its composition, and the node at
which it is reached. A storage counts once, however many views it has, from the node that creates it
to the last use of any of them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.base.torch_private import largest_bytes
from autopar.cost_models.allocator import Allocator, Category
from autopar.cost_models.estimate import CostError


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """The memory of a graph.

    ``peak_bytes`` is reached while ``peak_node`` runs and consists of ``peak_by_category``.
    ``curve_bytes`` is the use while each node runs, in order, as (name, bytes). ``saved_bytes`` is
    the size of the outputs, which live at the end besides the inputs.
    """

    peak_bytes: int
    peak_node: str
    peak_by_category: Mapping[Category, int]
    curve_bytes: tuple[tuple[str, int], ...]
    saved_bytes: int


@dataclass(slots=True)
class _Storage:
    size_bytes: int
    category: Category
    first: int
    last: int
    is_output: bool = False


@dataclass(slots=True)
class _Liveness:
    storages: list[_Storage] = field(default_factory=list)
    of_node: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    of_key: dict[int, int] = field(default_factory=dict)
    # Kept alive, so that ids of storages stay unique.
    kept: list[torch.UntypedStorage] = field(default_factory=list)

    def overwrite(self, node: fx.Node) -> None:
        """Count the result of a node as the memory of its first operand."""
        self.of_node[node] = self.of_node[node.all_input_nodes[0]]
        for value in _tensors(_value(node)):
            storage = value.untyped_storage()
            self.kept.append(storage)
            self.of_key[id(storage)], *_ = self.of_node[node]


def graph_memory(
    graph: fx.Graph,
    *,
    categories: Mapping[str, Category] | None = None,
    persistent: Mapping[Category, int] | None = None,
    workspace_bytes: Callable[[fx.Node], int] | None = None,
    release_inputs: bool = False,
    allocator: Allocator | None = None,
    is_in_place: Callable[[fx.Node], bool] = lambda node: False,
) -> GraphMemory:
    """Peak bytes of ``graph`` when it runs node by node.

    ``categories`` maps a node's name to the category of its storage; by default placeholders are
    INPUTS and everything else ACTIVATIONS. ``persistent`` are bytes outside the graph that live
    throughout (optimizer state, other stages' parameters). ``workspace_bytes`` gives the memory
    that a node needs only while it runs. A node that ``is_in_place`` has its result in the memory
    of its first operand. Inputs live to the end unless ``release_inputs``. Raises CostError for a
    node without a value.
    """
    rounding = allocator or Allocator()
    nodes = list(graph.nodes)
    found = _liveness(nodes, dict(categories or {}), release_inputs, rounding, is_in_place)
    base = {category: size for category, size in (persistent or {}).items() if size}
    changes: list[list[tuple[Category, int]]] = [[] for _ in range(len(nodes) + 1)]
    for storage in found.storages:
        changes[storage.first].append((storage.category, storage.size_bytes))
        changes[storage.last + 1].append((storage.category, -storage.size_bytes))
    live = dict(base)
    curve = []
    peak_bytes, peak_node, peak_by_category = -1, "", dict(live)
    for index, node in enumerate(nodes):
        for category, size_bytes in changes[index]:
            live[category] = live.get(category, 0) + size_bytes
        now = dict(live)
        if workspace_bytes is not None and (extra := workspace_bytes(node)):
            now[Category.WORKSPACE] = now.get(Category.WORKSPACE, 0) + rounding.rounded(extra)
        total = sum(now.values())
        curve.append((node.name, total))
        if total > peak_bytes:
            peak_bytes, peak_node, peak_by_category = total, node.name, now
    saved = sum(s.size_bytes for s in found.storages if s.is_output)
    return GraphMemory(
        peak_bytes=max(peak_bytes, 0),
        peak_node=peak_node,
        peak_by_category={c: size for c, size in peak_by_category.items() if size},
        curve_bytes=tuple(curve),
        saved_bytes=saved,
    )


def _liveness(
    nodes: list[fx.Node],
    categories: dict[str, Category],
    release_inputs: bool,
    rounding: Allocator,
    is_in_place: Callable[[fx.Node], bool],
) -> _Liveness:
    found = _Liveness()
    for index, node in enumerate(nodes):
        for used in node.all_input_nodes:
            for number in found.of_node.get(used, ()):
                found.storages[number].last = index
        if node.op == "output":
            for used in node.all_input_nodes:
                for number in found.of_node.get(used, ()):
                    storage = found.storages[number]
                    storage.is_output = storage.category != Category.INPUTS
                    storage.last = len(nodes) - 1
            continue
        if is_in_place(node):
            found.overwrite(node)
            continue
        found.of_node[node] = _storages_of(node, index, found, categories, rounding)
        if node.op in ("placeholder", "get_attr") and not release_inputs:
            for number in found.of_node[node]:
                found.storages[number].last = len(nodes) - 1
    if not release_inputs:
        inputs = [n for n in nodes if n.op in ("placeholder", "get_attr")]
        for number in {number for node in inputs for number in found.of_node[node]}:
            found.storages[number].first = 0
            found.storages[number].last = len(nodes) - 1
    return found


def _storages_of(
    node: fx.Node,
    index: int,
    found: _Liveness,
    categories: dict[str, Category],
    rounding: Allocator,
) -> tuple[int, ...]:
    is_input = node.op in ("placeholder", "get_attr")
    default = Category.INPUTS if is_input else Category.ACTIVATIONS
    numbers = []
    for value in _tensors(_value(node)):
        # Traced values share their storage object through views and getitem.
        storage = value.untyped_storage()
        number = found.of_key.get(id(storage))
        if number is None:
            number = len(found.storages)
            found.storages.append(
                _Storage(
                    size_bytes=rounding.rounded(largest_bytes(storage)),
                    category=categories.get(node.name, default),
                    first=index,
                    last=index,
                )
            )
        found.of_key[id(storage)] = number
        found.kept.append(storage)
        found.storages[number].last = max(found.storages[number].last, index)
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def _value(node: fx.Node) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    if node.op == "get_attr":
        owner = node.graph.owning_module
        target: Any = owner
        for part in str(node.target).split("."):
            target = getattr(target, part)
        return target
    if node.op == "placeholder" or node.users:
        raise CostError(
            f"node {node.name!r} has no value in meta['val'], so its memory is unknown. Trace the "
            "graph with torch.export or make_fx over fake tensors."
        )
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
