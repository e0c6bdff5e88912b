"""Fast-forwarding with modulo allocation in pipelines of V100s, compared with GPipe.

The pipelines of ``out_of_order.py``, which prints and writes their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from out_of_order_models import (
    Row,
    bert,
    bert_classifier,
    bert_large_classifier,
    ethernet,
    gpt2,
    graph_of,
    side,
    v100,
)
from torch import nn

from autopar.ir.block_names import FIXED
from autopar.ir.graph import Block, Graph
from autopar.pricing.layer_times import (
    LayerTimes,
    layer_durations,
    layer_links,
    layer_memory,
    layer_times,
)
from autopar.schedules import Links, Timeline, build, simulate, with_recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline as in the authors' scripts: ``num_microbatches`` of ``microbatch`` sequences."""

    name: str
    make: Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]
    network: str
    num_devices: int
    num_microbatches: int
    microbatch: int


PIPELINES = tuple(
    Pipeline(
        name=name,
        make=make,
        network=network,
        num_devices=devices,
        num_microbatches=count,
        microbatch=size,
    )
    for name, make in (
        ("BERT-base, classifier", bert_classifier),
        ("BERT-large, classifier", bert_large_classifier),
        ("BERT-base, masked words", bert),
        ("GPT-2", gpt2),
    )
    for network, devices, count, size in (
        ("NVLink", 4, 4, 24),
        ("10 Gb/s Ethernet", 4, 4, 24),
        ("NVLink", 8, 8, 12),
        ("NVLink", 8, 40, 12),
    )
)


def pipeline() -> list[Row]:
    """Gain of fast-forwarding with modulo allocation over GPipe on contiguous, balanced stages."""
    return [pipeline_row(case) for case in PIPELINES]


def pipeline_row(case: Pipeline) -> Row:
    cluster = v100(1, case.num_devices)
    if case.network != "NVLink":
        cluster = ethernet(case.num_devices, 1)
    graph = graph_of(case.make, case.microbatch)
    layers = layer_times(graph, cluster.device, transformer_layers(graph))
    durations = layer_durations(layers)
    level = cluster.levels[-1]
    links = layer_links(layers, level.latency_s, level.bandwidth_bytes_per_s * level.efficiency)
    memory = layer_memory(layers)
    sizes = even_stages([layer.total_s for layer in layers], case.num_devices)
    keeping = build("gpipe", num_stages=case.num_devices, num_microbatches=case.num_microbatches)
    gpipe, recomputing = (
        simulate(
            schedule, durations.grouped(sizes), links.grouped(sizes), memory=memory.grouped(sizes)
        )
        for schedule in (keeping, with_recomputation(keeping, range(case.num_devices)))
    )
    by_group = {}
    for group in range(1, len(layers) // case.num_devices + 1):
        schedule = build(
            "fast_forward",
            num_stages=len(layers),
            num_microbatches=case.num_microbatches,
            num_devices=case.num_devices,
            group_size=group,
            durations=durations,
            links=links,
        )
        by_group[group] = simulate(schedule, durations, links, memory=memory)
    row: Row = {
        "model": case.name,
        "network": case.network,
        "gpus": case.num_devices,
        "micro_batches": case.num_microbatches,
        "micro_batch": case.microbatch,
        "layers": len(layers),
        "gpipe_stages": sizes,
        **compared(gpipe, recomputing, by_group),
        **loads_of_pipeline(case, layers, gpipe.makespan_s, links),
    }
    return {**row, "note": pipeline_note(row)}


def compared(gpipe: Timeline, recomputing: Timeline, by_group: dict[int, Timeline]) -> Row:
    best = min(by_group, key=lambda group: by_group[group].makespan_s)
    return {
        "gpipe_ms": round(1e3 * gpipe.makespan_s, 3),
        "gain": round(gpipe.makespan_s / by_group[best].makespan_s, 4),
        "gain_over_recomputing_gpipe": round(recomputing.makespan_s / by_group[best].makespan_s, 4),
        "group_size": best,
        "gain_by_group_size": {
            str(group): round(gpipe.makespan_s / timeline.makespan_s, 4)
            for group, timeline in by_group.items()
        },
        "gpipe_bubble": round(gpipe.bubble_ratio, 4),
        "fast_forward_bubble": round(by_group[best].bubble_ratio, 4),
        "gpipe_peak_gbytes": round(max(gpipe.peak_memory_bytes) / 1e9, 2),
        "fast_forward_peak_gbytes": round(max(by_group[best].peak_memory_bytes) / 1e9, 2),
    }


def loads_of_pipeline(
    case: Pipeline, layers: tuple[LayerTimes, ...], gpipe_s: float, links: Links
) -> Row:
    """Bounds for any schedule: balanced work, the costliest layer, a message over a forward."""
    even_s = sum(layer.total_s for layer in layers) / case.num_devices
    dearest = max(layers, key=lambda layer: layer.total_s)
    return {
        "dearest_layer": dearest.name,
        "ceiling": round(gpipe_s / (even_s * case.num_microbatches), 4),
        "dearest_layer_part": round(dearest.total_s / even_s, 4),
        "message_ms": round(1e3 * layers[0].boundary_bytes / links.bandwidth_bytes_per_s, 3),
        "layer_forward_ms": round(1e3 * layers[1].forward_s, 3),
    }


def transformer_layers(graph: Graph) -> tuple[Block, ...]:
    """The graph's blocks, with the embeddings in the first transformer layer as in the paper."""
    first, second, *rest = (block for block in graph.blocks if block.name != FIXED)
    return (Block(index=0, name=second.name, start=first.start, stop=second.stop), *rest)


def even_stages(costs: list[float], num_stages: int) -> list[int]:
    """Sizes of the contiguous stages whose largest cost is minimal."""

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return sum(costs[start:]), (len(costs) - start,)
        options = []
        for end in range(start + 1, len(costs) - stages + 2):
            worst, sizes = best(end, stages - 1)
            options.append((max(sum(costs[start:end]), worst), (end - start, *sizes)))
        return min(options)

    return list(best(0, num_stages)[1])


def pipeline_note(row: Row) -> str:
    text = side("pipeline", row["gain"])
    if "inside" in text:
        return text
    text += (
        f": no bubble at all would give {row['ceiling']:.2f} over this GPipe; its bubble is "
        f"{row['gpipe_bubble']:.0%}, fast-forwarding's {row['fast_forward_bubble']:.0%}"
    )
    if row["dearest_layer_part"] > 0.5:
        text += (
            f"; {row['dearest_layer']} alone is {row['dearest_layer_part']:.2f} of a GPU's even "
            "part, so layers cannot be dealt evenly"
        )
    if row["message_ms"] > 0.2 * row["layer_forward_ms"]:
        text += (
            f"; a message takes {row['message_ms']:.2f} ms and a layer's forward "
            f"{row['layer_forward_ms']:.2f} ms"
        )
    if row["micro_batches"] > row["gpus"]:
        text += (
            f"; at most {row['gpus']} micro-batches are in flight, where GPipe holds all "
            f"{row['micro_batches']} ({row['fast_forward_peak_gbytes']:.0f} against "
            f"{row['gpipe_peak_gbytes']:.0f} GB a GPU)"
        )
    text += (
        f"; over a GPipe that recomputes, as its paper's does, the gain is "
        f"{row['gain_over_recomputing_gpipe']:.2f}"
    )
    if row["gpipe_peak_gbytes"] * 1e9 > v100(1, 1).usable_memory_bytes:
        text += "; this GPipe does not fit the device, and would have to recompute"
    return text
