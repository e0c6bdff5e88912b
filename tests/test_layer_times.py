"""Layers of captured graphs: counts against hand counts, times against the cost model's sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models import Cluster, CommunicationModel
from autopar.frontend.capture import capture
from autopar.ir.graph import Graph
from autopar.pricing.layer_times import (
    LayerTimes,
    layer_co_run,
    layer_durations,
    layer_links,
    layer_memory,
    layer_times,
    weight_layers,
)
from autopar.schedules import Action, Kind, reverse_first_k_gain
from tests.models.zoo import build

DEVICE = Cluster.preset("v100", nodes=1, devices_per_node=1).device
BATCH, WIDTH = 8, 16


class Residual(nn.Module):
    """A linear layer, then two with a sum around them, then a head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(y + self.down(self.norm(self.up(y)))).square().mean()


def graph_of(width: int = WIDTH, batch: int = BATCH) -> Graph:
    with torch.device("meta"):
        return capture(Residual(width), (torch.empty(batch, width),)).graph


def layers_of(graph: Graph) -> tuple[LayerTimes, ...]:
    return layer_times(graph, DEVICE, weight_layers(graph))


def test_every_weight_starts_a_layer_that_takes_what_follows_it():
    names = [layer.name for layer in weight_layers(graph_of())]
    assert names == ["stem", "up", "down", "head"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet", "mlp"])
def test_layers_count_every_weight_and_every_gradient_byte_once(name):
    model, make_batch = build(name)
    graph = capture(model, make_batch(0)).graph
    uses = sum(
        isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding))
        or type(module).__name__ == "Conv1D"
        for module in model.modules()
    )
    layers = layers_of(graph)
    assert len(layers) == uses
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(layer.gradient_bytes for layer in layers) == sum(p.nbytes for p in trained)


def test_a_tied_gradient_is_reduced_with_the_layer_that_reads_it_first():
    model, make_batch = build("gpt2")
    layers = layers_of(capture(model, make_batch(0)).graph)
    assert layers[0].gradient_bytes == model.transformer.wte.weight.nbytes
    assert layers[-1].name == "lm_head"
    assert layers[-1].gradient_bytes == 0


def test_boundaries_carry_the_residual_too():
    float_bytes, rows = 4, BATCH * WIDTH
    stem, up, down, head = layers_of(graph_of())
    assert stem.boundary_bytes == float_bytes * rows
    assert up.boundary_bytes == float_bytes * (4 * rows + rows)
    assert down.boundary_bytes == float_bytes * rows
    assert head.boundary_bytes == 0


def test_the_first_layer_has_no_input_gradient():
    layers = layers_of(graph_of())
    assert layers[0].input_grad_s == 0
    assert all(layer.input_grad_s > 0 for layer in layers[1:])


def test_layers_and_blocks_cost_the_same_in_all():
    graph = graph_of()
    fine, coarse = layers_of(graph), layer_times(graph, DEVICE)
    assert sum(t.total_s for t in fine) == pytest.approx(sum(t.total_s for t in coarse))


def test_a_large_product_takes_its_arithmetic_three_times():
    """F, I and W of a square product are three products of the same size, near the peak's rate."""
    size = 8192
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False))
        graph = capture(
            model, (torch.empty(size, size), torch.empty(size, size)), loss_fn=F.mse_loss
        ).graph
    layer = layers_of(graph)[1]
    at_peak_s = 2 * size**3 / DEVICE.peak_flops_per_s.float32
    for direction_s in (layer.forward_s, layer.input_grad_s, layer.weight_grad_s):
        assert at_peak_s < direction_s < 1.6 * at_peak_s
    assert layer.weight_grad_share > 0.95


def test_small_kernels_leave_most_of_the_device_free():
    for layer in layers_of(graph_of()):
        assert 0 < layer.forward_share < 0.2
        assert 0 < layer.weight_grad_share < 0.2


def test_reductions_and_updates_are_priced_a_layer():
    cluster = Cluster.preset("v100", nodes=4, devices_per_node=4)
    communication = CommunicationModel(cluster)
    layers = layers_of(graph_of())
    table = layer_durations(layers, communication).table(len(layers))
    everyone = tuple(range(16))
    for stage, layer in enumerate(layers):
        reduction = communication.estimate("all_reduce", layer.gradient_bytes, everyone)
        assert table[Kind.G][stage] == reduction.time_s
        read_and_written = 4 + 3  # weight, gradient and two states; all but the gradient written
        bandwidth = cluster.device.memory_bandwidth_bytes_per_s
        assert table[Kind.U][stage] == pytest.approx(
            read_and_written * layer.gradient_bytes / bandwidth
        )
    alone = layer_durations(layers).table(len(layers))
    assert sum(alone[Kind.G]) == sum(alone[Kind.U]) == 0
    assert alone[Kind.W] == [layer.weight_grad_s for layer in layers]


def test_schedules_read_what_is_made_of_layers():
    cluster = Cluster.preset("v100", nodes=4, devices_per_node=4)
    layers = layers_of(graph_of(width=512, batch=4096))
    co_run = layer_co_run(layers, interference=0.1)
    both = layers[1].forward_share + layers[3].weight_grad_share
    slow = co_run.slowdown(Action(1, Kind.F, 0), Action(3, Kind.W, 0))
    assert slow == pytest.approx(1.1 * max(1.0, both))
    links = layer_links(layers, 1e-6, 1e9)
    assert links.boundary_bytes(4) == [layer.boundary_bytes for layer in layers]
    durations = layer_durations(layers, CommunicationModel(cluster))
    gain = reverse_first_k_gain(durations, num_layers=4, memory=layer_memory(layers))
    assert len(gain.curve) == 5
    assert gain.speedup >= 1
