"""Measured collective times between local devices reach the cost model, with any store."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch

from autopar.cost_models import Cluster, Collective, CollectiveGrid, Source, StoreWarning
from autopar.runtime.measure.collective_times import collective_times


def test_what_workers_measure_is_used_where_the_store_is_another_programs(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with sqlite3.connect(path) as stranger:
        stranger.execute("CREATE TABLE precious (data TEXT)")
    stranger.close()
    grid = CollectiveGrid(sizes_bytes=(1 << 18,))
    with pytest.warns(StoreWarning, match="another program"):
        model = collective_times(Cluster.detect(2), [torch.device("cpu")] * 2, path, grid, 60.0)
    for kind in Collective:
        assert model.estimate(kind, 1 << 18, (0, 1)).source is Source.MEASURED
