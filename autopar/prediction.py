"""What a plan says of a strategy: its predicted step by parts, how good it is known to be.

In: a priced strategy, its counted memory, and the simulated step of a pipeline where there is one.
Out: the parts of a plan that report them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.baselines import Baselines
from autopar.cost_models.estimate import weakest
from autopar.cost_models.memory import resident_bytes
from autopar.lowering.memory import ProgramMemory
from autopar.pipelines import PipelineTimes
from autopar.plan import KnownStrategy, Prediction, SearchReport
from autopar.pricing import OpTable
from autopar.problem import Candidate
from autopar.search import OPTIMAL_GAP, Status, relative_gap
from autopar.utilisation import model_work


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """The seconds of one training step by what they are spent on."""

    forward_s: float
    backward_s: float
    communication_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.communication_s + self.update_s


def time_parts(candidate: Candidate) -> TimeParts:
    """A strategy's cost by its parts."""
    forward = backward = update = communication = 0.0
    priced, picks = candidate.priced, candidate.solution.assignment
    for table, cost, pick in zip(priced.tables, priced.costs, picks):
        communication += float(cost[pick] - table.cost_s[pick])
        if isinstance(table, OpTable):
            forward += table.estimates[pick].forward_s
            backward += table.estimates[pick].backward_s
            communication += float(table.internal_s[pick])
        else:
            update += float(table.cost_s[pick])
    communication += sum(float(m[picks[i], picks[j]]) for (i, j), m in priced.edges.items())
    return TimeParts(
        forward_s=forward, backward_s=backward, communication_s=communication, update_s=update
    )


def predict(best: Candidate, memory: ProgramMemory, pipeline: PipelineTimes | None) -> Prediction:
    priced = best.priced
    parts: TimeParts | PipelineTimes = time_parts(best) if pipeline is None else pipeline
    sources = Counter(
        str(table.estimates[pick].source)
        for table, pick in zip(priced.tables, best.solution.assignment)
        if isinstance(table, OpTable)
    )
    used = priced.pricing.communication_sources
    done = model_work(priced.pricing.analysis, priced.pricing.cluster.device)
    all_devices_s = parts.step_s * priced.pricing.cluster.num_devices
    on_cpu = priced.pricing.cluster.device.kind == "cpu"
    return Prediction(
        step_time_s=_round(parts.step_s),
        forward_s=_round(parts.forward_s),
        backward_s=_round(parts.backward_s),
        communication_s=_round(parts.communication_s),
        update_s=_round(parts.update_s),
        sources=dict(sorted(sources.items())),
        communication_source=str(weakest(used)) if used else "none",
        unpriced=dict(sorted(priced.pricing.unpriced.items())),
        memory_bytes=memory.by_category,
        memory_peak_at=memory.peak_at,
        bubble_share=0.0 if pipeline is None else _round(pipeline.bubble_share),
        resident_bytes=resident_bytes(memory.by_category) if on_cpu else None,
        model_flops=done.flops,
        model_flops_utilisation=_round(done.peak_s / all_devices_s),
        samples_per_s=_round(done.num_samples / parts.step_s),
        tokens_per_s=_round(done.num_tokens / parts.step_s) if done.num_tokens else None,
    )


def _round(seconds: float) -> float:
    """Nine significant digits: sums in another order must not change a plan's bytes."""
    return float(np.format_float_positional(seconds, precision=9, fractional=False)) + 0.0


def search_report(
    best: Candidate,
    candidates: Sequence[Candidate],
    searched: Sequence[Candidate],
    baselines: Baselines,
) -> SearchReport:
    cost = best.solution.cost
    bound = min(cost, *(c.solution.bound for c in searched))
    gap = relative_gap(cost, bound)
    return SearchReport(
        status=str(Status.OPTIMAL if gap <= OPTIMAL_GAP else Status.FEASIBLE),
        bound_s=_round(bound),
        gap=0.0 if gap <= OPTIMAL_GAP else _round(gap),
        estimated_bytes=round(best.estimated_bytes),
        considered={
            str(c.mesh): _round(c.solution.cost) for c in candidates if c.solution.assignment
        },
        baselines={
            name: KnownStrategy(
                time_s=_round(known.time_s),
                memory_bytes=round(known.memory_bytes),
                mesh=str(known.mesh),
                executable=known.candidate is not None,
                note=known.note,
            )
            for name, known in baselines.found.items()
        },
        missing=dict(baselines.missing),
    )


def redundant_ops(best: Candidate) -> dict[str, int]:
    """Operators that have no rule, so that every device computes them whole, and how often."""
    graph = best.priced.pricing.graph
    spaces = best.priced.pricing.analysis.spaces
    counts: Counter[str] = Counter()
    for op, space in zip(graph.ops, spaces):
        fixed = all(o is None or graph.values[o].fixed for o in op.outputs)
        if space is None and not fixed:
            counts[op.target_name] += 1
    return dict(sorted(counts.items()))
