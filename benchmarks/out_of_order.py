"""Predicted gains of out-of-order weight gradients on V100s, with the published ranges.

Run: ``PYTHONPATH=. python benchmarks/out_of_order.py`` in the repository. Captures real-size models
on the meta device, prices every op on the V100 preset, and predicts the second stream on one GPU,
reverse first-k under data parallelism, and fast-forwarding with modulo allocation in a pipeline (Oh
et al., EuroSys 2022). Prints tables and writes ``results/out_of_order.json`` and ``.png``. Nothing
is measured: the figures are those of the cost model and the simulator, the same on every machine.
"""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib
from msgspec import structs
from out_of_order_models import (
    PUBLISHED,
    SEQUENCE,
    WORKLOADS,
    Row,
    Workload,
    ethernet,
    graph_of,
    side,
    v100,
)
from out_of_order_pipelines import pipeline
from setting import setting

from autopar.cost_models import Cluster, CommunicationModel
from autopar.ir.graph import Block, Graph
from autopar.pricing.layer_times import (
    LayerTimes,
    layer_co_run,
    layer_durations,
    layer_memory,
    layer_times,
    weight_layers,
)
from autopar.schedules import (
    Durations,
    Gain,
    Kind,
    multi_stream_gain,
    priority_iteration_s,
    reverse_first_k_gain,
)

matplotlib.use("Agg")

RESULTS = Path(__file__).parent / "results"
INTERFERENCE = 0.05  # what both streams lose to cache interference while they co-run
# time between launches of a framework without captured graphs; with them, the preset's is used
EAGER_LAUNCHES_S = (5e-6, 10e-6, 20e-6)
SCALED = "reductions as long as the compute"
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
NETWORKS = {
    "10 Gb/s Ethernet": ethernet(4, 4),
    "4 x 100 Gb/s InfiniBand": v100(4, 4),
    SCALED: ethernet(4, 4),
}


def single_gpu() -> list[Row]:
    """Gain of the second stream over the conventional order, also with eager launch times."""
    device = v100(1, 1).device
    rows = []
    for item in WORKLOADS:
        graph = graph_of(item.make, item.single_batch)
        blocks = weight_layers(graph)
        layers = layer_times(graph, device, blocks)
        eager_s = {
            launch_s: sum(
                layer.total_s
                for layer in layer_times(
                    graph, structs.replace(device, kernel_launch_s=launch_s), blocks
                )
            )
            for launch_s in EAGER_LAUNCHES_S
        }
        gains = {
            loss: multi_stream_gain(
                layer_durations(layers),
                num_layers=len(layers),
                co_run=layer_co_run(layers, loss),
                memory=layer_memory(layers),
                max_memory_bytes=v100(1, 1).usable_memory_bytes,
            )
            for loss in (0.0, INTERFERENCE, 0.1)
        }
        gain = gains[INTERFERENCE]
        filled_s = sum(filled(layer) for layer in layers)
        row: Row = {
            "model": item.name,
            "batch": item.single_batch,
            **profile(layers),
            "gain": round(gain.speedup, 4),
            "gain_by_interference": {str(k): round(g.speedup, 4) for k, g in gains.items()},
            "gain_over_eager_launches": {
                f"{launch_s * 1e6:g} us": round(total_s / gain.best_s, 4)
                for launch_s, total_s in eager_s.items()
            },
            "mean_share": round(filled_s / gain.conventional_s, 4),
            "ceiling": round(gain.conventional_s / filled_s, 4),
            "depthwise_part": round(depthwise_s(graph, blocks, layers) / gain.conventional_s, 4),
        }
        rows.append({**row, "note": single_note(row)})
    return rows


def depthwise_s(graph: Graph, blocks: tuple[Block, ...], layers: tuple[LayerTimes, ...]) -> float:
    """Seconds of the layers with depthwise convolutions: kernels of one input channel."""
    depthwise = {p.index for p in graph.parameters if len(p.shape) == 4 and p.shape[1] == 1}
    return sum(
        layer.total_s
        for block, layer in zip(blocks, layers)
        if any(depthwise.intersection(op.inputs) for op in graph.block_ops(block))
    )


def filled(layer: LayerTimes) -> float:
    """Seconds in which the layer's work would occupy the whole device."""
    return (
        layer.forward_s * layer.forward_share
        + layer.input_grad_s * layer.input_grad_share
        + layer.weight_grad_s * layer.weight_grad_share
    )


def profile(layers: tuple[LayerTimes, ...]) -> Row:
    return {
        "layers": len(layers),
        "forward_ms": round(1e3 * sum(layer.forward_s for layer in layers), 3),
        "input_grad_ms": round(1e3 * sum(layer.input_grad_s for layer in layers), 3),
        "weight_grad_ms": round(1e3 * sum(layer.weight_grad_s for layer in layers), 3),
        "gradient_mbytes": round(sum(layer.gradient_bytes for layer in layers) / 1e6, 2),
    }


