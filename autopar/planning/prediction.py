"""The prediction and the search report of a plan.

In: a priced strategy, its counted memory, and the simulated step if it is a pipeline. Out: the
sections of a plan that report them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from autopar.base.units import nine_digits
from autopar.cost_models import Profiler, RooflineModel
from autopar.cost_models.efficiency import TABLES, EfficiencyTable
from autopar.cost_models.estimate import CostError, Source, weakest
from autopar.cost_models.op_work import work
from autopar.cost_models.work import Family
from autopar.ir.graph import Op
from autopar.memory.program import ProgramMemory
from autopar.planning.baselines import Baselines
from autopar.planning.exposed_search import sharding_bound_s
from autopar.planning.staging import PipelineTimes, Staged
from autopar.plans.parts import KnownStrategy, SearchReport
from autopar.plans.predicted import Prediction, Units
from autopar.pricing.candidate import Candidate
from autopar.pricing.copies import copies_by_block
from autopar.pricing.step_time import ROUNDING, TimeParts, time_parts
from autopar.pricing.tables import OpTable, Pricing
from autopar.pricing.utilisation import model_work, whole_call
from autopar.search import OPTIMAL_GAP, Status, relative_gap
from autopar.sharding.strategy import Analysis


def predict(
    best: Candidate,
    memory: ProgramMemory,
    staged: Staged | None,
    *,
    stall_s: float = 0.0,
) -> Prediction:
    """The prediction of a step, in which computation waits ``stall_s`` for copies to the host."""
    priced = best.priced
    pipeline = None if staged is None else staged.times
    parts: TimeParts | PipelineTimes = time_parts(best) if pipeline is None else pipeline
    estimates = [
        table.estimates[pick]
        for table, pick in zip(priced.tables, best.solution.assignment)
        if isinstance(table, OpTable)
    ]
    sources = Counter(str(estimate.source) for estimate in estimates)
    pricing = priced.pricing
    collectives = list(priced.collectives(best.solution.assignment))
    if pipeline is not None and pipeline.collectives is not None:
        collectives.append(pipeline.collectives)
    updates = _update_sources(best)
    done = model_work(pricing.analysis, pricing.cluster.device)
    step_s = parts.step_s + stall_s
    exposed_s, hidden_s, copies_s = _without_copies(best, parts, staged)
    on_cpu = pricing.cluster.device.kind == "cpu"
    return Prediction(
        step_time_s=nine_digits(step_s),
        forward_s=nine_digits(parts.forward_s),
        backward_s=nine_digits(parts.backward_s),
        communication_s=nine_digits(exposed_s),
        copies_s=nine_digits(copies_s),
        update_s=nine_digits(parts.update_s),
        sources=dict(sorted(sources.items())),
        communication_source=_weakest(each.source for each in collectives),
        communication_is_noisy=any(each.is_noisy for each in collectives),
        unpriced=_unpriced(best),
        memory_bytes=memory.by_category,
        memory_peak_at=memory.peak_at,
        hidden_s=nine_digits(hidden_s),
        bubble_share=0.0 if pipeline is None else nine_digits(pipeline.bubble_share),
        pipeline_rank=0 if pipeline is None else pipeline.rank,
        resident_bytes=memory.device_bytes if on_cpu else None,
        model_flops=done.flops,
        model_flops_utilisation=nine_digits(_peak_step_s(pricing) / step_s),
        flops_shares=_flops_shares(pricing),
        samples_per_s=nine_digits(done.num_samples / step_s),
        tokens_per_s=nine_digits(done.num_tokens / step_s) if done.num_tokens else None,
        analytical_factor=_analytical_factor(best),
        num_noisy=sum(estimate.is_noisy for estimate in estimates),
        update_source=_weakest(updates),
        num_optimizer_states=pricing.optimizer.num_states,
    )


def _without_copies(
    best: Candidate, parts: TimeParts | PipelineTimes, staged: Staged | None
) -> tuple[float, float, float]:
    """Seconds of exposed and of overlapped communication, and of exposed casts and copies.

    Both times of ``parts`` include copies, which are taken to be what is exposed first.
    """
    by_block = copies_by_block(best)
    held = dict.fromkeys(by_block, 1.0)
    if staged is not None:
        held = staged.blocks_on(staged.times.rank, best.priced.pricing.graph)
    copies_s = best.priced.pricing.num_passes * sum(
        share * by_block[name] for name, share in held.items()
    )
    moved_s = max(parts.communication_s + parts.hidden_s - copies_s, 0.0)
    exposed_s = min(max(parts.communication_s - copies_s, 0.0), moved_s)
    least_s = ROUNDING * parts.step_s
    hidden_s, copied_s = moved_s - exposed_s, parts.communication_s - exposed_s
    return (
        exposed_s if exposed_s > least_s else 0.0,
        hidden_s if hidden_s > least_s else 0.0,
        copied_s if copied_s > least_s else 0.0,
    )


def _peak_step_s(pricing: Pricing) -> float:
    """Seconds of a step with all devices at the peak of their matrix units."""
    steps_per_s = 0.0
    for part in pricing.cluster.islands or (pricing.cluster,):
        peak_s = model_work(pricing.analysis, part.device).peak_s
        steps_per_s += part.num_devices / peak_s if peak_s else math.inf
    return 1 / steps_per_s


def _flops_shares(pricing: Pricing) -> dict[Units, float]:
    """The share of the model's operations by the units that they run on, over all devices."""
    shares: defaultdict[Units, float] = defaultdict(float)
    cluster = pricing.cluster
    for part in cluster.islands or (cluster,):
        done = model_work(pricing.analysis, part.device)
        for units, flops in done.flops_of_units.items():
            shares[cast(Units, units)] += flops / done.flops * part.num_devices
    by_size = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return {units: nine_digits(share / cluster.num_devices) for units, share in by_size}


