"""Programs for other calls than the example's, over parameters that keep their placements.

In: a training plan's strategy, and the capture of another call: a forward pass, or a training step
on a batch of other shapes. Out: a program for it on the same mesh, searched with parameters (and,
for the forward pass of a call that was trained with, inputs) placed as they are. Everything is
priced by roofline, so that another call measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.base.errors import PlanError
from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.frontend.capture import Captured
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.ir.recomputation import Recomputation
from autopar.lowering.stages import lower_staged_forward
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.passes.prepare import prepare
from autopar.plans.document import Plan
from autopar.pricing.problem import price_graph
from autopar.pricing.tables import Pricing
from autopar.search import solve
from autopar.sharding.microbatches import Microbatches
from autopar.sharding.strategy import Analysis, Assignment, Strategy

SEARCH_LIMIT_S = 20.0

Agreed = Callable[[Callable[[], Assignment], str], Assignment]
"""Makes something on the first rank for all ranks, with its name for errors."""


def plan_held(
    analysis: Analysis,
    mesh: Mesh,
    cluster: Cluster,
    held: Mapping[int, Placements],
    microbatches: Microbatches | None = None,
) -> Assignment:
    """The fastest assignment of a graph; ``held`` maps values to their placements."""
    compute, communication = RooflineModel(cluster.device), CommunicationModel(cluster)
    pricing = Pricing(analysis, mesh, cluster, compute, communication, microbatches, held=held)
    priced = price_graph(pricing)
    solution = solve(priced.problem(), time_limit_s=SEARCH_LIMIT_S)
    return priced.assignment(solution.assignment)


class OtherCalls:
    """Lowers other calls of a model that trains by ``plan``: ``program`` is that of ``strategy``.

    ``agreed`` has one rank plan for all.
    """

    def __init__(
        self, plan: Plan, strategy: Strategy, program: RankProgram, agreed: Agreed
    ) -> None:
        self._plan = plan
        self._strategy = strategy
        self._program = program
        self._agreed = agreed

    @property
    def trains(self) -> bool:
        """Whether `lower_training` is possible: without a schedule of stages, and no offloading."""
        return self._plan.schedule.pipeline() is None and self._plan.offload is None

    def lower_own_forward(self) -> RankProgram:
        """The forward pass of the training strategy itself."""
        return lower_staged_forward(self._strategy, self._program)

    def lower_forward(self, captured: Captured, held: Mapping[int, Placements]) -> RankProgram:
        """The program of a forward pass."""
        analysis = prepare(captured, self._plan.graph.batch_norm).analysis
        strategy = self._planned(analysis, held, None, "the forward plan")
        return lower_staged_forward(strategy, self._program)

    def lower_training(self, captured: Captured, *, local: bool = False) -> RankProgram:
        """The training program for a batch of other shapes.

        With ``local`` each rank passes its own shard, so inputs are split as in the plan. Blocks
        that recompute do so in full, and all run op by op. Raises PlanError where the graph has
        other parameters.
        """
        plan, prepared = self._plan, prepare(captured, self._plan.graph.batch_norm)
        num = self._num_microbatches(prepared.analysis.batch_size, local=local)
        _, analysis, cut = prepared.cut(num)
        graph = analysis.graph
        values = {p.name: p.value for p in self._program.parameters}
        if values != {v.target or v.name: v.index for v in graph.parameters}:
            raise PlanError(
                "the model uses other parameters for a batch of these shapes, so the optimizer's "
                "state does not fit; train on batches for which it uses the same ones"
            )
        held = {p.value: p.stored for p in self._program.parameters}
        if local:
            places = (source.placements for source in self._program.inputs)
            held |= dict(zip(captured.graph.inputs, places, strict=True))
        strategy = self._planned(analysis, held, cut, "the plan for a batch of other shapes")
        names = {block.name for block in graph.blocks}
        recomputed = {
            name: replace(block, kept=())
            for name, block in plan.recomputed.blocks.items()
            if name in names
        }
        return lower_training(
            strategy, num, device_type=self._program.device_type, update=plan.update.update,
            tile_bytes=plan.update.tile_bytes, recomputation=Recomputation(blocks=recomputed),
        )  # fmt: skip

    def _planned(
        self,
        analysis: Analysis,
        held: Mapping[int, Placements],
        cut: Microbatches | None,
        what: str,
    ) -> Strategy:
        mesh, cluster, own = self._strategy.mesh, self._plan.cluster, self._strategy.assignment
        found = self._agreed(lambda: plan_held(analysis, mesh, cluster, held, cut), what)
        return Strategy(analysis, replace(found, released=own.released, scattered=own.scattered))

    def _num_microbatches(self, batch_size: int, *, local: bool) -> int:
        """As few micro-batches, if there are several, as leave none larger than the plan's.

        With ``local`` each divides by the shards that ranks pass.
        """
        program, mesh = self._program, self._strategy.mesh
        num, parts = program.num_microbatches, 1
        if num == 1 or batch_size == 0:
            return 1
        if local:
            cut = [(s, s.microbatch.dim) for s in program.inputs if s.microbatch is not None]
            parts = max((source.num_shards(dim, mesh) for source, dim in cut), default=1)
        most = max(-(-self._strategy.analysis.batch_size // num), parts)
        sizes = (n for n in range(1, batch_size + 1) if batch_size % (n * parts) == 0)
        return next((n for n in sizes if batch_size // n <= most), 1)
