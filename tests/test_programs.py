"""Printed programs: known strategies have the collectives that their papers show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models import Cluster
from autopar.frontend.capture import capture
from autopar.lowering.differentiate import trace_joint
from autopar.lowering.types import Kernel, TensorMeta
from autopar.planning.constraints import Force, Pin
from autopar.planning.planner import Planned, make_planned
from autopar.planning.space import Space
from tests.oracles import assert_same, lockstep_steps, reference_steps, state_of


class Block(nn.Module):
    """A pre-norm feed-forward block with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 16, num_blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def planned(strategy: str) -> Planned:
    batch = (torch.randn(8, 16), torch.randn(8, 16))
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=4)
    return make_planned(
        capture(Stack(), batch), cluster, Space(mesh={"x": 4}), constraints=[Force(strategy)]
    )


def in_block(result: Planned, name: str) -> list[tuple[str, str]]:
    return [(c.phase, c.kind) for c in result.program.collectives() if c.where == name]


def of_parameter(result: Planned, name: str) -> list[tuple[str, str]]:
    return [(c.phase, c.kind) for c in result.program.collectives() if c.where == name]


def test_tensor_parallel_block_has_one_all_reduce_each_way():
    result = planned("tensor_parallel")
    assert result.program.blocks[1].name == "layers.1"
    assert in_block(result, "layers.1") == [("F", "all_reduce"), ("I", "all_reduce")]
    stored = result.plan.parameters
    assert stored["layers.1.up.weight"] == "S0"
    assert stored["layers.1.down.weight"] == "S1"


def test_tensor_parallel_program_prints_the_all_reduces():
    result = planned("tensor_parallel")
    number = result.program.blocks[1].kernel
    graphs = str(result.program).split("\n\nkernel ")[1:]
    counts = {
        graph.splitlines()[0]: graph.count("autopar.all_reduce")
        for graph in graphs
        if graph.startswith(f"{number} ")
    }
    assert counts == {f"{number} F": 1, f"{number} I": 1, f"{number} W": 0}


def test_zero3_block_gathers_forward_and_reduce_scatters_backward():
    result = planned("zero3")
    assert in_block(result, "layers.1") == []
    for name in ("layers.1.up.weight", "layers.1.down.weight", "layers.1.norm.weight"):
        assert of_parameter(result, name) == [("F", "all_gather"), ("G", "reduce_scatter")]


def test_data_parallel_reduces_each_gradient_once():
    result = planned("data_parallel")
    assert in_block(result, "layers.1") == []
    assert set(result.plan.parameters.values()) == {"R"}
    for name in result.plan.parameters:
        assert of_parameter(result, name) == [("G", "all_reduce")]


def test_equal_blocks_share_one_kernel():
    program = planned("data_parallel").program
    first, second, third = (block.kernel for block in program.blocks[:3])
    assert second == third
    assert first != second, "no gradient flows into the first block's input"


