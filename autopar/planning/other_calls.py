"""Programs for other calls than the example's, over parameters that keep their placements.

In: a training plan's strategy, and the capture of another call: a forward pass, or a training step
on a batch of other shapes. Out: a program for it on the same mesh, searched with parameters (and,
where ranks pass shards or a call was trained with, inputs) placed as they are. Everything is
priced by roofline, so that another call measures nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.base.errors import PlanError, ScheduleError
from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.frontend.capture import Captured
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.ir.recomputation import Recomputation
from autopar.ir.stages import Stages
from autopar.lowering.stages import lower_staged_forward, names_in_other_graph
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.passes.batch_norm import BatchNorm
from autopar.passes.prepare import prepare
from autopar.plans.document import Plan
from autopar.pricing.problem import price_graph
from autopar.pricing.tables import Pricing
from autopar.schedules import Schedule, build
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
        """Whether `lower_training` is possible: without offloading."""
        return self._plan.offload is None

    def lower_own_forward(self) -> RankProgram:
        """The forward pass of the training strategy itself."""
        return lower_staged_forward(self._strategy, self._program)

    def lower_forward(self, captured: Captured, held: Mapping[int, Placements]) -> RankProgram:
        """The program of a forward pass."""
        analysis = prepare(captured, self._plan.graph.batch_norm).analysis
        strategy = self._planned(analysis, held, None, "the forward plan")
        return lower_staged_forward(strategy, self._program)

    def lower_training(self, captured: Captured, *, local: bool = False) -> RankProgram:
        """The training program for a batch of other shapes, or with masks.

        With ``local`` each rank passes its own shard, so inputs are split as in the plan. Blocks
        that recompute do so in full, and all run op by op. Raises PlanError where the graph has
        other parameters, where a pipeline's schedule does not exist for such a batch, and for
        ``batch_norm="local"``.
        """
        plan, prepared = self._plan, prepare(captured, self._plan.graph.batch_norm)
        if plan.graph.batch_norm == BatchNorm.LOCAL and self._strategy.mesh.num_devices > 1:
            raise PlanError(
                'batch_norm="local" takes the statistics of each device\'s part, and a batch of '
                "other shapes may be split into other parts: compile with batch_norm='global'"
            )
        batch_size, parts = prepared.analysis.batch_size, self._num_shards() if local else 1
        pipeline = self._pipeline(batch_size, parts)
        if pipeline is None:
            num = self._num_microbatches(batch_size, parts)
        else:
            num = pipeline[1].shape.num_microbatches
        _, analysis, cut = prepared.cut(num, plan.graph.block_cuts)
        graph = analysis.graph
        values = {p.name: p.value for p in self._program.parameters}
        if values != {v.target or v.name: v.index for v in graph.parameters}:
            raise PlanError(
                "the model uses other parameters for a batch of these shapes, so the optimizer's "
                "state does not fit; train on batches for which it uses the same ones"
            )
        names = names_in_other_graph(self._strategy.graph, graph)
        if pipeline is not None:
            firsts = tuple(names.get(name, name) for name in pipeline[0].first_blocks)
            pipeline = Stages(first_blocks=firsts), pipeline[1]
        held = {p.value: p.stored for p in self._program.parameters}
        if local:
            places = (source.placements for source in self._program.inputs)
            held |= dict(zip(captured.graph.inputs, places, strict=True))
        strategy = self._planned(analysis, held, cut, "the plan for a batch of other shapes")
        recomputed = {
            names[name]: replace(block, kept=())
            for name, block in plan.recomputed.blocks.items() if name in names
        }  # fmt: skip
        return lower_training(
            strategy, num, pipeline=pipeline, device_type=self._program.device_type,
            update=plan.update.update, tile_bytes=plan.update.tile_bytes,
            recomputation=Recomputation(blocks=recomputed),
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

    def _num_shards(self) -> int:
        """Into how many shards the devices split each micro-batch of the inputs."""
        program, mesh = self._program, self._strategy.mesh
        cut = [(s, 0 if s.microbatch is None else s.microbatch.dim) for s in program.inputs]
        return math.lcm(1, *(source.num_shards(dim, mesh) for source, dim in cut))

    def _pipeline(self, batch_size: int, parts: int) -> tuple[Stages, Schedule] | None:
        """The plan's pipeline, with another number of micro-batches if the batch demands it.

        Each micro-batch divides into ``parts``.
        """
        planned = self._plan.schedule.pipeline()
        if planned is None:
            return None
        stages, schedule = planned
        shape = schedule.shape
        own = shape.num_microbatches
        if batch_size % (own * parts) == 0:
            return planned
        numbers = [n for n in range(1, batch_size + 1) if batch_size % (n * parts) == 0]
        for num in sorted(numbers, key=lambda n: (abs(n - own), -n)):
            with contextlib.suppress(ScheduleError):
                name = schedule.name.partition(",")[0]
                made = build(name, num_stages=stages.num_stages, num_microbatches=num)
                like = replace(shape, num_microbatches=num, replica_of=made.shape.replica_of)
                if made.shape == like:
                    return stages, made
        raise PlanError(
            f"a batch of {batch_size} does not divide into the {own} micro-batches of the schedule "
            f"{schedule.name!r}, which does not exist for other numbers of them on these devices"
        )

    def _num_microbatches(self, batch_size: int, parts: int) -> int:
        """As few micro-batches, if there are several, as leave none larger than the plan's.

        Each divides into ``parts``.
        """
        num = self._program.num_microbatches
        if num == 1 or batch_size == 0:
            return 1
        most = max(-(-self._strategy.analysis.batch_size // num), parts)
        return next(
            n for n in range(1, batch_size + 1)
            if batch_size % (n * parts) == 0 and batch_size // n <= most
        )  # fmt: skip
