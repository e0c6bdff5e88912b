"""A user's own operator: its registered rules are used and checked, and wrong ones are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import PlanError, RuleError
from autopar.cost_models import Cluster, OpCall, RooflineModel, TensorSpec, flops
from autopar.cost_models.estimate import OpEstimate
from autopar.cost_models.matrix_work import product
from autopar.cost_models.shapes import outputs
from autopar.cost_models.work import MatrixShape, OpWork, output_bytes
from autopar.frontend.capture import capture
from autopar.ir.graph import Op, Value
from autopar.ir.mesh import Mesh
from autopar.rules import LocalContext, Space, SpaceBuilder, layout, register, unregister
from autopar.sharding.strategy import Analysis, Strategy
from autopar.testing.check_rule import check_rule
from tests.oracles import assert_same, lockstep_steps, random_assignment, reference_steps, state_of

NAME = "rulestest.scaled_product.default"


@torch.library.custom_op("rulestest::scaled_product", mutates_args=())
def scaled_product(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """``scale * x[m, k] w[k, n] / k``: depends on the size of what it sums over."""
    return x @ weight * (scale / x.shape[1])


@scaled_product.register_fake
def _(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    factor = ctx.scale / x.shape[1]
    return grad @ weight.T * factor, x.T @ grad * factor, None


scaled_product.register_autograd(_backward, setup_context=_save)


def product_space(
    op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None], *, sums: bool = True
) -> Space:
    (m, k), n = inputs[0].shape, inputs[1].shape[1]
    builder = SpaceBuilder()
    row, inner, column = builder.dim("m", m), builder.dim("k", k), builder.dim("n", n)
    return builder.build(
        [layout(row, inner), layout(inner, column)],
        [layout(row, column)],
        sums=frozenset({inner}) if sums else frozenset(),
        anchor=True,
    )


def product_local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x, weight, scale = args
    return context.op.target(x, weight, scale / context.num_shards("k"))


@contextmanager
def rule(space: Any, **options: Any) -> Iterator[None]:
    register(NAME, **options)(space)
    try:
        yield
    finally:
        unregister(NAME)


def call(**options: Any):
    target = torch.ops.rulestest.scaled_product.default
    x, weight = torch.randn(12, 6), torch.randn(6, 4)
    return check_rule(target, x, weight, 0.5, **options)


def test_a_custom_op_without_a_rule_is_named_with_the_fix():
    with pytest.raises(RuleError, match=r"register\('rulestest.scaled_product.default'\)"):
        call()


def test_a_right_rule_is_checked_with_every_choice():
    with rule(product_space, lower=product_local):
        checked = call()
    on_two = {str(c.choice) for c in checked if c.mesh.axis_sizes == (2,)}
    assert {"-", "m", "k", "n"} <= on_two
    assert {c.mesh.axis_sizes for c in checked} == {(2,), (3,), (4,), (2, 2), (2, 3)}


def test_a_lowering_that_forgets_the_split_is_found():
    with rule(product_space), pytest.raises(RuleError) as error:
        call(mesh=Mesh(("a",), (2,)))
    text = str(error.value)
    assert NAME in text
    assert "choice 'k'" in text
    assert "output 0" in text


def test_a_wrong_gradient_is_found_though_the_output_is_right():
    def local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        out = product_local(context, args, kwargs)
        return out + args[1].sum() - args[1].sum().detach() if context.num_shards("m") > 1 else out

    with rule(product_space, lower=local), pytest.raises(RuleError) as error:
        call(mesh=Mesh(("a",), (2,)))
    assert "choice 'm'" in str(error.value)
    assert "the gradient of operand 1" in str(error.value)


def test_a_layout_of_another_size_is_found():
    def space(op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> Space:
        builder = SpaceBuilder()
        m = builder.dim("m", inputs[0].shape[0])
        return builder.build([layout(m, m), layout(m, m)], [layout(m, m)])

    with rule(space), pytest.raises(RuleError, match="operand 0 gives dimension 1 the size 12"):
        call()


def test_a_lowering_that_fails_is_named_with_its_choice():
    def local(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        raise ZeroDivisionError("no such luck")

    with rule(product_space, lower=local), pytest.raises(RuleError, match="no such luck") as error:
        call(mesh=Mesh(("a",), (3,)))
    assert "on mesh a=3" in str(error.value)


def product_work(call: OpCall) -> OpWork:
    x, weight = call.tensors()
    shape = MatrixShape(m=x.shape[0], n=weight.shape[1], k=x.shape[1])
    return product(x, weight, shape, output_bytes(call))


def price(target: str, *args: Any) -> OpEstimate:
    device = Cluster.preset("a100-80", nodes=1, devices_per_node=1).device
    return RooflineModel(device).estimate(OpCall(target, args))


def test_an_own_product_with_its_work_is_priced_as_a_product():
    x = TensorSpec((512, 256), torch.float32, requires_grad=True)
    weight = TensorSpec((256, 128), torch.float32)
    with rule(product_space, work=product_work):
        assert price(NAME, x, weight, 0.5) == price("aten.mm.default", x, weight)
    assert price(NAME, x, weight, 0.5) != price("aten.mm.default", x, weight)


@torch.library.custom_op("rulestest::linear", mutates_args=())
def linear(x: Tensor) -> Tensor:
    return 2 * x


linear.register_fake(torch.empty_like)


def test_an_operator_of_another_library_is_not_taken_for_torchs():
    x = TensorSpec((6, 4), torch.float32)
    call = OpCall("rulestest.linear.default", (x,))
    assert outputs(call) == (x,)
    assert flops(call) == x.num_elements


def test_names_are_registered_once():
    with rule(product_space), pytest.raises(PlanError, match="has a rule already"):
        register(NAME)(product_space)
    with pytest.raises(PlanError, match="has no rule"):
        unregister(NAME)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ops.rulestest.scaled_product(self.first(x).relu(), self.second, 3.0)
        return (hidden**2).mean()


@pytest.mark.parametrize("registered", [False, True])
def test_a_model_with_the_op_trains_as_in_eager(registered):
    torch.manual_seed(0)
    model = Model().double()
    batches = [{"x": torch.randn(4, 8, dtype=torch.float64)} for _ in range(2)]
    captured = capture(model, batches[0])
    position = next(o.index for o in captured.graph.ops if o.target_name == NAME)
    expected = reference_steps(model, batches)

    def check() -> set[str]:
        analysis = Analysis(captured.graph)
        seen = set()
        for seed in range(6):
            strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), seed))
            seen.add(str(strategy.assignment.choices[position]))
            got = lockstep_steps(strategy, captured, state_of(model), batches)
            assert_same(got, expected, tolerance=1e-10)
        return seen

    if not registered:
        assert check() == {"-"}
        return
    with rule(product_space, lower=product_local):
        assert len(check()) > 1


@pytest.mark.parametrize("name", ["nonsense", "mylib.product", "", 3, torch.ops.aten.mm.default])
def test_a_rule_for_no_operators_name_is_refused(name):
    with pytest.raises(RuleError, match=r"register_rule\('mylib.product.default'\)"):
        register(name)


def test_a_rule_without_a_name_is_refused():
    with pytest.raises(RuleError, match="namespace, name and overload"):
        register()


@pytest.mark.parametrize(
    "target",
    [torch.relu, nn.functional.relu, torch.ops.aten.relu, "aten.relu.default", "relu"],
    ids=["torch", "functional", "packet", "text", "name"],
)
def test_what_is_no_overload_names_the_one_to_pass(target):
    with pytest.raises(RuleError, match=r"check_rule\(torch.ops.aten.relu.default, ...\)"):
        check_rule(target, torch.randn(4))


@pytest.mark.parametrize("dims", [(None, "k"), (("a", 3), "k"), (4,)])
def test_a_layout_of_something_but_names(dims):
    with pytest.raises(RuleError, match="is the name of an iteration dimension"):
        layout(*dims)
