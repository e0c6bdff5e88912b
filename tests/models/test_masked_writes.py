"""Writes under boolean masks: split like other element-wise operators, and equal to eager mode.

``x`` has shape ``[4, 4]`` and ``y = linear(x)`` too; masks depend on data, so that later batches
select other rows, or none.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import autopar
from autopar.base.errors import CaptureError, StepError
from autopar.base.torch_private import FakeTensorMode, largest_bytes
from autopar.cost_models import Cluster
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.planning.planner import make_planned
from tests.models.test_odd_captures import Odd
from tests.oracles import assert_splits_equal_eager, reference_steps


def score(y: Tensor) -> Tensor:
    return (y.sin() * torch.arange(1.0, 5.0, dtype=y.dtype)).sum()


def rows_set_to_a_parameter(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    y[x[:, 0] > 0] = model.linear.bias
    return score(y)


def elements_set_to_a_number(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    y[x > 0.3] = -100.0
    return score(y.softmax(-1))


def elements_set_to_an_element(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    y[x > 0] = y.mean()
    return score(y)


def columns_set(model: Odd, x: Tensor) -> Tensor:
    """The mask selects from the second dimension, with a value for each row."""
    y = model.linear(x)
    y[:, x[0] > 0] = model.linear.weight.sum(1, keepdim=True)
    return score(y)


def columns_of_parts_set(model: Odd, x: Tensor) -> Tensor:
    """One mask over two dimensions in the middle."""
    y = model.linear(x).view(2, 2, 2, 2)
    y[:, x.view(2, 2, 2, 2)[0, :, :, 0] > 0] = model.linear.bias.view(2, 1, 2)
    return score(y.reshape(4, 4))


def nothing_selected(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    y[x[:, 0] > 99] = model.linear.bias
    return score(y)


def rows_taken_from_another(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x), x[:, 1] > 0
    z = y.cos()
    z[mask] = y[mask]
    return score(z)


def rows_changed(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x) * 1.0, x[:, 1] > 0
    y[mask] += model.linear.bias
    y[mask] -= 0.5
    y[mask] *= 3
    y[mask] = -y[mask]
    return score(y)


def rows_accumulated(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    return score(y.index_put((x[:, 1] > 0,), model.linear.bias, accumulate=True))


def rows_cast(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x), x[:, 1] > 0
    y[mask] = (y.float()[mask] + 1).double()
    return score(y)


def labels_that_are_left_out(model: Odd, x: Tensor) -> Tensor:
    labels = x.argmax(-1)
    labels[labels == 1] = -100
    return torch.nn.functional.cross_entropy(model.linear(x), labels, ignore_index=-100)


def a_transposed_value(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x).t().clone(memory_format=torch.preserve_format)
    y[x[:, 0] > 0] = 2.0
    return score(y.t().reshape(16).view(4, 4))


def features_among_words(model: Odd, x: Tensor) -> Tensor:
    """The mask selects up to four of eight rows, which take those of the features in order."""
    words, features = x.repeat(2, 1).view(2, 4, 4).cos(), model.linear(x)
    mask = (x > 0)[:2] & (x[2:] > 0)
    mask = mask & (mask.flatten().cumsum(0).view(2, 4) <= 4)
    found = words.masked_scatter(mask.unsqueeze(-1).expand_as(words), features)
    return score(found.sum(0)) + model.linear(found).square().mean()


def parts_of_a_row(model: Odd, x: Tensor) -> Tensor:
    """The mask is of shape ``[4, 1, 1]``, and the source has one dimension."""
    parts, mask = model.linear(x).view(4, 2, 2), x[:, :1, None] > 0
    return score(parts.masked_scatter(mask, model.linear.weight.view(16)).view(4, 4))


SELECTED = [
    rows_set_to_a_parameter, elements_set_to_a_number, elements_set_to_an_element, columns_set,
    columns_of_parts_set, nothing_selected, rows_taken_from_another, rows_changed, rows_accumulated,
    rows_cast, labels_that_are_left_out, a_transposed_value, features_among_words, parts_of_a_row,
]  # fmt: skip


def as_many_rows_as_selected(model: Odd, x: Tensor) -> Tensor:
    """A value for each selected row: the mask always selects two."""
    y, order = model.linear(x), x[:, 0].argsort()
    y[order < 2] = model.linear.weight[:2]
    return score(y)


def logarithms(model: Odd, x: Tensor) -> Tensor:
    """The derivative is infinite or NaN where rows are not selected."""
    y = model.linear(x).relu() + 0.0
    y[y > 0] = y[y > 0].log()
    return score(y)


def products(model: Odd, x: Tensor) -> Tensor:
    """The other factor may be infinite where rows are not selected."""
    y, mask = model.linear(x), x > 0
    scale = torch.where(mask, x, torch.inf)
    z = y.clone()
    z[mask] = y[mask] * scale[mask] * model.linear.bias.sum()
    return score(z)


def elements_scattered(model: Odd, x: Tensor) -> Tensor:
    """The mask selects single elements."""
    return score(model.linear(x).masked_scatter(x > 0, model.linear.weight))


def a_scalar_scattered_over(model: Odd, x: Tensor) -> Tensor:
    """The mask broadcasts the tensor that is written to."""
    mean = model.linear(x).mean().view(1)
    return score(x + mean.masked_scatter((x[0, :1] > 0).expand(4), model.linear.bias))


LEFT = [as_many_rows_as_selected, logarithms, products, elements_scattered, a_scalar_scattered_over]


MESHES = Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2)), Mesh(("a", "b"), (2, 2))


def is_left(name: str) -> bool:
    kept = ("aten.index_put.default", "aten.masked_scatter.default")
    return name in kept or name.startswith("autopar_regions.")


@pytest.mark.parametrize("body", [*SELECTED, *LEFT], ids=lambda body: body.__name__)
def test_writes_under_masks_train_as_in_eager(body):
    torch.manual_seed(0)
    model = Odd(body).double()
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(3)]
    names = assert_splits_equal_eager(model, batches, MESHES)
    assert any(map(is_left, names)) == (body in LEFT), names


def test_more_words_than_features_are_an_error():
    torch.manual_seed(0)

    def all_rows(model: Odd, x: Tensor) -> Tensor:
        y = model.linear(x)
        return score(y.masked_scatter(x[:, :1] > 0, model.linear.weight[:3]))

    two, four = (
        torch.tensor(signs).view(4, 1).expand(4, 4) * 1.0 for signs in ([1, 1, -1, -1], [1] * 4)
    )
    with autopar.compile(
        Odd(all_rows), 1, example_inputs={"x": two}, profile_limit_s=0,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ) as compiled:  # fmt: skip
        compiled.train_step(x=two)
        with pytest.raises(StepError, match="out of range"):
            compiled.train_step(x=four)


def mean_of_rows_set(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    y[x[:, 0] > 0] = model.linear.bias
    return y.square().mean()


def test_a_mask_of_rows_hinders_no_data_parallelism():
    """All ops, the write among them, are split by rows where splits pay."""
    model = Odd(mean_of_rows_set)
    with torch.device("meta"):
        model.linear = torch.nn.Linear(4096, 4096)
        batch = {"x": torch.empty(8192, 4096)}
    captured = capture(model, batch)
    cluster = Cluster.preset("h100-sxm", nodes=1, devices_per_node=8)
    plan = make_planned(captured, cluster).plan
    writes = [words for name, words in plan.ops.items() if name.startswith("where")]
    assert writes
    assert "-" not in writes


def test_a_batch_with_masked_rows_is_split_into_microbatches():
    torch.manual_seed(0)
    model = Odd(mean_of_rows_set).double()
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(2)]
    expected = reference_steps(copy.deepcopy(model), batches)
    with autopar.compile(
        model, 1, example_inputs=batches[0], num_microbatches=2, profile_limit_s=0,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ) as compiled:  # fmt: skip
        losses = [compiled.train_step(**batch).item() for batch in batches]
    torch.testing.assert_close(losses[:1], expected.losses[:1], rtol=1e-12, atol=0)


def test_gradients_whose_size_depends_on_data_are_counted_at_their_most():
    """The gradient of the value is read from at most as many rows as there are."""
    model, batch = Odd(as_many_rows_as_selected), {"x": torch.randn(4, 4)}
    plan = autopar.plan(model, Cluster.preset("cpu", nodes=1, devices_per_node=2), batch)
    assert sum(plan.prediction.memory_bytes.values()) > 0


def test_the_most_bytes_of_a_size_that_depends_on_data():
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        assert largest_bytes(torch.empty(3, 5).untyped_storage()) == 60
        positions = torch.empty(3, 5).nonzero()  # [at most 15, 2], int64
        assert largest_bytes(positions.untyped_storage()) == 15 * 2 * 8
        assert largest_bytes((positions[:, 0] * 2).untyped_storage()) == 15 * 8
        endless = torch.empty(environment.create_unbacked_symint())
        with pytest.raises(CaptureError, match="no upper bound"):
            largest_bytes(endless.untyped_storage())
