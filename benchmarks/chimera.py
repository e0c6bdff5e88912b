"""Chimera's published cases on a described cluster of P100s: schedules at their best, simulated.

Run: ``PYTHONPATH=. python benchmarks/chimera.py [--case NAME]``. GPT-2 with 1.39 billion parameters
on 2,048 nodes and BERT-48 on 64, one P100 each, as in Li and Hoefler, SC 2021. One layer is
captured and priced on the P100 preset and repeated; the network is described, not measured. As in
the paper, each scheme takes the number of stages and the micro-batch that are best for it within
the memory, and recomputes its activations only where it must. Pipelines without a flush (PipeDream,
PipeDream-2BW) train on old weights, and say how old. Chimera's own performance equation stands
beside the simulated step. Prints a table and writes ``results/chimera.json``; nothing is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from out_of_order_pipelines import even_stages
from setting import setting

from autopar.base.errors import ScheduleError
from autopar.cost_models import Cluster, CommunicationModel, Level
from autopar.frontend.capture import capture
from autopar.ir.block_names import FIXED
from autopar.ir.graph import Block, Graph
from autopar.pricing.layer_times import (
    LayerTimes,
    layer_durations,
    layer_links,
    layer_memory,
    layer_times,
)
from autopar.schedules import (
    Durations,
    Links,
    Memory,
    Schedule,
    build,
    simulate,
    with_recomputation,
    with_reductions,
)
from autopar.schedules.generators.forms import forms
from autopar.schedules.simulate.asynchronous import pipedream, pipedream_2bw
from autopar.schedules.simulate.chimera_equation import chimera_step_s

RESULT = Path(__file__).parent / "results" / "chimera.json"
DEPTHS, MICROBATCHES = (4, 8, 16, 32), (1, 2, 4, 8, 16, 32)
MAX_RUNS = 1024  # stages times micro-batches of a schedule
PUBLISHED = {  # GPT-2 on 2,048 nodes: how many times as fast Chimera is; a third party's reading
    "PipeDream-2BW": 1.16, "DAPPLE (1F1B)": 1.38, "GPipe": 1.42, "PipeDream": 2.01, "GEMS": 2.34,
}  # fmt: skip
FLUSHED = {"DAPPLE (1F1B)": "1f1b", "GPipe": "gpipe", "GEMS": "gems"}
WITHOUT_FLUSH = {"PipeDream": pipedream, "PipeDream-2BW": pipedream_2bw}
CHIMERA, BEST = "Chimera", "autopar's best form"
PAPERS_WAYS = ("direct", "forward_doubling", "backward_halving")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of equal layers, a number of nodes, and the sequences of a step.

    ``efficiency``: the share of the network's bandwidth that collectives reach. The paper's ones go
    through the hosts, and no figure of theirs is known, so two are tried.
    """

    name: str
    num_layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    num_nodes: int
    batch: int
    efficiency: float = 0.8
    published: Mapping[str, float] = field(default_factory=dict, hash=False)