def single_note(row: Row) -> str:
    text = side("single_gpu", row["gain"])
    if "below" in text:
        text += (
            f": the priced kernels fill {row['mean_share']:.0%} of the device, so filling it all "
            f"would give {row['ceiling']:.2f}, and co-running costs {INTERFERENCE:.0%}; the "
            "published gains include hidden launches: against launches every "
            + ", ".join(
                f"{interval} it is {value:.2f}"
                for interval, value in row["gain_over_eager_launches"].items()
            )
        )
        if row["depthwise_part"] > 0.1:
            text += (
                f"; {row['depthwise_part']:.0%} of the time is depthwise convolutions, which the "
                "cost model prices as nearly empty tiles that hold the whole device"
            )
    return text


def data_parallel() -> list[Row]:
    """Gain of reverse first-k over wait-free reduction in the usual order, on 4 nodes of 4 V100."""
    return [
        data_parallel_row(item, item.parallel_batch, network, cluster)
        for network, cluster in NETWORKS.items()
        for item in WORKLOADS
        if item.parallel_batch is not None
    ]


def data_parallel_row(item: Workload, batch: int, network: str, cluster: Cluster) -> Row:
    graph = graph_of(item.make, batch)
    layers = layer_times(graph, cluster.device, weight_layers(graph))
    durations = layer_durations(layers, CommunicationModel(cluster))
    if network == SCALED:
        durations = loaded(durations, layers, 1.0)
    gain = first_k(durations, layers, cluster)
    compute_s, reduce_s = loads(durations, layers)
    priority_s = priority_iteration_s(durations, num_layers=len(layers))
    row: Row = {
        "model": item.name,
        "network": network,
        "batch": batch,
        **profile(layers),
        "all_reduce_ms": round(1e3 * reduce_s, 3),
        "network_over_compute": round(reduce_s / compute_s, 4),
        "conventional_ms": round(1e3 * gain.conventional_s, 3),
        "priority_ms": round(1e3 * priority_s, 3),
        "gain": round(gain.speedup, 4),
        "gain_over_priority": round(priority_s / gain.best_s, 4),
        "k": gain.best_k,
        "ceiling": round(gain.conventional_s / max(compute_s, reduce_s), 4),
        "first_layer_part": round(layers[0].gradient_bytes / gradient_bytes(layers), 4),
        "curve": [round(gain.conventional_s / p.iteration_s, 4) for p in gain.curve],
        "peak_memory_gbytes": [round(p.peak_memory_bytes / 1e9, 2) for p in gain.curve],
        "fits": [p.peak_memory_bytes <= cluster.usable_memory_bytes for p in gain.curve],
    }
    if network != SCALED and item.measured_samples_per_s is not None:
        row |= at_measured_speed(durations, layers, cluster, batch, item.measured_samples_per_s)
    if network == SCALED:
        row["gain_by_network_over_compute"] = {
            str(load): round(first_k(loaded(durations, layers, load), layers, cluster).speedup, 4)
            for load in LOADS
        }
    return {**row, "note": data_parallel_note(row)}


def first_k(durations: Durations, layers: tuple[LayerTimes, ...], cluster: Cluster) -> Gain:
    return reverse_first_k_gain(
        durations,
        num_layers=len(layers),
        memory=layer_memory(layers),
        max_memory_bytes=cluster.usable_memory_bytes,
    )


def loads(durations: Durations, layers: tuple[LayerTimes, ...]) -> tuple[float, float]:
    """Seconds of all computation with the updates, and of all reductions."""
    table = durations.table(len(layers))
    compute = sum(sum(table[kind]) for kind in (Kind.F, Kind.I, Kind.W, Kind.U))
    return compute, sum(table[Kind.G])


def loaded(durations: Durations, layers: tuple[LayerTimes, ...], load: float) -> Durations:
    """The durations, with reductions that take ``load`` of the compute time in total."""
    compute_s, reduce_s = loads(durations, layers)
    reductions = durations.table(len(layers))[Kind.G]
    return replace(durations, G=tuple(g * load * compute_s / reduce_s for g in reductions))


def at_measured_speed(
    durations: Durations,
    layers: tuple[LayerTimes, ...],
    cluster: Cluster,
    batch: int,
    measured_samples_per_s: float,
) -> Row:
    """The gain if all computation were scaled to the measured throughput."""
    compute_s, reduce_s = loads(durations, layers)
    measured_s = batch / measured_samples_per_s
    ratio = measured_s / compute_s
    table = durations.table(len(layers))
    faster = replace(
        durations,
        **{
            kind.value: tuple(seconds * ratio for seconds in table[kind])
            for kind in (Kind.F, Kind.I, Kind.W, Kind.U)
        },
    )
    return {
        "priced_samples_per_s": round(batch / compute_s, 1),
        "measured_samples_per_s": measured_samples_per_s,
        "network_over_measured_compute": round(reduce_s / measured_s, 4),
        "gain_at_measured_speed": round(first_k(faster, layers, cluster).speedup, 4),
    }


