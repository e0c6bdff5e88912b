"""Times of a priced strategy by block, and by parameter for costs that occur once per step.

In: a solved strategy with its price tables. Out: for each block, the seconds of its forward pass,
input gradients and weight gradients per micro-batch, communication included; for each parameter,
the seconds of its update and of moving its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.estimate import OpEstimate
from autopar.ir.graph import Graph, ValueKind
from autopar.pricing.problem import NodeKind, PricedGraph
from autopar.pricing.tables import OpTable, Pricing, reads_back
from autopar.sharding.strategy import Analysis, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of a block per micro-batch, each including its communication.

    ``fetch_s`` is the part of the forward communication that gathers parameters: the mean over the
    micro-batches, of which the first gathers all parameters, and each those that are released after
    a pass (``every_fetch_s``). ``fetch_back_s`` gathers these again for the backward pass.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    forward_communication_s: float
    backward_communication_s: float
    fetch_s: float
    every_fetch_s: float
    fetch_back_s: float

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTimes:
    """A strategy's times by block, and the times per step of each parameter.

    ``scatter_s``: seconds per micro-batch of the gradients that are scattered in each.
    """

    blocks: dict[str, BlockTimes]
    update_s: dict[int, float]
    move_s: dict[int, float]
    scatter_s: dict[int, float]


def strategy_times(
    priced: PricedGraph,
    picks: Sequence[int],
    released: frozenset[int] = frozenset(),
    scattered: frozenset[int] = frozenset(),
) -> StrategyTimes:
    """Break down the cost of a solution by block and by parameter.

    A parameter is fetched for the forward pass of the first block that reads it and, if it is
    ``released`` after each pass, for the backward pass of the last one; its gradient is moved to
    its stored placement once per step, or where it is ``scattered`` in every micro-batch.
    """
    analysis, num = priced.pricing.analysis, priced.pricing.num_microbatches
    strategy, block_of = priced.strategy(picks), block_of_ops(analysis.graph)
    costs = _Costs(analysis.graph)
    homes: list[str | int] = []
    for node, table, cost, pick in zip(priced.nodes, priced.tables, priced.costs, picks):
        home: str | int
        if isinstance(table, OpTable):
            home = block_of[node.index]
            costs.add_op(home, table.estimates[pick], float(cost[pick]))
        else:
            home = _home_of_value(analysis, node.index, block_of)
            own_s = float(table.cost_s[pick])
            costs.add(home, own_s, costs.update_s)
            costs.add(home, float(cost[pick]) - own_s, costs.move_s)
        homes.append(home)
    for (i, j), matrix in priced.edges.items():
        home = _home_of_edge([homes[n] for n in (i, j)], [priced.nodes[n].kind for n in (i, j)])
        seconds = float(matrix[picks[i], picks[j]])
        if isinstance(home, int) and home in analysis.consumers:
            fetched_s = fetch_s(priced.pricing, strategy, home) if seconds else 0.0
            users = [block_of[op] for op, _ in analysis.consumers[home]]
            (costs.every_fetch if home in released else costs.first_fetch)[users[0]] += fetched_s
            if home in released and reads_back(analysis, home):
                costs.fetch_back[users[-1]] += fetched_s
            seconds -= fetched_s
            if home in scattered and strategy.is_reduce_scattered(analysis.graph.values[home]):
                costs.add(home, seconds, costs.scatter_s)
                continue
        costs.add(home, seconds, costs.move_s)
    return costs.times(num)


class _Costs:
    """The costs of a step, collected by block and by parameter.

    ``sums`` has for each block the seconds of its forward pass, input gradients, weight gradients
    and communication, over all micro-batches.
    """

    def __init__(self, graph: Graph) -> None:
        self.sums = {block.name: [0.0, 0.0, 0.0, 0.0] for block in graph.blocks}
        self.first_fetch = dict.fromkeys(self.sums, 0.0)
        self.every_fetch = dict.fromkeys(self.sums, 0.0)
        self.fetch_back = dict.fromkeys(self.sums, 0.0)
        self.update_s: dict[int, float] = {}
        self.move_s: dict[int, float] = {}
        self.scatter_s: dict[int, float] = {}

    def add_op(self, block: str, estimate: OpEstimate, cost_s: float) -> None:
        parts = (estimate.forward_s, estimate.input_grad_s, estimate.weight_grad_s)
        for place, seconds in enumerate(parts):
            self.sums[block][place] += seconds
        self.sums[block][3] += cost_s - estimate.total_s

    def add(self, home: str | int, seconds: float, of_parameters: dict[int, float]) -> None:
        """Charge communication of a block, or a cost of a parameter."""
        if isinstance(home, str):
            self.sums[home][3] += seconds
        else:
            of_parameters[home] = of_parameters.get(home, 0.0) + seconds

    def times(self, num_microbatches: int) -> StrategyTimes:
        num, every, back = num_microbatches, self.every_fetch, self.fetch_back
        fetches = {name: once / num + every[name] for name, once in self.first_fetch.items()}
        return StrategyTimes(
            blocks={
                name: BlockTimes(
                    forward_s=(f + c / 2) / num + fetches[name],
                    input_grad_s=(i + c / 2) / num + back[name],
                    weight_grad_s=w / num,
                    forward_communication_s=c / 2 / num + fetches[name],
                    backward_communication_s=c / 2 / num + back[name],
                    fetch_s=fetches[name],
                    every_fetch_s=every[name],
                    fetch_back_s=back[name],
                )
                for name, (f, i, w, c) in self.sums.items()
            },
            update_s=self.update_s,
            move_s=self.move_s,
            scatter_s=self.scatter_s,
        )


def fetch_s(pricing: Pricing, strategy: Strategy, parameter: int) -> float:
    """Seconds of one redistribution of a parameter from its stored to its needed placement."""
    value = strategy.graph.values[parameter]
    supply, interface = strategy.supply(value), strategy.interface(value)
    return pricing.moves.price(value, supply, interface, stored=True).forward_s


def _home_of_edge(homes: Sequence[str | int], kinds: Sequence[NodeKind]) -> str | int:
    """The end of a redistribution that pays for it: a parameter, else the op that needs it."""
    parameters = [home for home in homes if isinstance(home, int)]
    ops = [home for home, kind in zip(homes, kinds) if kind is NodeKind.OP]
    return (parameters or ops or homes)[-1]


def block_of_ops(graph: Graph) -> dict[int, str]:
    return {op.index: block.name for block in graph.blocks for op in graph.block_ops(block)}


def reading_blocks(analysis: Analysis) -> dict[int, tuple[str, ...]]:
    """The blocks that read each parameter, in the order of their ops."""
    block_of = block_of_ops(analysis.graph)
    return {
        parameter.index: tuple(
            block_of[op] for op, _ in analysis.consumers.get(parameter.index, ())
        )
        for parameter in analysis.graph.parameters
    }


def _home_of_value(analysis: Analysis, index: int, block_of: Mapping[int, str]) -> str | int:
    """The block that makes or first reads a value; for a parameter, its index."""
    if analysis.graph.values[index].kind is ValueKind.PARAMETER:
        return index
    uses = (analysis.producers.get(index, (0, 0)), *analysis.consumers.get(index, ()))
    return block_of[uses[0][0] if index in analysis.producers else uses[-1][0]]
