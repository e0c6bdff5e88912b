"""The predicted times of each op of a plan, as its planner priced them on this machine.

In: a plan and the captured model. Out: for each op its seconds in a step by direction, the source
of the price, and its call at local shapes. Times that were measured here since then count.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models import (
    CommunicationModel,
    ComputeModel,
    OpCall,
    OpEstimate,
    Profiler,
    ProfileStore,
    RooflineModel,
    Source,
    default_store_path,
)
from autopar.frontend.capture import Captured
from autopar.ir.choice import parse_choice
from autopar.passes.prepare import prepare
from autopar.plans.document import Plan
from autopar.pricing.tables import Pricing
from autopar.rules.kernels import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPrice:
    """An op at its place in a block: ``estimate`` is of all micro-batches of a step.

    ``call`` is what a device computes for one micro-batch, ``None`` where a rule lowers the op to
    other kernels. ``is_derived``: the op's gradient is that of the call.
    """

    block: str
    place: int
    name: str
    operator: str
    estimate: OpEstimate
    call: OpCall | None
    is_derived: bool


def op_prices(plan: Plan, captured: Captured) -> tuple[OpPrice, ...]:
    """The prices of all ops in blocks, in graph order."""
    prepared = prepare(captured, plan.graph.batch_norm)
    cut = prepared.cut(plan.schedule.num_microbatches, plan.graph.block_cuts)
    device = plan.cluster.device
    with ProfileStore(default_store_path(), device) as store:
        compute: ComputeModel = RooflineModel(device)
        if set(plan.prediction.sources) != {Source.ANALYTICAL}:
            compute = Profiler(store, device, measuring=False)
        pricing = Pricing(
            cut.analysis, plan.device_mesh, plan.cluster, compute,
            CommunicationModel(plan.cluster), cut.microbatches,
            num_passes=plan.update.update.num_passes,
        )  # fmt: skip
        whole = " ".join("-" * plan.device_mesh.num_axes)
        found, graph = [], pricing.graph
        for block in graph.blocks:
            for place, op in enumerate(graph.block_ops(block)):
                choice = parse_choice(plan.ops.get(op.name, whole))
                table = pricing.op_table(op)
                made = pricing.calls(op, choice)
                found.append(
                    OpPrice(
                        block=block.name, place=place, name=op.name,
                        operator=str(op.target).removesuffix(".default"),
                        estimate=table.estimates[table.choices.index(choice)],
                        call=made[0].call if len(made) == 1 else None,
                        is_derived=len(made) == 1 and made[0].phase is Phase.BOTH,
                    )
                )  # fmt: skip
    return tuple(found)