def gradient_bytes(layers: tuple[LayerTimes, ...]) -> int:
    return sum(layer.gradient_bytes for layer in layers)


def data_parallel_note(row: Row) -> str:
    text = side("data_parallel", row["gain"])
    if "inside" in text:
        return text
    text += (
        f": all-reduces take {row['network_over_compute']:.2f} of the compute time, and hiding all "
        f"that can be hidden would give {row['ceiling']:.2f}"
    )
    if row["first_layer_part"] > 0.1:
        text += (
            f"; {row['first_layer_part']:.0%} of the gradients are the first layer's, which the "
            "next forward waits for in every order"
        )
    if "gain_at_measured_speed" in row:
        text += (
            f"; priced at {row['priced_samples_per_s']:.0f} samples/s where "
            f"{row['measured_samples_per_s']:.0f} are measured: at that speed the network takes "
            f"{row['network_over_measured_compute']:.2f} of the compute time and the gain is "
            f"{row['gain_at_measured_speed']:.2f}"
        )
    text += f"; over reductions by priority, as BytePS does them, {row['gain_over_priority']:.2f}"
    return text


def settings() -> Row:
    device = v100(1, 1).device
    return {
        "device": f"{device.name}, float32, analytical prices of the preset, not calibrated on one",
        "kernel_launch_s": device.kernel_launch_s,
        "eager_launches_s": EAGER_LAUNCHES_S,
        "sequence": SEQUENCE,
        "batches": "32 (one GPU), 128 (ResNet-50 on many), micro-batches of 24 on 4 GPUs and 12 "
        "on 8 are the authors' scripts'; the others are ours",
        "layers": "each convolution, product and embedding with what follows it; in pipelines the "
        "transformer layers",
        "co_run": "two kernels run max(1, sum of shares) x (1 + interference) slower; a share is "
        "the kernel's time without launch and idle units over its time",
        "interference": INTERFERENCE,
        "clusters": "4 nodes x 4 V100, NVLink inside; across, one 10 Gb/s adapter a node (0.9 of "
        "it reached, 25 us a step, both assumed) or four of 100 Gb/s (the preset)",
        "data_parallel_baseline": "one all-reduce a layer as its gradient comes, "
        "first come first served, Adam; compute is not slowed by reductions; beside it by priority "
        "of the first layers, preempted at no cost, a lower bound of BytePS's time",
        "pipeline_baseline": "GPipe on contiguous stages of even cost, keeping its activations "
        "(and, beside it, recomputing them); the head for masked words is priced at all positions, "
        "not the masked ones alone",
        "measured_samples_per_s": "ResNet-50: NVIDIA DeepLearningExamples, one V100 32 GB, float32",
        "memory": f"{v100(1, 1).usable_memory_bytes} bytes usable",
    }


def draw(rows: list[Row], path: Path) -> None:
    """Plot the speed-up over the conventional order against the share of reversed layers."""
    from matplotlib import pyplot

    networks = ("10 Gb/s Ethernet", SCALED)
    figure, axes = pyplot.subplots(1, len(networks), figsize=(11, 4.2), layout="constrained")
    for panel, network in zip(axes, networks):
        panel.axhspan(*PUBLISHED["data_parallel"], color="0.92", label="published range")
        for row in rows:
            if row["network"] != network:
                continue
            ks = [k / row["layers"] for k in range(len(row["curve"]))]
            (line,) = panel.plot(ks, row["curve"], label=f"{row['model']} ({row['layers']} layers)")
            panel.plot(row["k"] / row["layers"], row["gain"], "o", color=line.get_color())
        panel.set_title(f"4 x 4 V100, {network}", fontsize=10)
        panel.set_xlabel("k / layers")
    axes[0].set_ylabel("speed-up of reverse first-k, predicted")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}, published {PUBLISHED[title]}")
    hidden = ("curve", "fits", "peak_memory_gbytes", "note", "gpipe_stages")
    for row in rows:
        print("  " + "  ".join(f"{k}={v}" for k, v in row.items() if k not in hidden))
        print(f"      {row['note']}")


def main() -> None:
    tables = {
        "single_gpu": single_gpu(),
        "data_parallel": data_parallel(),
        "pipeline": pipeline(),
    }
    for title, rows in tables.items():
        show(title, rows)
    RESULTS.mkdir(exist_ok=True)
    head = setting("torch", "transformers", "matplotlib")
    written = {**head, "settings": settings(), "published": PUBLISHED, **tables}
    (RESULTS / "out_of_order.json").write_text(json.dumps(written, indent=1) + "\n")
    draw(tables["data_parallel"], RESULTS / "out_of_order.png")


if __name__ == "__main__":
    main()
