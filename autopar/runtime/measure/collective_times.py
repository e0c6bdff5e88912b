"""Times of collectives between this machine's devices: measured once, then read.

In: a detected cluster and the store of measured times. Out: a `CommunicationModel` that answers
from them. Under ``torchrun`` the ranks measure together; one process starts workers to do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from autopar.base.accelerators import is_accelerator
from autopar.cost_models import (
    Cluster,
    CollectiveGrid,
    CommunicationModel,
    ProfileStore,
    all_measured,
    is_group_of,
    measure_collectives,
    measured_model,
)
from autopar.cost_models.store import CollectiveTime
from autopar.runtime.runners.spmd import is_spmd
from autopar.runtime.workers.group import WorkerGroup

_Found = dict[tuple[str, str], tuple[CollectiveTime, ...]]


class CollectiveService:
    """The workers' side of a measurement."""

    def __init__(self, rank: int, world_size: int) -> None:
        del rank, world_size

    def measure(self, cluster: str, path: str, grid: CollectiveGrid) -> _Found:
        """Measure; returns the times in the store at ``path``, even if it cannot be written."""
        described = Cluster.from_json(cluster)
        store = ProfileStore(Path(path), described.device)
        measure_collectives(described, store, grid)
        return store.collectives(described.backend)


def collective_times(
    cluster: Cluster,
    devices: Sequence[torch.device],
    path: Path,
    grid: CollectiveGrid,
    start_timeout_s: float,
) -> CommunicationModel:
    """Measure the times of ``grid`` that the store at ``path`` lacks, and return all that it has.

    ``cluster`` is the detected one, with as many devices. Collective under ``torchrun``: all ranks
    describe the same cluster.
    """
    store = ProfileStore(path, cluster.device)
    if cluster.num_devices == 1:
        return CommunicationModel(cluster)
    if is_spmd() and is_group_of(cluster):
        return measure_collectives(cluster, store, grid)
    if not is_spmd() and not all_measured(cluster, store, grid):
        _measure_in_workers(cluster, devices, store, grid, start_timeout_s)
    return measured_model(cluster, store)


def _measure_in_workers(
    cluster: Cluster,
    devices: Sequence[torch.device],
    store: ProfileStore,
    grid: CollectiveGrid,
    start_timeout_s: float,
) -> None:
    kind = devices[0].type
    workers = WorkerGroup(
        len(devices),
        service=CollectiveService,
        backend=cluster.backend,
        device_type=kind,
        device_indices=[d.index or 0 for d in devices] if is_accelerator(kind) else None,
        start_timeout_s=start_timeout_s,
    )
    with workers:
        found: _Found = workers.call("measure", cluster.to_json(), str(store.path), grid)[0]
    for (collective, shape), curve in found.items():
        for times in curve:
            store.put_collective(collective, shape, cluster.backend, times)
