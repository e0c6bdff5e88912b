"""Peak memory of graphs against storages that are actually allocated and freed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.cost_models import CostError
from autopar.cost_models.allocator import Allocator, Category
from autopar.cost_models.memory import graph_memory


class _TrackedRun(fx.Interpreter):
    """Runs a graph on real tensors and records the bytes of all live storages at each node.

    fx's interpreter drops each value after its last use; inputs are held, as a caller holds them.
    """

    def __init__(self, module, held):
        super().__init__(module)
        self.held = held
        self.peak_bytes = 0
        self.peak_node = ""

    def run_node(self, node):
        result = super().run_node(node)
        tensors = list(_flat((tuple(self.env.values()), result, self.held)))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        if sum(storages.values()) > self.peak_bytes:
            self.peak_bytes, self.peak_node = sum(storages.values()), node.name
        return result


def _flat(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)


def _traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def _train_step(module, x):
    names = [name for name, _ in module.named_parameters()]
    values = [p.detach().clone() for p in module.parameters()]

    def step(x, *values):
        with torch.enable_grad():
            leaves = [v.detach().requires_grad_() for v in values]
            out = torch.func.functional_call(module, dict(zip(names, leaves)), (x,))
            loss = out.pow(2).mean()
            return loss.detach(), *torch.autograd.grad(loss, leaves)

    return _traced(step, x, *values), (x, *values)


MODELS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)), (32, 16)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        (2, 3, 12, 12),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        (2, 6, 16),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_training_step_is_that_of_its_real_storages(name):
    module, shape = MODELS[name]()
    graph, inputs = _train_step(module, torch.randn(shape))
    tracked = _TrackedRun(graph, inputs)
    tracked.run(*inputs)
    counted = graph_memory(graph.graph)
    assert counted.peak_bytes == tracked.peak_bytes
    assert counted.peak_node == tracked.peak_node
    assert sum(counted.peak_by_category.values()) == counted.peak_bytes


_OPS = {
    "view": lambda a, b: a.view(-1).view(8, 8),
    "transpose": lambda a, b: a.t(),
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b,
    "slice": lambda a, b: torch.cat([a[:4], b[4:]]),
    "split": lambda a, b: a.split(4)[0].repeat(2, 1),
}


@given(st.lists(st.tuples(st.sampled_from(list(_OPS)), st.integers(0, 9)), min_size=1, max_size=9))
@settings(max_examples=15, deadline=None)
def test_random_graphs_peak_where_their_real_storages_do(steps):
    def function(x, y):
        values = [x, y]
        for name, pick in steps:
            other = values[pick % len(values)]
            source = values[-1] if name != "view" else values[-1].contiguous()
            values.append(_OPS[name](source, other))
        return values[-1]

    inputs = (torch.randn(8, 8), torch.randn(8, 8))
    graph = _traced(function, *inputs)
    # The interpreter keeps values that nobody uses; generated code drops them at once.
    graph.graph.eliminate_dead_code()
    tracked = _TrackedRun(graph, inputs)
    tracked.run(*inputs)
    assert graph_memory(graph.graph).peak_bytes == tracked.peak_bytes


def test_views_of_one_storage_count_once_and_keep_it_alive():
    def function(x):
        made = x * 2
        row = made[0]
        return row + made.view(-1)[:64], row

    graph = _traced(function, torch.randn(64, 64))
    counted = graph_memory(graph.graph)
    size = 64 * 64 * 4
    assert counted.peak_by_category == {Category.INPUTS: size, Category.ACTIVATIONS: size + 256}
    assert counted.saved_bytes == size + 256


def test_inputs_may_be_released_after_their_last_use():
    graph = _traced(lambda x: ((x * 2).sum() + 1) * 3, torch.randn(1000))
    kept = graph_memory(graph.graph)
    released = graph_memory(graph.graph, release_inputs=True)
    assert kept.peak_bytes >= released.peak_bytes
    assert released.curve_bytes[-1][1] == 4
    assert kept.curve_bytes[-1][1] == 4004


def test_categories_persistent_bytes_and_workspace_are_told_apart():
    graph = _traced(lambda x, w: x @ w, torch.randn(4, 8), torch.randn(8, 2))
    weight = [node.name for node in graph.graph.nodes if node.op == "placeholder"][1]
    counted = graph_memory(
        graph.graph,
        categories={weight: Category.PARAMETERS},
        persistent={Category.OPTIMIZER_STATE: 2 * 8 * 2 * 4},
        workspace_bytes=lambda node: 100 if "mm" in node.name else 0,
        allocator=Allocator(granule_bytes=64),
    )
    assert counted.peak_node == "mm"
    assert counted.peak_by_category == {
        Category.INPUTS: 128,
        Category.PARAMETERS: 64,
        Category.OPTIMIZER_STATE: 128,
        Category.ACTIVATIONS: 64,
        Category.WORKSPACE: 128,
    }


@given(st.integers(0, 10_000), st.integers(1, 1024))
def test_rounding_takes_the_least_number_of_granules(size_bytes, granule_bytes):
    taken = Allocator(granule_bytes=granule_bytes).rounded(size_bytes)
    assert taken % granule_bytes == 0
    assert size_bytes <= taken < size_bytes + granule_bytes


def test_a_graph_without_values_is_refused():
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    with pytest.raises(CostError, match="make_fx"):
        graph_memory(graph)
