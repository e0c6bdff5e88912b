"""The statistics that batch norm trains with: of the whole batch, or of each device's shard.

``global``, the default, gives the results of one device. ``local`` gives those of
``DistributedDataParallel`` without synchronised batch norm: each device normalises its own shard of
the batch (and of a micro-batch) with the statistics of that shard, so nothing is communicated,
forward or backward. The plan chooses the shards: a batch norm that it computes on the whole batch
uses the statistics of the whole batch. Running statistics become the mean of the shards' updates,
the same on all devices (``DistributedDataParallel`` keeps those of rank 0); they are averaged once
a step, and micro-batches update them one after the other. Evaluation is not affected.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.frontend.capture import Captured
from autopar.ir.graph import Graph, Ref

_TRAINED = "aten._native_batch_norm_legit_functional.default"
_STATISTICS, _MOMENTUM = (3, 4), 6
"""Positions of the running mean and variance (in operands and results) and of the momentum."""
_ADD = "aten.add.Tensor"


class BatchNorm(StrEnum):
    """The two kinds of statistics."""

    GLOBAL = "global"
    LOCAL = "local"


def check_batch_norm(statistics: Any) -> BatchNorm:
    """Return the kind of that name; raise InputError for another name."""
    if statistics not in list(BatchNorm):
        raise InputError(
            f"batch_norm is {statistics!r}; it must be batch_norm='global' (the statistics of the "
            "whole batch) or batch_norm='local' (of each device's shard)"
            + did_you_mean(str(statistics), list(BatchNorm))
        )
    return BatchNorm(statistics)


def with_batch_norm(captured: Captured, statistics: BatchNorm | str) -> Captured:
    """The same capture; with ``local``, its batch norms take their statistics shard by shard."""
    if statistics == BatchNorm.GLOBAL:
        return captured
    ops = tuple(
        replace(op, per_shard=True) if op.target_name == _TRAINED else op
        for op in captured.graph.ops
    )
    return replace(captured, graph=replace(captured.graph, ops=ops))


def batch_norm_of(graph: Graph) -> BatchNorm:
    """The kind of statistics in a graph; global where no batch norm trains."""
    return BatchNorm.LOCAL if any(op.per_shard for op in graph.ops) else BatchNorm.GLOBAL


def carried_factor(graph: Graph, buffer: int) -> float | None:
    """The factor of a buffer's old value in its update; the rest of it depends on the batch alone.

    1 - momentum for running statistics, 1 for a count of batches; None for any other buffer.
    """
    following = dict(graph.mutations).get(buffer)
    for op in graph.ops:
        if following is None or following not in op.outputs:
            continue
        place = op.outputs.index(following)
        if op.target_name == _TRAINED and place in _STATISTICS and op.args[place] == Ref(buffer):
            return 1.0 - float(op.args[_MOMENTUM])
        if op.target_name == _ADD and op.args[0] == Ref(buffer) and not isinstance(op.args[1], Ref):
            return 1
    return None
