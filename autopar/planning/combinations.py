"""The combinations of an open search space, each with a lower bound and a guess of its step time.

In: the setting of a search in an open space. Out: every combination of pipeline ranks,
micro-batches and mesh. Their lower bounds prune the search, their guesses order it; neither needs a
strategy.

- The **bound** counts arithmetic alone: the matrix products of the whole batch at their best (whole
  shapes), spread evenly over all devices, after the forward passes that the last pipeline rank
  waits for; over unequal islands by their speeds, without these passes.
- The **guess** is the time of Megatron's strategy: data parallelism along the outer axis, tensor
  parallelism along the inner one with four all-reduces per block and micro-batch, a gradient
  reduction at the end, gathered parameters and recomputed stages if they do not fit, and half of
  1F1B's bubbles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from autopar.base.errors import ConstraintError
from autopar.cost_models import ComputeModel, CostError, RooflineModel
from autopar.cost_models.compute import is_product
from autopar.cost_models.op_work import work
from autopar.cost_models.update import UpdateScope
from autopar.ir.graph import Op
from autopar.ir.mesh import Mesh
from autopar.lowering.stages import staged_blocks
from autopar.planning.meshes import candidate_meshes, pipeline_device_counts
from autopar.planning.setting import Setting
from autopar.pricing.node_memory import kept_bytes
from autopar.pricing.utilisation import counted_calls, whole_call
from autopar.search.stages import cut_chain
from autopar.sharding.strategy import Analysis

MAX_MICROBATCHES_PER_DEVICE = 16
KEPT_SHARE = 1 / 12
"""The inputs of a block as a share of its activations; of transformer layers, a twelfth or less."""
MAX_STAGE_RUNS = 4096
"""Limit on micro-batches times pipeline ranks: more are slow to simulate and save few bubbles."""

WITHIN_LAYERS = "cut inside layers"
"""Said of pipelines whose blocks are divided, so that a stage can begin inside a layer."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A number of pipeline ranks, the mesh of each, and a number of micro-batches.

    ``block_cuts``: the modules inside blocks in front of which a stage can begin too.
    """

    num_devices: int
    num_microbatches: int
    mesh: Mesh
    block_cuts: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [] if self.num_microbatches == 1 else [f"{self.num_microbatches} micro-batches"]
        parts += [WITHIN_LAYERS] if self.block_cuts else []
        return ", ".join([_described(self.num_devices), *parts])


def _described(num_devices: int) -> str:
    return f"{num_devices} pipeline ranks" if num_devices > 1 else "no pipeline"


class Combinations:
    """All combinations of one model on one cluster; see the module's docstring."""

    def __init__(self, setting: Setting) -> None:
        analysis = setting.prepared.analysis
        self.cluster = setting.cluster
        self.space = setting.space
        self.compute = setting.compute
        self.communication = setting.communication
        self.optimizer = setting.optimizer
        self.budget_bytes = setting.budget_bytes
        self.batch = analysis.batch_size
        self.num_blocks = len(staged_blocks(analysis.graph))
        self.calls = counted_calls(analysis)
        parameters = analysis.graph.parameters
        self.stored_bytes = sum(v.stored_bytes for v in parameters)
        self.gathered_bytes = sum(v.size_bytes for v in parameters)
        self.reduced_bytes = sum(v.reduced_bytes for v in parameters)
        self.boundary_bytes = _boundary_bytes(analysis)
        self.block_flops = _block_flops(analysis)
        self.kept_bytes = kept_bytes(analysis)
        self.products_s = self._products_s(self.compute)
        self.gain = self._gain()
        self.whole_s, self.launches_s = self._whole_s()
        self.slowest_share = cache(self._slowest_share)

    # --- enumeration ----------------------------------------------------------------------
    def device_counts(self) -> list[int]:
        """Possible numbers of pipeline ranks; 1 means no pipeline."""
        counts = pipeline_device_counts(self.cluster, self.space.mesh)
        return [n for n in counts if self.reason_against(n) is None]

    def reasons(self) -> dict[str, str]:
        """Reasons against the other numbers of pipeline ranks that the mesh allows."""
        counts = pipeline_device_counts(self.cluster, self.space.mesh)
        found = {_described(n): self.reason_against(n) for n in counts}
        return {name: reason for name, reason in found.items() if reason is not None}

    def reason_against(self, num_devices: int) -> str | None:
        space, most = self.space, max(self.num_blocks, 1)
        if num_devices == 1:
            return "a pipeline was asked for" if space.is_pipeline else None
        if self.optimizer.scope is UpdateScope.MODEL:
            return "the optimizer is not known to update each parameter by itself"
        if space.num_stages is not None and space.num_stages < num_devices:
            return f"num_stages={space.num_stages} is less than one stage per pipeline rank"
        if not self.space.candidates(self.cluster, num_devices):
            return "the forced strategy needs several devices on its axis"
        if num_devices > most:
            return f"this model has only {most} place{'s' * (most > 1)} where a stage can begin"
        return None

    def microbatch_counts(self, num_devices: int) -> list[int]:
        """Divisors of the batch: for a pipeline at least its number of ranks, otherwise all."""
        if self.space.num_microbatches is not None:
            return [self.space.num_microbatches]
        most = self.batch
        if num_devices > 1:
            most = min(MAX_MICROBATCHES_PER_DEVICE * num_devices, MAX_STAGE_RUNS // num_devices)
        found = [1] if num_devices == 1 else []
        return found + [
            num
            for num in range(max(num_devices, 2), min(most, self.batch) + 1)
            if self.batch % num == 0
        ]

    def all(self) -> Iterator[Combination]:
        """Every combination, including those found impossible later."""
        for num_devices in self.device_counts():
            meshes = self.space.candidates(self.cluster, num_devices)
            for num in self.microbatch_counts(num_devices):
                for mesh in meshes:
                    yield Combination(num_devices, num, mesh)

    def check(self) -> None:
        """Raise InputError or ConstraintError if there is nothing to search."""
        if self.device_counts():
            return
        mesh = self.space.mesh
        if not pipeline_device_counts(self.cluster, mesh):
            candidate_meshes(self.cluster, mesh)
        shared = "" if mesh is None else f" of mesh {dict(mesh)}"
        reasons = "; ".join(f"{name}: {why}" for name, why in self.reasons().items())
        raise ConstraintError(
            f"{self.cluster.num_devices} devices{shared} cannot form the pipeline that was asked "
            f"for ({reasons}); fix fewer options, or use a larger mesh"
        )

    # --- bound and guess ----------------------------------------------------------------------
    def bound_s(self, combination: Combination) -> float:
        """A lower bound on the step time of a combination."""
        forward_s, total_s = self.products_s
        if combination.num_devices > 1 and self.cluster.islands:
            return total_s / self.gain / self.cluster.num_devices
        waits = (combination.num_devices - 1) / combination.num_microbatches
        return (total_s + waits * forward_s) / self.cluster.num_devices

    def guess_s(self, combination: Combination) -> float:
        """A rough step time; see the module's docstring."""
        sizes = combination.mesh.axis_sizes
        ways = [(sizes[0], math.prod(sizes[1:]))]
        if len(sizes) == 1:
            ways.append((1, sizes[0]))
        return min(self._guess_s(combination, data, tensor) for data, tensor in ways)

    def _guess_s(self, combination: Combination, data: int, tensor: int) -> float:
        num_devices, num = combination.num_devices, combination.num_microbatches
        parts = math.gcd(self.batch, num * data) if self.batch else 1
        share = tensor * num_devices
        slowest = self.slowest_share(num_devices)
        time_s = slowest * num * (self.whole_s / parts / tensor + self.launches_s)
        if tensor > 1:
            ranks = tuple(range(tensor))
            size_bytes = math.ceil(self.boundary_bytes / parts)
            once_s = self.communication.estimate("all_reduce", size_bytes, ranks).time_s
            time_s += 4 * num * self.num_blocks / num_devices * once_s
        time_s *= 1 + (num_devices - 1) / (2 * num)
        if num_devices > 1:
            time_s /= self.gain
        if data > 1:
            ranks = tuple(range(0, data * tensor, tensor))
            reduced, gathered, stored = (
                math.ceil(size_bytes / share)
                for size_bytes in (self.reduced_bytes, self.gathered_bytes, self.stored_bytes)
            )
            time_s += self.communication.estimate("all_reduce", reduced, ranks).time_s
            if stored * (2 + self.optimizer.num_states) > 0.8 * self.budget_bytes:
                gather = self.communication.estimate("all_gather", gathered, ranks)
                time_s += num * gather.time_s
        activations = self.kept_bytes / parts / tensor
        return time_s * _without_memory(activations / self.budget_bytes)

    def _slowest_share(self, num_devices: int) -> float:
        """Fraction of the FLOPs on the slowest pipeline rank, with one stage or two per rank."""
        if num_devices == 1:
            return 1.0
        cuts = [0.0] * (len(self.block_flops) - 1)
        found = []
        for num_stages in (num_devices, 2 * num_devices):
            if num_stages <= len(self.block_flops):
                edges = (*cut_chain(self.block_flops, cuts, num_stages), len(self.block_flops))
                stages = [sum(self.block_flops[a:b]) for a, b in itertools.pairwise(edges)]
                if num_stages > num_devices:
                    stages = [sum(pair) for pair in zip(stages, reversed(stages))]
                found.append(max(stages))
        return min(found) / max(sum(self.block_flops), 1.0)

    def _products_s(self, compute: ComputeModel) -> tuple[float, float]:
        """Seconds of all matrix products, forward and in total.

        0 with measured prices: shards may then be cheaper than a fraction of the whole.
        """
        forward_s = total_s = 0.0
        if isinstance(compute, RooflineModel):
            for call, count in self.calls:
                try:
                    found = is_product(work(call))
                except CostError:
                    continue
                if found:
                    estimate = compute.estimate(call)
                    forward_s += count * estimate.forward_s
                    total_s += count * estimate.total_s
        return forward_s, total_s

    def _gain(self) -> float:
        """How much faster the devices of all islands are together than as many of the slowest, if
        each has work for its speed; 1 if all devices are alike."""
        total_s, num_slowest = self.products_s[1], 0.0
        for island in self.cluster.islands:
            island_s = self._products_s(RooflineModel(island.device))[1]
            num_slowest += island.num_devices * (total_s / island_s if island_s else 1.0)
        return max(1.0, num_slowest / self.cluster.num_devices)

    def _whole_s(self) -> tuple[float, float]:
        """Seconds of the whole batch on one device, and of launching each of its kernels once."""
        whole_s, num_kernels = 0.0, 0
        for call, count in self.calls:
            try:
                whole_s += count * self.compute.estimate(call).total_s
                todo = work(call)
            except CostError:
                continue  # the search prices it by its memory traffic
            sides = (todo.forward, todo.input_grad, todo.weight_grad)
            num_kernels += count * sum(side.num_kernels for side in sides)
        return whole_s, num_kernels * self.cluster.device.kernel_launch_s


def _without_memory(excess: float) -> float:
    """Slowdown of a step whose activations take ``excess`` times the memory: a share of the forward
    pass again, unless even the inputs of blocks take too much."""
    if excess < 0.8:
        return 1.0
    if excess * KEPT_SHARE > 0.8:
        return 1 + excess
    return 1 + (1 - 0.8 / excess) / 3


def _block_flops(analysis: Analysis) -> list[float]:
    """Forward FLOPs of each block that a stage can begin at."""
    known: dict[object, int] = {}

    def flops(op: Op) -> int:
        kind = analysis.kinds[op.index]
        if kind not in known:
            try:
                known[kind] = work(whole_call(analysis, op)).forward.flops
            except CostError:
                known[kind] = 0
        return known[kind]

    graph = analysis.graph
    return [float(sum(map(flops, graph.block_ops(block)))) for block in staged_blocks(graph)]


def _boundary_bytes(analysis: Analysis) -> int:
    """Bytes of the whole batch that cross a block boundary in the middle of the model."""
    blocks = staged_blocks(analysis.graph)
    values = analysis.graph.values
    stop = blocks[len(blocks) // 2].start if blocks else 0
    return sum(
        values[value].size_bytes
        for value, (producer, _) in analysis.producers.items()
        if producer < stop
        and values[value].differentiable
        and any(user >= stop for user, _ in analysis.consumers.get(value, ()))
    )
