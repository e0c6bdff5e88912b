"""A candidate: a solved search problem with its price tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from autopar.cost_models import Cluster
from autopar.ir.mesh import Mesh
from autopar.ir.recomputation import NOTHING, Recomputation
from autopar.pricing.block_times import BlockTimes, StrategyTimes, strategy_times
from autopar.pricing.exposure import ALL_EXPOSED, Exposure
from autopar.pricing.islands import on_islands
from autopar.pricing.problem import WHOLE, PricedGraph, Residence
from autopar.search import Solution
from autopar.sharding.strategy import Strategy


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """The best strategy on one mesh under the constraints of a search.

    ``exposed``: the fractions of the parameters' communication that the search counted as exposed.
    The solution's cost is by that price, unlike the time of a step (`autopar.pricing.step_time`).
    ``released``: the parameters that, where they are gathered, are released after each pass;
    ``scattered``: those whose gradients, where they are reduce-scattered, are so in every
    micro-batch.
    """

    priced: PricedGraph
    solution: Solution
    exposed: Exposure = ALL_EXPOSED
    recomputation: Recomputation = NOTHING
    released: frozenset[int] = frozenset()
    scattered: frozenset[int] = frozenset()

    @property
    def mesh(self) -> Mesh:
        return self.priced.pricing.mesh

    @property
    def is_found(self) -> bool:
        """Whether the search found a strategy."""
        return bool(self.solution.assignment)

    def estimated_bytes(self, residence: Residence = WHOLE) -> float:
        """Memory of a device as estimated by the search: node by node, and all buffers."""
        memory = self.priced.memory(
            residence, released=bool(self.released), scattered=bool(self.scattered)
        )
        picks = zip(memory, self.solution.assignment)
        buffers = self.priced.pricing.buffer_bytes
        return float(sum(of_node[pick] for of_node, pick in picks)) + buffers

    @property
    def num_microbatches(self) -> int:
        return self.priced.pricing.num_microbatches

    @cached_property
    def plain_times(self) -> StrategyTimes:
        """The prices by block and by parameter if nothing is recomputed."""
        return strategy_times(self.priced, self.solution.assignment, self.released, self.scattered)

    @cached_property
    def times(self) -> StrategyTimes:
        """The prices by block and by parameter; input gradients include recomputation."""
        return self._with_recomputation(self.plain_times)

    def times_on(self, rank: int) -> StrategyTimes:
        """`times` on a pipeline rank, whose devices may be those of an island."""
        size = self.mesh.num_devices
        found = self.priced.pricing.cluster.island_at(rank * size, size)
        return self.times if found is None else self._island_times(found[1])

    @cached_property
    def _island_times(self) -> Callable[[Cluster], StrategyTimes]:
        priced_on, picks = self.priced.derived(on_islands), self.solution.assignment

        @cache
        def times(island: Cluster) -> StrategyTimes:
            return self._with_recomputation(
                strategy_times(priced_on(island), picks, self.released, self.scattered)
            )

        return times

    def _with_recomputation(self, plain: StrategyTimes) -> StrategyTimes:
        """Prices with what blocks recompute, which takes its share of their forward computation."""

        def recomputed_s(name: str, there: BlockTimes) -> float:
            time_s, here = self.recomputation.time_s(name), self.plain_times.blocks[name]
            same = there is here or not here.forward_compute_s
            return time_s if same else time_s * there.forward_compute_s / here.forward_compute_s

        blocks = {
            name: replace(times, input_grad_s=times.input_grad_s + recomputed_s(name, times))
            for name, times in plain.blocks.items()
        }
        return replace(plain, blocks=blocks)

    @cached_property
    def _strategy(self) -> Strategy:
        return self.priced.strategy(self.solution.assignment, self.released, self.scattered)

    def strategy(self) -> Strategy:
        return self._strategy

    def recomputing(self, recomputation: Recomputation) -> Candidate:
        """The same strategy with other recomputation."""
        other = replace(self, recomputation=recomputation)
        for name in ("plain_times", "_strategy"):  # these do not depend on it
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other