class Attention(nn.Module):
    """Causal attention with grouped heads: ``heads`` query heads, ``shared`` key heads."""

    def __init__(self, heads: int, shared: int, size: int = 8) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, size
        self.query = nn.Linear(16, heads * size)
        self.key = nn.Linear(16, shared * size)
        self.value = nn.Linear(16, shared * size)
        self.out = nn.Linear(heads * size, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            layer(x).view(b, s, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


def attention_planned(
    mesh: dict[str, int], pins: dict[str, str], heads: int, shared: int
) -> tuple[Planned, tuple[int, ...], tuple[int, ...]]:
    """Plan with these choices and compare with eager; the local shapes of query and key."""
    torch.manual_seed(0)
    model = Attention(heads, shared).double()
    batches = [{"x": torch.randn(1, 64, 16, dtype=torch.float64)} for _ in range(2)]
    captured = capture(model, batches[0])
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=4)
    constraints = [Pin(name, choice=choice) for name, choice in pins.items()]
    result = make_planned(captured, cluster, Space(mesh=mesh), constraints=constraints)
    got = lockstep_steps(result.strategy, captured, state_of(model), batches)
    assert_same(got, reference_steps(model, batches), tolerance=1e-9)
    (node,) = (
        node
        for kernel in result.program.kernels
        for node in kernel.forward.graph.nodes
        if "scaled_dot_product" in str(node.target)
    )
    query, key = (tuple(argument.meta["val"].shape) for argument in node.args[:2])
    return result, query, key


def test_context_parallel_attention_gathers_keys_and_values():
    pins = {"scaled_dot_product_attention*": "s", "linear_1": "m1", "linear_2": "m1"}
    result, query, key = attention_planned({"cp": 4}, pins, heads=2, shared=1)
    assert query == (1, 2, 16, 8)
    assert key == (1, 2, 64, 8)  # gathered as one head, and repeated beside the mask
    sizes = {
        kind: [c.size_bytes for c in result.program.collectives() if c.kind == kind]
        for kind in ("all_gather", "reduce_scatter")
    }
    whole = 64 * 1 * 8 * torch.float64.itemsize
    assert sizes["all_gather"].count(whole) == 2
    assert sizes["reduce_scatter"].count(whole) == 2


@pytest.mark.parametrize(
    ("mesh", "choice", "heads", "shared"),
    [({"tp": 4}, "r", 4, 1), ({"tp": 4}, "r", 8, 2), ({"a": 2, "b": 2}, "h r", 4, 2)],
    ids=str,
)
def test_fewer_key_heads_than_devices_leave_no_query_head_computed_twice(
    mesh, choice, heads, shared
):
    pins = {"scaled_dot_product_attention*": choice}
    _, query, _ = attention_planned(mesh, pins, heads, shared)
    assert query[1] == heads // 4


def kernel_results(
    kernel: Kernel, operands: Sequence[Tensor]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """The output of F, I and W, the gradient given for it, and those of the operands."""
    output, *saved = kernel.forward(*operands)
    cotangent = torch.randn_like(output)
    known = {"operand": operands, "saved": saved, "cotangent": [cotangent]}
    assert kernel.backward_input is not None
    made = kernel.backward_input(*(known[kind][i] for kind, i in kernel.input_sources))
    got = dict(zip(kernel.input_grads, made))
    if kernel.backward_weight is not None:
        known["handed"] = list(made[len(kernel.input_grads) :])
        late = kernel.backward_weight(*(known[kind][i] for kind, i in kernel.weight_sources))
        got.update(zip(kernel.weight_grads, late))
    return output, cotangent, got


def test_attention_makes_its_mask_again_and_keeps_the_truth_values() -> None:
    def function(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        *projected, mask = operands
        return (F.scaled_dot_product_attention(*projected, attn_mask=mask),)

    shape = (2, 3, 16, 8)
    mask = torch.ones(16, 16, dtype=torch.bool).tril().expand(2, 1, 16, 16)
    operands = [*(torch.randn(shape, dtype=torch.float64) for _ in range(3)), mask]
    kernel = trace_joint(
        function, [TensorMeta.of(x) for x in operands], [True] * 3 + [False], [False] * 4,
        torch.device("cpu"),
    ).kernel()  # fmt: skip
    _, *saved = kernel.forward(*operands)
    assert sorted({tuple(x.shape) for x in saved}) == [(2, 3, 16), shape], "no (2, 1, 16, 16)"
    assert ("operand", 3) in kernel.input_sources
    output, cotangent, got = kernel_results(kernel, operands)
    leaves = [*(x.clone().requires_grad_() for x in operands[:3]), mask]
    expected = function(leaves)[0]
    torch.testing.assert_close(output, expected)
    for place, gradient in enumerate(torch.autograd.grad(expected, leaves[:3], cotangent)):
        torch.testing.assert_close(got[place], gradient)


def test_a_weight_that_a_product_reads_transposed_has_its_gradient_as_it_lies() -> None:
    def function(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, weight, bias = operands
        return (torch.baddbmm(bias, x, weight.transpose(1, 2)),)

    operands = [torch.randn(shape).double() for shape in ((3, 5, 8), (3, 4, 8), (3, 1, 4))]
    kernel = trace_joint(
        function, [TensorMeta.of(x) for x in operands], [True] * 3, [False, True, True],
        torch.device("cpu"),
    ).kernel()  # fmt: skip
    output, cotangent, got = kernel_results(kernel, operands)
    leaves = [x.clone().requires_grad_() for x in operands]
    expected = function(leaves)[0]
    torch.testing.assert_close(output, expected)
    for place, gradient in enumerate(torch.autograd.grad(expected, leaves, cotangent)):
        torch.testing.assert_close(got[place], gradient)
        assert got[place].is_contiguous()


def test_what_is_drawn_or_smaller_than_its_operand_is_kept() -> None:
    """Noise would differ if drawn again; a boolean takes an eighth of the operand's bytes."""

    def function(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, fixed = operands
        return ((x * torch.rand_like(fixed)).masked_fill(fixed > 0, 0.0),)

    operands = [torch.randn(64, 8, dtype=torch.float64) for _ in range(2)]
    kernel = trace_joint(
        function, [TensorMeta.of(x) for x in operands], [True, False], [False] * 2,
        torch.device("cpu"),
    ).kernel()  # fmt: skip
    _, *saved = kernel.forward(*operands)
    assert sorted(str(x.dtype) for x in saved) == ["torch.bool", "torch.float64"]
    output, cotangent, got = kernel_results(kernel, operands)
    noise = output / operands[0]
    kept = operands[1] <= 0
    assert noise[kept].min() > 0
    assert not noise[~kept].any()
    assert got[0].shape == cotangent.shape


def test_weight_gradients_of_convolutions_are_left_to_w() -> None:
    """Both kinds of convolution: I computes only the inputs' gradients, W all others."""

    def function(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, weight, bias, other = operands
        y = torch.nn.functional.conv2d(x, weight, bias, padding=1)
        return (torch.nn.functional.conv_transpose2d(y.relu(), other),)

    shapes = [(2, 3, 5, 5), (4, 3, 3, 3), (4,), (4, 2, 3, 3)]
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    kernel = trace_joint(
        function, [TensorMeta.of(x) for x in operands], [True] * 4, [False, True, True, True],
        torch.device("cpu"),
    ).kernel()  # fmt: skip
    _, cotangent, got = kernel_results(kernel, operands)
    leaves = [x.clone().requires_grad_() for x in operands]
    expected = torch.autograd.grad(function(leaves)[0], leaves, cotangent)
    for place, gradient in enumerate(expected):
        torch.testing.assert_close(got[place], gradient)
    masks = [
        list(node.args[10])
        for module in (kernel.backward_input, kernel.backward_weight)
        if module is not None
        for node in module.graph.nodes
        if node.target is torch.ops.aten.convolution_backward.default
    ]
    assert masks == [[True, False, False]] * 2 + [[False, True, False], [False, True, True]]


def test_views_of_views_are_one_and_swaps_cancel() -> None:
    """A linear layer's chains of views reduce to those that change the layout."""

    def function(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, weight, other = operands
        copied = x.transpose(0, 1).reshape(24)
        return (copied.view(3, 8) @ weight, copied.view(2, 12) @ other)

    operands = [torch.randn(shape, dtype=torch.float64) for shape in [(4, 6), (8, 5), (12, 5)]]
    kernel = trace_joint(
        function, [TensorMeta.of(x) for x in operands], [True] * 3, [False, True, True],
        torch.device("cpu"),
    ).kernel()  # fmt: skip
    aten = torch.ops.aten
    targets = [node.target for node in kernel.forward.graph.nodes if node.op == "call_function"]
    assert targets.count(aten.transpose.int) == 1
    assert targets.count(aten.clone.default) == 1
    assert targets.count(aten.reshape.default) == 2
    assert kernel.backward_weight is not None
    late = [n.target for n in kernel.backward_weight.graph.nodes if n.op == "call_function"]
    assert late.count(aten.mm.default) == 2
    assert (
        late.count(aten.t.default) == 2
    )  # of the two operands; none of a gradient, there and back
    outputs = kernel.forward(*operands)[:2]
    for got, expected in zip(outputs, function(operands)):
        torch.testing.assert_close(got, expected)
