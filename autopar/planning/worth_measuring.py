"""What to measure before a search: the calls and collectives whose times could change its decision.

In: a model, a cluster and the search space. Out: op calls, and kinds and sizes of collectives. All
calls that the space can price are listed; those that together take a negligible part of the
shortest possible step, by their analytical prices, are left out, as are messages larger than any
that the model makes. Both depend on no measured time of a call, so that a second run of the same
script finds everything in the store.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from autopar.base.errors import PlanError
from autopar.cost_models import (
    Cluster,
    Collective,
    CollectiveGrid,
    CostError,
    OpCall,
    RooflineModel,
)
from autopar.cost_models.collective_measure import DEFAULT_SIZES_BYTES
from autopar.passes.prepare import Prepared
from autopar.planning.space import Space
from autopar.pricing.local_calls import calls_of
from autopar.pricing.utilisation import counted_calls

NEGLIGIBLE = 0.02
"""Calls that take less than this part of a step together are not measured: two measurements of one
call may differ by ten times as much before a third one is taken."""

_WITHIN_STAGES = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
)


def calls_worth_measuring(prepared: Prepared, cluster: Cluster, space: Space) -> list[OpCall]:
    """The op calls of a search in ``space`` that are not negligible, in graph order."""
    counts = _searched(prepared, cluster, space)
    times_s = dict(_times_s(counts.items(), cluster))
    whole_s = sum(time_s for _, time_s in _times_s(counted_calls(prepared.analysis), cluster))
    left_s = NEGLIGIBLE * whole_s / cluster.num_devices
    negligible: set[OpCall] = set()
    for call in sorted(times_s, key=times_s.__getitem__):
        left_s -= times_s[call]
        if left_s < 0:
            break
        negligible.add(call)
    return [call for call in counts if call not in negligible]


def collectives_worth_measuring(
    prepared: Prepared, cluster: Cluster, space: Space
) -> CollectiveGrid:
    """The collectives that a search in ``space`` prices.

    They reach up to the largest message of the model: its largest value, or all gradients at once.
    """
    graph = prepared.analysis.graph
    largest_bytes = max(
        sum(value.reduced_bytes for value in graph.parameters),
        max((value.size_bytes for value in graph.values), default=0),
    )
    smaller = [size for size in DEFAULT_SIZES_BYTES if size < largest_bytes]
    sizes_bytes = DEFAULT_SIZES_BYTES[: len(smaller) + 1]
    if space.has_pipelines:
        return CollectiveGrid(
            kinds=(*_WITHIN_STAGES, Collective.SEND_RECV), sizes_bytes=sizes_bytes
        )
    group_sizes = {
        mesh.size(axes)
        for mesh in space.meshes(cluster)
        for num in range(1, mesh.num_axes + 1)
        for axes in itertools.combinations(range(mesh.num_axes), num)
    }
    return CollectiveGrid(
        kinds=_WITHIN_STAGES, sizes_bytes=sizes_bytes, group_sizes=tuple(sorted(group_sizes))
    )


def _times_s(
    counts: Iterable[tuple[OpCall, int]], cluster: Cluster
) -> Iterator[tuple[OpCall, float]]:
    """The seconds of each call in a step, by its analytical price, where it has one."""
    model = RooflineModel(cluster.device)
    for call, count in counts:
        with contextlib.suppress(CostError):
            yield call, count * model.estimate(call).total_s


def _searched(prepared: Prepared, cluster: Cluster, space: Space) -> dict[OpCall, int]:
    """All distinct calls that a search in this space may price, with the most times per step."""
    meshes = space.meshes(cluster)
    counts = space.microbatch_counts(prepared.analysis.batch_size)
    found: dict[OpCall, int] = {}
    for num in counts:
        try:
            _, analysis, microbatches = prepared.cut(num)
        except PlanError:
            if len(counts) == 1:
                raise
            continue  # the search reports the reason
        for call, count in calls_of(analysis, meshes, microbatches).items():
            found[call] = max(count, found.get(call, 0))
    return found
