"""Models of every family, three of each fused: loss, gradients and buffers are those of each alone.

``make exhaustive`` takes every model of the zoo.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.fusion.forms.base import FORMS, Call, Form, Results
from autopar.fusion.fuse import LOOP
from tests.effort import EXHAUSTIVE
from tests.fusion.arrays import array_of, check_array
from tests.fusion.families import check_step, variants
from tests.models.zoo import MODELS, MORE_MODELS
from tests.runtime.conftest import Groups

QUICK = ("lstm", "bert", "alexnet", "dcgan", "pointnet")
NAMES = (*MODELS, *MORE_MODELS) if EXHAUSTIVE else QUICK
LOOPED = {"lstm": {"aten.lstm.input"}}
TOLERANCE = {"mixtral": 1e-4, "mobilenet_v2": 1e-6, "gpt2": 1e-6, "llama": 1e-6, "t5": 1e-6}


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str) -> None:
    models, batch = variants(name, 3, double=name != "mixtral")
    fused = check_step(models, batch, tolerance=TOLERANCE.get(name, 1e-7))
    assert fused.groups() == ((0, 1, 2),)
    looped = {op.target for op in fused.ops if op.form == LOOP}
    assert looped == LOOPED.get(name, set())
    assert len({op.target for op in fused.ops} & {"aten.linear.default", "aten.conv2d.default"})


def test_batch_norms_keep_statistics_and_counts_of_their_own(groups: Groups) -> None:
    models, batch = variants("resnet", 3)
    optimizers = [functools.partial(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.1, 0.03, 0)]
    array = array_of(groups, models, batch, optimizer=optimizers)
    check_array(array, [batch] * 3, tolerance=1e-7)
    array.leave(1)
    array.train_step(**batch)
    counts = [
        {int(v) for k, v in array.state_dict(i).items() if k.endswith("num_batches_tracked")}
        for i in range(3)
    ]
    assert counts == [{4}, {3}, {4}]


class Padded(nn.Module):
    def __init__(self, padding: int) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, padding_idx=padding)
        self.head = nn.Linear(5, 3)

    def forward(self, index: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(index)).sum(1), y)


def test_the_padding_row_of_every_table_gets_no_gradient() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [Padded(2).double() for _ in range(3)]
    index, y = torch.tensor([[0, 2, 2, 5], [2, 1, 6, 3]]), torch.tensor([0, 2])
    fused = check_step(models, (index, y))
    assert any(op.form == "one table" for op in fused.ops)


def test_tables_with_other_padding_rows_are_not_fused() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [Padded(2).double(), Padded(0).double()]
    index, y = torch.tensor([[0, 2, 2, 5], [2, 1, 6, 3]]), torch.tensor([0, 2])
    fused = check_step(models, (index, y))
    tables = [op.models for op in fused.ops if op.target == "aten.embedding.default"]
    assert sorted(tables) == [(0,), (1,)]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * torch.rand_like(x)).sum()


def test_other_random_operators_are_refused() -> None:
    with pytest.raises(InputError, match=r"rand_like.* draws random numbers"):
        check_step([Noisy(), Noisy()], torch.randn(3, 4))


def test_half_precision_models_stay_in_it() -> None:
    models, batch = variants("mlp", 3, double=False)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    fused = check_step([m.bfloat16() for m in models], batch, tolerance=2e-2)
    assert {v.dtype for v in fused.captured.graph.parameters} == {torch.bfloat16}


def failing(call: Call) -> Results | None:
    raise ValueError("this form cannot compute it")


def of_another_shape(call: Call) -> Results | None:
    return (call.operands[1],)


@pytest.mark.parametrize("wrong", [failing, of_another_shape])
def test_a_form_that_fails_is_left_out(wrong: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = FORMS["aten.linear.default"]
    monkeypatch.setitem(FORMS, "aten.linear.default", [("wrong", wrong), *forms])
    models, batch = variants("mlp", 3)
    fused = check_step(models, batch)
    assert {op.form for op in fused.ops if op.target == "aten.linear.default"} == {
        "one product of a shared input", "batched product",
    }  # fmt: skip