CASES = (
    Case(
        name="GPT-2, 1.39 B", num_layers=64, hidden=1280, heads=20, vocabulary=50_257,
        sequence=632, num_nodes=2048, batch=2048, published=PUBLISHED,
    ),
    Case(
        name="GPT-2, 1.39 B, slow network", num_layers=64, hidden=1280, heads=20, vocabulary=50_257,
        sequence=632, num_nodes=2048, batch=2048, efficiency=0.2, published=PUBLISHED,
    ),
    Case(
        name="BERT-48", num_layers=48, hidden=1024, heads=16, vocabulary=30_522, sequence=128,
        num_nodes=64, batch=1024,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The costs of a model's stages for one micro-batch; G for ``num_copies`` of each stage."""

    layers: tuple[LayerTimes, ...]
    sizes: tuple[int, ...]
    cluster: Cluster

    def durations(self, num_copies: int) -> Durations:
        communication = CommunicationModel(self.cluster)
        found = layer_durations(self.layers).grouped(self.sizes)
        sums = self.memory.gradient_bytes
        ranks = tuple(range(num_copies))
        reduce_s = tuple(communication.estimate("all_reduce", int(b), ranks).time_s for b in sums)
        bandwidth = self.cluster.device.memory_bandwidth_bytes_per_s
        update_s = tuple(7 * size_bytes / bandwidth for size_bytes in sums)  # Adam in float32
        return replace(found, R=None, G=reduce_s, U=update_s)

    @property
    def links(self) -> Links:
        level = self.cluster.levels[-1]
        rate = level.bandwidth_bytes_per_s * level.efficiency
        return layer_links(self.layers, level.latency_s, rate).grouped(self.sizes)

    @property
    def memory(self) -> Memory:
        checkpoints = tuple(float(layer.boundary_bytes) for layer in self.layers)
        return replace(layer_memory(self.layers), checkpoint_bytes=checkpoints).grouped(self.sizes)


def daint(num_nodes: int, efficiency: float) -> Cluster:
    """A P100 per node on Cray's Aries network, as on Piz Daint."""
    level = Level(
        name="Aries", size=num_nodes, latency_s=10e-6, bandwidth_bytes_per_s=10.2e9,
        efficiency=efficiency,
        source="Cray XC: 10.2 GB/s of a node into the network; latency and efficiency assumed",
    )  # fmt: skip
    cluster = Cluster.preset("p100", nodes=num_nodes, devices_per_node=1)
    return structs.replace(cluster, levels=(*cluster.levels[:-1], level))


@cache
def graph_of(case: Case, microbatch: int) -> Graph:
    """Three layers with embedding and head, in float32 and without data."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_embd=case.hidden, n_head=case.heads, vocab_size=case.vocabulary,
        n_positions=case.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    ids = torch.zeros(microbatch, case.sequence, dtype=torch.int64)
    return capture(model, {"input_ids": ids, "labels": ids}).graph


@cache
def layers_of(case: Case, microbatch: int, cluster: Cluster) -> tuple[LayerTimes, ...]:
    """Embedding and first layer, the layers, the head: the middle one of three, repeated."""
    graph = graph_of(case, microbatch)
    blocks = [block for block in graph.blocks if block.name != FIXED]
    starts = [b.start for b in blocks if b.name.split("#")[0].endswith(("h.1", "h.2"))]
    head = next(b.start for b in blocks if b.start > starts[-1])
    edges = [blocks[0].start, starts[0], starts[-1], head, blocks[-1].stop]
    cut = [
        Block(index=i, name=f"part {i}", start=start, stop=stop)
        for i, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
    first, middle, last, head_times = layer_times(graph, cluster.device, cut)
    return (first, *[middle] * (case.num_layers - 2), last, head_times)


def stages_of(case: Case, cluster: Cluster, microbatch: int, num_stages: int) -> Stages:
    layers = layers_of(case, microbatch, cluster)
    sizes = tuple(even_stages([layer.total_s for layer in layers], num_stages))
    return Stages(layers=layers, sizes=sizes, cluster=cluster)


def settings_of(case: Case) -> Iterator[tuple[int, int, int]]:
    """Numbers of stages, sequences of a micro-batch, and micro-batches of a pipeline."""
    for depth in DEPTHS:
        width = case.num_nodes // depth
        for microbatch in MICROBATCHES:
            count, left = divmod(case.batch, width * microbatch)
            if count and not left and count * depth <= MAX_RUNS:
                yield depth, microbatch, count


def schedules_of(scheme: str, depth: int, count: int) -> Iterator[Schedule]:
    """The scheme's schedules for these numbers, as far as they exist."""
    wanted = [
        form
        for per_device in (1, 2)
        for form in forms(depth, per_device * depth, count)
        if scheme == BEST and not form.is_listed and form.name not in ("gems", "gpipe")
    ]
    made = [form.build for form in wanted]
    if scheme == CHIMERA:
        made = [
            lambda way=way: build(
                "chimera", num_stages=depth, concatenation=way,
                num_microbatches=count // 2 if way == "backward_halving" else count,
            )
            for way in PAPERS_WAYS
        ]  # fmt: skip
    if scheme in FLUSHED:
        made = [lambda: build(FLUSHED[scheme], num_stages=depth, num_microbatches=count)]
    for each in made:
        try:
            yield each()
        except ScheduleError:
            continue


def flushed(case: Case, cluster: Cluster, scheme: str) -> Iterator[Row]:
    """The step of every setting of a scheme that fits the memory."""
    for depth, microbatch, count in settings_of(case):
        for schedule in schedules_of(scheme, depth, count):
            if schedule.shape.num_stages > case.num_layers:
                continue
            stages = stages_of(case, cluster, microbatch, schedule.shape.num_stages)
            copies = schedule.shape.num_replicas * (case.num_nodes // depth)
            durations = stages.durations(copies)
            all_stages = range(schedule.shape.num_stages)
            variants = [schedule]
            if not schedule.shape.recomputed:
                variants.append(with_recomputation(schedule, all_stages))
            for each in variants:
                reduced = with_reductions(each, durations, stages.links)
                timeline = simulate(reduced, durations, stages.links, memory=stages.memory)
                if max(timeline.peak_memory_bytes) <= cluster.usable_memory_bytes:
                    yield {
                        "stages": depth, "micro_batch": microbatch, "micro_batches": count,
                        "schedule": each.name, "recomputed": bool(each.shape.recomputed),
                        "step_s": timeline.makespan_s + max(durations.U),
                        "bubble_ratio": timeline.bubble_ratio,
                        "peak_gbytes": max(timeline.peak_memory_bytes) / 1e9,
                    }  # fmt: skip
                    break


def without_flush(case: Case, cluster: Cluster, scheme: str) -> Iterator[Row]:
    """The same for pipelines on old weights, whose versions of the weights count as memory."""
    for depth, microbatch, count in settings_of(case):
        stages = stages_of(case, cluster, microbatch, depth)
        durations = stages.durations(case.num_nodes // depth)
        for recomputes in (False, True):
            backward = [
                i + w + f * recomputes for f, i, w in zip(durations.F, durations.I, durations.W)
            ]
            try:
                found = WITHOUT_FLUSH[scheme](
                    depth, count, replace(durations, B=tuple(backward)), stages.links
                )
            except ScheduleError:
                continue
            filled = build("1f1b", num_stages=depth, num_microbatches=max(depth, count))
            if recomputes:
                filled = with_recomputation(filled, range(depth))
            held = simulate(filled, durations, stages.links, memory=stages.memory)
            versions = (found.num_versions - 1) * max(stages.memory.gradient_bytes)
            peak = max(held.peak_memory_bytes) + versions
            if peak <= cluster.usable_memory_bytes:
                yield {
                    "stages": depth, "micro_batch": microbatch, "micro_batches": count,
                    "schedule": "1f1b without a flush", "recomputed": recomputes,
                    "step_s": found.time_s, "peak_gbytes": peak / 1e9,
                    "note": f"not eager's result: on weights up to {found.staleness} update"
                    f"{'s' * (found.staleness > 1)} old",
                }  # fmt: skip
                break


def equation(case: Case, cluster: Cluster) -> list[Row]:
    """Chimera's equation beside the simulated step of one unit, for even stages."""
    rows = []
    for depth in DEPTHS:
        stages = stages_of(case, cluster, 1, depth)
        durations = stages.durations(2 * (case.num_nodes // depth))
        mean = {kind: sum(getattr(durations, kind)) / depth for kind in "FIWG"}
        links = replace(stages.links, message_bytes=stages.links.message_bytes[0])
        message_s = links.latency_s + links.message_bytes / links.bandwidth_bytes_per_s
        unit = build("chimera", num_stages=depth, num_microbatches=depth)
        costs = Durations(**mean)
        eager = with_reductions(unit, costs, links, hidden_share=0.0)
        simulated_s = simulate(eager, costs, links).makespan_s
        by_equation_s = chimera_step_s(
            depth, forward_s=mean["F"], backward_s=mean["I"] + mean["W"], message_s=message_s,
            reduction_s=mean["G"],
        )  # fmt: skip
        rows.append(
            {
                "stages": depth, "simulated_s": simulated_s, "by_equation_s": by_equation_s,
                "equation_off_by": round(by_equation_s / simulated_s - 1, 4),
            }
        )  # fmt: skip
    return rows


def run(case: Case) -> Row:
    cluster = daint(case.num_nodes, case.efficiency)
    found: dict[str, Row] = {}
    for scheme in (CHIMERA, BEST, *FLUSHED, *WITHOUT_FLUSH):
        tried = (without_flush if scheme in WITHOUT_FLUSH else flushed)(case, cluster, scheme)
        best = min(tried, key=lambda row: row["step_s"], default=None)
        if best is not None:
            found[scheme] = best
    chimera_s = found[CHIMERA]["step_s"]
    for scheme, row in found.items():
        row["chimera_is_faster_by"] = round(row["step_s"] / chimera_s, 3)
        row["published"] = case.published.get(scheme)
        print(f"{case.name:14} {scheme:20}", {k: v for k, v in row.items() if v is not None})
    rows = equation(case, cluster)
    print(f"{case.name:14} equation", [row["equation_off_by"] for row in rows], flush=True)
    return {
        "model": case.name, "network_efficiency": case.efficiency,
        "nodes": case.num_nodes, "sequences": case.batch,
        "parameters": round(sum(layer.gradient_bytes for layer in layers_of(case, 1, cluster)) / 4),
        "schemes": found, "equation": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[case.name for case in CASES], help="default: all")
    asked = parser.parse_args().case
    rows: dict[str, Row] = {}
    if RESULT.exists():
        rows = {row["model"]: row for row in json.loads(RESULT.read_text())["cases"]}
    for case in CASES:
        if asked in (None, case.name):
            rows[case.name] = run(case)
            write([rows[each.name] for each in CASES if each.name in rows])


def write(cases: list[Row]) -> None:
    document = {
        **setting("torch", "transformers"),
        "note": "simulated at the P100 preset's prices, nothing is measured; sequences a step and "
        "the network's latency and efficiency are assumed; BERT-48 is priced with GPT-2's layers "
        "of its sizes",
        "cases": cases,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