def _weakest(sources: Iterable[Source]) -> str:
    found = list(sources)
    return str(weakest(found)) if found else "none"


def _unpriced(best: Candidate) -> dict[str, str]:
    """Operators that no cost model covers, with the reason."""
    priced, reasons = best.priced, dict[str, str]()
    for node, table, pick in zip(priced.nodes, priced.tables, best.solution.assignment):
        if isinstance(table, OpTable) and table.unpriced[pick]:
            name = priced.pricing.graph.ops[node.index].target_name
            reasons.setdefault(name, table.unpriced[pick])
    return dict(sorted(reasons.items()))


def _analytical_factor(best: Candidate) -> float | None:
    """The factor by which analytical prices may be off: a median over families by time."""
    priced, analysis = best.priced, best.priced.pricing.analysis
    table = _table(priced.pricing)
    families: dict[Any, Family] = {}
    times_s: defaultdict[float, float] = defaultdict(float)
    for node, found, pick in zip(priced.nodes, priced.tables, best.solution.assignment):
        if not isinstance(found, OpTable) or found.estimates[pick].source != Source.ANALYTICAL:
            continue
        kind = analysis.kinds[node.index]
        if kind not in families:
            families[kind] = _family(analysis, analysis.graph.ops[node.index])
        times_s[table.of(families[kind]).error_factor] += found.estimates[pick].total_s
    factors = sorted(times_s)
    upto_s = itertools.accumulate(times_s[factor] for factor in factors)
    half_s = sum(times_s.values()) / 2
    return next((factor for factor, time_s in zip(factors, upto_s) if time_s >= half_s), None)


def _table(pricing: Pricing) -> EfficiencyTable:
    """The efficiency table behind the analytical prices."""
    compute = pricing.compute
    roofline = compute.fallback if isinstance(compute, Profiler) else compute
    if isinstance(roofline, RooflineModel):
        return roofline.efficiency
    return TABLES[pricing.cluster.device.kind]


def _family(analysis: Analysis, op: Op) -> Family:
    try:
        return work(whole_call(analysis, op)).family
    except CostError:
        return Family.OTHER


def _update_sources(best: Candidate) -> set[Source]:
    """Sources of the prices of the parameters' updates."""
    pricing = best.priced.pricing
    stored = best.priced.assignment(best.solution.assignment).stored
    found = set[Source]()
    for value in pricing.graph.parameters:
        if value.differentiable and value.index in stored:
            size_bytes = pricing.local_bytes(value, stored[value.index])
            found.add(pricing.update(size_bytes, value.stored_dtype).source)
            found |= {estimate.source for _, estimate in pricing.update_products(value)}
    return found


def search_report(
    best: Candidate,
    candidates: Sequence[Candidate],
    searched: Sequence[Candidate],
    baselines: Baselines,
    *,
    estimated_bytes: float,
    is_pipeline: bool,
    pipelines: Mapping[str, float],
    not_pipelines: Mapping[str, str],
) -> SearchReport:
    """The optimality gap and the alternatives of a plan.

    ``searched``: the results of the search that found it. ``candidates``: the results without a
    memory limit. The gap is that of a step. In a pipeline, and where memory limits the search, it
    is that of the cost of the solution.
    """
    passes, cost = best.priced.pricing.num_passes, best.solution.cost
    step_s = time_parts(best).step_s / passes
    same = [c.solution.bound for c in searched if c.exposed == best.exposed]
    if is_pipeline:
        bound = min(cost, step_s, *(each.solution.bound for each in searched))
    else:
        bound = min(step_s, sharding_bound_s(candidates))
    gap = relative_gap(step_s, bound)
    is_limited = not set(searched) <= set(candidates)
    if (is_limited or is_pipeline) and not best.released:  # whose cost may leave out releases
        gap = min(gap, relative_gap(cost, min((cost, *same))))
    return SearchReport(
        status=str(Status.OPTIMAL if gap <= OPTIMAL_GAP else Status.FEASIBLE),
        bound_s=nine_digits(passes * bound),
        gap=0.0 if gap <= OPTIMAL_GAP else nine_digits(gap),
        estimated_bytes=round(estimated_bytes),
        considered={name: nine_digits(time_s) for name, time_s in _considered(candidates).items()},
        baselines={
            name: KnownStrategy(
                time_s=nine_digits(known.time_s),
                memory_bytes=round(known.memory_bytes),
                mesh=str(known.mesh),
                note=known.note,
            )
            for name, known in baselines.found.items()
        },
        missing=dict(baselines.missing),
        fitting_bytes=None if baselines.fitting_bytes is None else round(baselines.fitting_bytes),
        pipelines={name: nine_digits(time_s) for name, time_s in pipelines.items()},
        not_pipelines=dict(not_pipelines),
    )


def _considered(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Step time of the best strategy on each mesh."""
    found: dict[str, float] = {}
    for candidate in candidates:
        if candidate.solution.assignment:
            name = str(candidate.mesh)
            found[name] = min(time_parts(candidate).step_s, found.get(name, math.inf))
    return found


def redundant_ops(best: Candidate) -> dict[str, int]:
    """Counts of the operators without a rule, which every device computes redundantly."""
    graph = best.priced.pricing.graph
    spaces = best.priced.pricing.analysis.spaces
    counts: Counter[str] = Counter()
    for op, space in zip(graph.ops, spaces):
        fixed = all(o is None or graph.values[o].fixed for o in op.outputs)
        if space is None and not fixed:
            counts[op.target_name] += 1
    return dict(sorted(counts.items()))
