"""Counted FLOPs and bytes against torch's own counter, closed formulas and real storages."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import samples
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost_models import OpCall, TensorSpec, bytes_moved, flops
from autopar.cost_models.compute import is_product
from autopar.cost_models.op_work import work
from autopar.cost_models.work import Family

aten = torch.ops.aten
MATRIX = [
    case
    for case in samples()
    if case[0].name().split("::")[1].split(".")[0]
    in ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "conv2d")
]


def _counted(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("case", MATRIX, ids=[str(i) + str(c[0]) for i, c in enumerate(MATRIX)])
def test_flops_in_all_three_directions_are_those_of_torchs_flop_counter(case):
    op, args, kwargs = case
    call = OpCall.of(op, args, kwargs)
    forward, out = _counted(lambda: op(*args, **kwargs))
    if op is aten.matmul.default and 1 in (args[0].dim(), args[1].dim()):
        # torch computes these as mv, which its counter does not know.
        forward = 2 * out.numel() * args[0].shape[-1]
        assert flops(call) == forward
        return
    assert flops(call) == forward
    if op is aten.conv2d.default and len(args) > 6:
        # torch counts a grouped weight gradient as if it had one group; see the test of groups.
        return
    backward, _ = _counted(lambda: out.sum().backward())
    todo = work(call)
    assert todo.input_grad.flops + todo.weight_grad.flops == backward
    assert todo.weight_grad.flops > 0 or not any(s.is_parameter for s in call.tensors())


def test_gradients_that_nobody_asks_for_cost_nothing():
    x, w = TensorSpec((4, 8)), TensorSpec((5, 8), requires_grad=True, is_parameter=True)
    todo = work(OpCall("aten.linear.default", (x, w)))
    assert todo.input_grad.flops == 0
    assert todo.input_grad.num_kernels == 0
    assert todo.weight_grad.flops == 2 * 4 * 5 * 8


def _floats(*shape):
    return torch.randn(shape, requires_grad=True)


def _weights(*shape):
    return torch.nn.Parameter(torch.randn(shape))


def _recurrent(module, op):
    """A call of a layer on 7 steps of 3 sequences of 6 features."""
    directions = 2 if module.bidirectional else 1
    state = _floats(module.num_layers * directions, 3, module.hidden_size)
    options = (True, module.num_layers, 0.0, True, module.bidirectional, False)
    return op, (_floats(7, 3, 6), state, [*module.parameters()], *options), {}


CHAIN = [_floats(2, 3), _floats(3, 5), _weights(5, 7), _floats(7, 11)]
COUNTED = [
    (aten.einsum.default, ("bi,io->bo", [_floats(64, 64), _weights(64, 64)]), {}),
    (aten.einsum.default, ("...ij,jk->...ik", [_floats(4, 2, 3, 5), _weights(5, 7)]), {}),
    (aten.einsum.default, ("...ij,...jk", [_floats(4, 2, 3, 5), _floats(1, 2, 5, 6)]), {}),
    (aten.einsum.default, ("bhid, bhjd -> bhij", [_floats(4, 2, 3, 5), _floats(4, 2, 6, 5)]), {}),
    (aten.einsum.default, ("iij,jk->ik", [_floats(3, 3, 5), _floats(5, 4)]), {}),
    (aten.einsum.default, ("bij,jk->bk", [_floats(3, 4, 5), _floats(5, 4)]), {}),
    (aten.einsum.default, ("ij,ij->", [_floats(3, 4), _floats(3, 4)]), {}),
    (aten.einsum.default, ("ab,bc,cd,de->ae", CHAIN), {}),
    (aten.einsum.default, ("ab,bc,cd,de->ae", CHAIN), {"path": [0, 1, 0, 1, 0, 1]}),
    (aten.einsum.default, ("ab,bc,cd,de->ae", CHAIN), {"path": [2, 3, 1, 2, 0, 1]}),
    (aten.linalg_multi_dot.default, (CHAIN,), {}),
    (aten.linalg_multi_dot.default, ([_floats(12, 3), _floats(3, 15), _weights(15, 7)],), {}),
    (aten.linalg_multi_dot.default, ([_floats(4, 9), _weights(9, 2), _floats(2)],), {}),
    (aten.tensordot.default, (_floats(2, 3, 4), _weights(4, 3, 5), [1, 2], [1, 0]), {}),
    (aten.inner.default, (_floats(2, 3), _weights(5, 3)), {}),
    (aten.gru_cell.default, (_floats(3, 6), _floats(3, 5), _weights(15, 6), _weights(15, 5)), {}),
    (
        aten.lstm_cell.default,
        (_floats(3, 6), [_floats(3, 5), _floats(3, 5)], _weights(20, 6), _weights(20, 5)),
        {},
    ),
    (
        aten.rnn_relu_cell.default,
        (_floats(3, 6), _floats(3, 5), _weights(5, 6), _weights(5, 5)),
        {},
    ),
    _recurrent(torch.nn.GRU(6, 5, 2, bidirectional=True), aten.gru.input),
    _recurrent(torch.nn.RNN(6, 5, 2), aten.rnn_tanh.input),
    (aten.conv2d.default, (_floats(4, 9, 9), _weights(6, 4, 3, 3)), {}),
    (aten.conv1d.default, (_floats(4, 9), _weights(6, 4, 3), None, [2], [1]), {}),
    (aten.conv_transpose2d.input, (_floats(4, 9, 9), _weights(4, 6, 3, 3)), {}),
]


@pytest.mark.parametrize("case", COUNTED, ids=[f"{i}-{c[0]}" for i, c in enumerate(COUNTED)])
def test_products_that_torch_makes_of_others_have_the_flops_that_it_counts(case):
    op, args, kwargs = case
    todo = work(OpCall.of(op, args, kwargs))
    forward, out = _counted(lambda: op(*args, **kwargs))
    first = out[0] if isinstance(out, tuple) else out
    backward, _ = _counted(lambda: first.sum().backward())
    assert todo.forward.flops == forward > 0
    assert todo.input_grad.flops + todo.weight_grad.flops == backward
    leaves = [leaf for arg in args for leaf in (arg if isinstance(arg, list) else [arg])]
    assert (todo.weight_grad.flops > 0) == any(isinstance(x, torch.nn.Parameter) for x in leaves)
    assert is_product(todo)


@given(
    st.lists(st.sampled_from("abcde"), max_size=4, unique=True),
    st.lists(st.sampled_from("abcde"), max_size=4, unique=True),
    st.sets(st.sampled_from("abcde")),
    st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_einsum_of_any_two_tensors_has_the_flops_that_torch_counts(first, second, kept, sizes):
    size_of = dict(zip("abcde", sizes))
    kept &= {*first, *second}
    equation = f"{''.join(first)},{''.join(second)}->{''.join(sorted(kept))}"
    tensors = [torch.randn([size_of[label] for label in term]) for term in (first, second)]
    call = OpCall.of(aten.einsum.default, (equation, tensors))
    counted, _ = _counted(lambda: torch.einsum(equation, tensors))
    if is_product(work(call)):
        assert flops(call) == counted
    else:
        assert counted == 0


def test_products_that_torch_does_not_count_have_those_of_their_formula():
    matrix, vector = _weights(7, 4), _floats(4)
    for op, args in ((aten.mv.default, ()), (aten.addmv.default, (_floats(7),))):
        todo = work(OpCall.of(op, (*args, matrix, vector)))
        of_all = (todo.forward.flops, todo.input_grad.flops, todo.weight_grad.flops)
        assert of_all == (2 * 7 * 4,) * 3
    summed = (_weights(4, 5), _floats(3, 4, 6), _floats(3, 6, 5))
    assert flops(OpCall.of(aten.addbmm.default, summed)) == 3 * 2 * 4 * 6 * 5
    assert flops(OpCall.of(aten.dot.default, (vector, vector))) == 2 * 4
    whole = torch.ones(32, 48, dtype=torch.int8)
    assert flops(OpCall.of(aten._int_mm.default, (whole, whole.t()))) == 2 * 32 * 48 * 32
    x, other = _floats(2, 30, 8), _floats(2, 4, 8)
    near, far = (OpCall.of(aten.cdist.default, (x, other, 2.0, mode)) for mode in (2, 1))
    assert flops(far) == 2 * 2 * 30 * 4 * (8 + 2)  # rows, with their squared lengths and ones
    assert flops(near) == 3 * 2 * 30 * 4 * 8  # a difference, its square, a sum


def test_a_product_in_float8_is_one():
    kind = torch.float8_e4m3fn
    a, b, one = TensorSpec((32, 64), kind), TensorSpec((64, 16), kind, (1, 64)), TensorSpec(())
    todo = work(OpCall("aten._scaled_mm.default", (a, b, one, one)))
    assert (todo.dtype, todo.forward.flops) == (kind, 2 * 32 * 64 * 16)


def test_a_bilinear_layer_costs_what_its_two_products_cost():
    x, y, weight = _floats(4, 3), _floats(4, 5), _weights(6, 3, 5)
    todo = work(OpCall.of(aten.bilinear.default, (x, y, weight, _weights(6))))
    forward, out = _counted(lambda: aten.einsum.default("bi,oij,bj->bo", [x, weight, y]))
    backward, _ = _counted(lambda: out.sum().backward())
    assert todo.forward.flops == forward
    assert todo.input_grad.flops + todo.weight_grad.flops == backward


def test_a_convolution_over_time_costs_what_the_same_one_costs_with_channels_first():
    x, weight = _floats(7, 2, 4), _weights(3, 4, 5)
    todo = work(OpCall.of(aten.conv_tbc.default, (x, weight, _weights(5), 1)))
    usual = (x.permute(1, 2, 0), weight.permute(2, 1, 0), None, [1], [1])
    forward, out = _counted(lambda: aten.conv1d.default(*usual))
    backward, _ = _counted(lambda: out.sum().backward())
    assert todo.family is Family.CONVOLUTION
    assert todo.forward.flops == forward
    assert todo.input_grad.flops + todo.weight_grad.flops == backward


@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "flash"])
def test_fused_attention_has_the_flops_that_torch_counts(kernel):
    """On meta tensors, since these are GPU kernels."""
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    q, k, v = (torch.randn(2, 3, n, 8, device="meta", requires_grad=True) for n in (5, 7, 7))
    args = (q, k, v) if kernel == "flash" else (q, k, v, None, True)
    todo = work(OpCall.of(op, args))
    forward, out = _counted(lambda: op(*args))
    backward, _ = _counted(lambda: out[0].sum().backward())
    assert todo.forward.flops == forward
    assert todo.input_grad.flops == backward


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 8)
)
@settings(max_examples=30, deadline=None)
def test_attention_flops_are_those_of_its_two_products(batch, heads, rows, columns, dim):
    q = torch.randn(batch, heads, rows, dim)
    k = torch.randn(batch, heads, columns, dim)
    products, _ = _counted(lambda: torch.softmax(q @ k.transpose(-1, -2), -1) @ k)
    call = OpCall.of(aten.scaled_dot_product_attention.default, (q, k, k))
    assert flops(call) == products


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_lstm_flops_are_those_of_its_cells(num_layers, bidirectional):
    module = torch.nn.LSTM(6, 5, num_layers, batch_first=True, bidirectional=bidirectional)
    x = torch.randn(3, 7, 6)
    directions = 2 if bidirectional else 1
    state = torch.zeros(num_layers * directions, 3, 5)
    weights = [w for _, w in module.named_parameters()]
    args = (x, [state, state], weights, True, num_layers, 0.0, True, bidirectional, True)
    call = OpCall.of(aten.lstm.input, args)
    cell_products = sum(w.numel() for w in weights if w.dim() == 2)
    assert flops(call) == 2 * 3 * 7 * cell_products
    # The first layer's input needs no gradient, so its product is missing from the backward pass.
    first = sum(w.numel() for n, w in module.named_parameters() if n.startswith("weight_ih_l0"))
    assert work(call).weight_grad.flops == 2 * 3 * 7 * (2 * cell_products - first)


def test_bytes_of_a_sum_are_those_of_the_storages_it_touches():
    x, row = torch.randn(64, 32), torch.randn(32)
    out = x + row
    touched = sum(t.untyped_storage().nbytes() for t in (x, row, out))
    assert bytes_moved(OpCall.of(aten.add.Tensor, (x, row))) == touched


def test_looking_up_a_few_rows_does_not_read_the_table():
    table = TensorSpec((50_000, 64))
    call = OpCall("aten.embedding.default", (table, TensorSpec((3,), torch.int64)))
    assert bytes_moved(call) == 2 * 3 * 64 * 4 + 3 * 8


def test_views_move_nothing_and_say_so():
    x = TensorSpec((4, 6), requires_grad=True)
    for target, args in (
        ("aten.view.default", ((24,),)),
        ("aten.transpose.int", (0, 1)),
        ("aten.unsqueeze.default", (0,)),
    ):
        todo = work(OpCall(target, (x, *args)))
        assert todo.family == Family.VIEW
        assert todo.forward.size_bytes == todo.input_grad.size_bytes == 0


def test_the_gradient_of_a_broadcast_operand_is_a_reduction_of_the_output():
    x = TensorSpec((128, 16), requires_grad=True)
    bias = TensorSpec((16,), requires_grad=True, is_parameter=True)
    todo = work(OpCall("aten.add.Tensor", (x, bias)))
    assert todo.input_grad.num_kernels == 0
    assert todo.weight_grad.size_bytes == 4 * (128 * 16 + 16)


@pytest.mark.parametrize("case", samples(), ids=lambda case: str(case[0]))
def test_every_sample_has_work_unless_it_is_a_view(case):
    op, args, kwargs = case
    call = OpCall.of(op, args, kwargs)
    todo = work(call)
    if todo.family == Family.VIEW:
        return
    assert todo.forward.num_kernels >= 1
    outs = op(*args, **kwargs)
    first = outs[0] if isinstance(outs, tuple) else outs
    assert todo.forward.size_bytes >= prod(first.shape) * first.element_size()


def test_a_grouped_convolution_costs_what_its_groups_cost_alone():
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(8, 2, 3, 3))
    todo = work(OpCall.of(aten.conv2d.default, (x, w, None, [1, 1], [1, 1], [1, 1], 4)))

    def alone():
        parts = zip(x.split(2, 1), w.split(2, 0))
        return sum(aten.conv2d.default(a, b, None, [1, 1], [1, 1]).sum() for a, b in parts)

    forward, out = _counted(alone)
    backward, _ = _counted(out.backward)
    assert todo.forward.flops == forward
    assert todo.input_grad.flops + todo.weight_grad.flops == backward


@pytest.mark.parametrize("sizes", [(3, 0, 5), (8,), (1, 1, 1, 1)], ids=str)
def test_grouped_products_cost_what_their_groups_cost_alone(sizes):
    """Each expert's rows by its own matrix: the FLOPs of the separate products, as torch counts."""
    k, n, half = 16, 8, torch.bfloat16
    rows = [torch.randn(size, k, requires_grad=True) for size in sizes]
    matrices = [torch.randn(k, n, requires_grad=True) for _ in sizes]
    forward, out = _counted(lambda: torch.cat([a @ b for a, b in zip(rows, matrices)]))
    backward, _ = _counted(lambda: out.sum().backward())
    call = OpCall(
        "aten._grouped_mm.default",
        (
            TensorSpec((sum(sizes), k), half, requires_grad=True),
            TensorSpec((len(sizes), k, n), half, requires_grad=True, is_parameter=True),
            TensorSpec((len(sizes),), torch.int32),
        ),
    )
    todo = work(call)
    assert todo.family is Family.MATMUL
    assert todo.forward.flops == forward
    assert todo.input_grad.flops + todo.weight_grad.flops == backward
    assert todo.input_grad.flops == todo.weight_grad.flops
