"""Times of a priced strategy by block, and by parameter for costs that occur once per step.

In: a solved strategy with its price tables. Out: for each block, the seconds of its forward pass,
input gradients and weight gradients per micro-batch, communication included; for each parameter,
the seconds of its update and of moving its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.placement import is_reduce_scattered
from autopar.pricing.moves import Array
from autopar.pricing.nodes import Home, home_of_edge
from autopar.pricing.problem import Moved, PricedGraph, node_homes
from autopar.pricing.readers import block_of_ops
from autopar.pricing.tables import OpTable, Pricing, reads_back
from autopar.search.lookup import Lookup, PairLookup, Places
from autopar.sharding.strategy import Strategy


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
    def forward_compute_s(self) -> float:
        return self.forward_s - self.forward_communication_s

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
    return priced.derived(_Costs).times(np.asarray(picks), released, scattered)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetch:
    """The redistribution of a parameter from its stored placement, for the blocks that read it."""

    move: Moved
    target: int
    first_block: str
    last_block: str
    is_read_back: bool


class _Costs:
    """The costs of all choices of a problem, laid out for sums by block and by parameter.

    Op nodes come before all others.
    """

    def __init__(self, priced: PricedGraph) -> None:
        self.priced = priced
        self.analysis = priced.pricing.analysis
        self.block_of = block_of_ops(self.analysis.graph)
        self.names = [block.name for block in self.analysis.graph.blocks]
        self.homes = priced.derived(node_homes)
        self._lay_out_nodes()
        self._lay_out_edges()
        self.fetches: dict[int, _Fetch] = {}
        for move in priced.moves:
            if move.target is not None and move.value.index in self.read:
                self.fetches.setdefault(move.value.index, self._fetch(move, move.target))
        self._prices: dict[tuple[int, int, int], tuple[float, bool]] = {}

    def _lay_out_nodes(self) -> None:
        """The times of ops' passes, and what each node costs, with and without communication."""
        times, own, self.num_ops = dict[int, list[Array]](), list[Array](), 0
        for table in self.priced.tables:
            if not isinstance(table, OpTable):
                own.append(table.cost_s)
                continue
            if id(table) not in times:
                each = [
                    (e.forward_s, e.input_grad_s, e.weight_grad_s, e.total_s)
                    for e in table.estimates
                ]
                times[id(table)] = [np.array(column) for column in zip(*each)]
            own.append(times[id(table)][-1])
            self.num_ops += 1
        tables = self.priced.tables[: self.num_ops]
        self.passes = [Lookup([times[id(table)][part] for table in tables]) for part in range(3)]
        self.own, self.costs = Lookup(own), Lookup(self.priced.costs)
        self.node_places = self._places(self.homes)
        self.stored = [(n, home) for n, home in enumerate(self.homes) if isinstance(home, int)]

    def _lay_out_edges(self) -> None:
        nodes, edges = self.priced.nodes, self.priced.edges
        homes = [
            home_of_edge((self.homes[i], self.homes[j]), (nodes[i].kind, nodes[j].kind))
            for i, j in edges
        ]
        self.moves = PairLookup(edges)
        self.edge_places = self._places(homes)
        self.moved = [(e, home) for e, home in enumerate(homes) if isinstance(home, int)]
        self.read = {home for _, home in self.moved if home in self.analysis.consumers}

    def _places(self, homes: Sequence[Home]) -> Places:
        """The numbers of the blocks that are homes; all parameters are in one place behind them."""
        numbers = {name: number for number, name in enumerate(self.names)}
        places = [numbers[home] if isinstance(home, str) else len(numbers) for home in homes]
        return np.array(places, dtype=np.intp)

    def _fetch(self, move: Moved, target: int) -> _Fetch:
        users = [self.block_of[op] for op, _ in self.analysis.consumers[move.value.index]]
        return _Fetch(
            move=move, target=target, first_block=users[0], last_block=users[-1],
            is_read_back=reads_back(self.analysis, move.value.index),
        )  # fmt: skip

    def times(
        self, picks: Places, released: frozenset[int], scattered: frozenset[int]
    ) -> StrategyTimes:
        """The times of a solution."""
        own_s = self.own.at(picks)
        extra_s = self.costs.at(picks) - own_s
        edges_s = self.moves.at(picks)
        update_s, move_s, scatter_s = dict[int, float](), dict[int, float](), dict[int, float]()
        for node, home in self.stored:
            _add(update_s, home, own_s[node])
            _add(move_s, home, extra_s[node])
        first, every, back = (dict.fromkeys(self.names, 0.0) for _ in range(3))
        for edge, home in self.moved:
            seconds, is_scattered = float(edges_s[edge]), False
            if home in self.read and seconds:
                fetch = self.fetches[home]
                fetched_s, may_scatter = self._price(fetch, picks)
                (every if home in released else first)[fetch.first_block] += fetched_s
                if home in released and fetch.is_read_back:
                    back[fetch.last_block] += fetched_s
                seconds -= fetched_s
                is_scattered = may_scatter and home in scattered
            _add(scatter_s if is_scattered else move_s, home, seconds)
        own_s[: self.num_ops] = 0.0  # computation, which the passes have
        communication_s = self._by_block(
            np.concatenate((np.repeat(self.node_places, 2), self.edge_places)),
            np.concatenate((np.stack((own_s, extra_s), axis=1).ravel(), edges_s)),
        )
        ops, op_picks = self.node_places[: self.num_ops], picks[: self.num_ops]
        passes_s = [self._by_block(ops, times.at(op_picks)) for times in self.passes]
        num = self.priced.pricing.num_microbatches
        fetches = {name: once / num + every[name] for name, once in first.items()}
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
                for name, f, i, w, c in zip(self.names, *passes_s, communication_s)
            },
            update_s=update_s,
            move_s=move_s,
            scatter_s=scatter_s,
        )

    def _by_block(self, places: Places, seconds: Array) -> list[float]:
        """Sums by block, in the order of the blocks."""
        sums = np.bincount(places, weights=seconds, minlength=len(self.names))
        found: list[float] = sums[: len(self.names)].tolist()
        return found

    def _price(self, fetch: _Fetch, picks: Places) -> tuple[float, bool]:
        """Seconds of a parameter's fetch, and whether its gradient is reduce-scattered back."""
        move, source, target = fetch.move, picks[fetch.move.source], picks[fetch.target]
        key = move.value.index, int(source), int(target)
        if key not in self._prices:
            supply, need = move.supplies.at(source), move.needs.at(target)
            price = self.priced.pricing.moves.price(move.value, supply, need, stored=True)
            self._prices[key] = price.forward_s, is_reduce_scattered(supply, need)
        return self._prices[key]


def _add(times_s: dict[int, float], parameter: int, seconds: float) -> None:
    times_s[parameter] = times_s.get(parameter, 0.0) + float(seconds)


def fetch_s(pricing: Pricing, strategy: Strategy, parameter: int) -> float:
    """Seconds of one redistribution of a parameter from its stored to its needed placement."""
    value = strategy.graph.values[parameter]
    supply, interface = strategy.supply(value), strategy.interface(value)
    return pricing.moves.price(value, supply, interface, stored=True).forward_s
