"""Low precision, autocast, and calls with every kind of argument and result."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontend.capture import capture
from autopar.frontend.signature import Arguments, call_key
from autopar.ir.mesh import Mesh
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import build
from tests.oracles import assert_same, lockstep_steps, random_assignment, reference_steps, state_of

MESH = Mesh(("a",), (2,))
BFLOAT16 = 0.02  # two or three of its 2^-8 steps


class Mixed(nn.Module):
    """Autocast inside: products in bfloat16, norms and the loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.norm(self.first(x).relu())
            logits = self.second(hidden)
        return F.cross_entropy(logits.float(), y)


def vectors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(4, 16, generator=generator),
        "y": torch.randint(0, 8, (4,), generator=generator),
    }


def check(model: nn.Module, batches: list[dict[str, Tensor]], tolerance: float) -> Any:
    captured = capture(model, batches[0])
    expected = reference_steps(model, batches)
    analysis = Analysis(captured.graph)
    for seed in range(3):
        strategy = Strategy(analysis, random_assignment(analysis, MESH, seed))
        got = lockstep_steps(strategy, captured, state_of(model), batches)
        assert_same(got, expected, tolerance=tolerance)
    return captured


def test_autocast_inside_the_model():
    torch.manual_seed(0)
    captured = check(Mixed(), [vectors(seed) for seed in range(2)], BFLOAT16)
    products = [op for op in captured.graph.ops if op.target_name == "aten.linear.default"]
    made = [captured.graph.values[op.outputs[0]].dtype for op in products]
    assert made == [torch.bfloat16] * 2


@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert"])
def test_bfloat16_parameters(name):
    model, make_batch = build(name)
    batches = [
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in make_batch(seed).items()}
        for seed in range(2)
    ]
    check(model.bfloat16(), batches, 2 * BFLOAT16)


class Result(NamedTuple):
    scores: Tensor
    further: dict[str, Any]


class Nested(nn.Module):
    """Boolean, integer and nested inputs, a flag, and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 4)

    def forward(
        self, ids: Tensor, keep: Tensor, *, pair: tuple[Tensor, dict[str, Tensor]], double: bool
    ) -> Result:
        shift, weights = pair
        hidden = self.embedding(ids) * keep.unsqueeze(-1) + shift
        scores = self.head(hidden.mean(1)) * weights["w"]
        if double:
            scores = scores * 2
        return Result(scores, {"largest": (scores.argmax(-1), [scores.amax()]), "name": "nested"})


def nested_call() -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 9, (4, 6), generator=generator)
    keep = torch.rand(4, 6, generator=generator) > 0.3
    pair = (torch.randn(6, 8, generator=generator), {"w": torch.randn(4, generator=generator)})
    return (ids, keep), {"pair": pair, "double": True}


def test_keywords_may_be_in_any_order():
    args, kwargs = nested_call()
    other = dict(reversed(kwargs.items()))
    assert list(other) != list(kwargs)
    signature = capture(Nested(), Arguments(args, kwargs)).signature
    expected, found = signature.flatten(args, kwargs), signature.flatten(args, other)
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]
    assert signature.key() == call_key(args, kwargs) == call_key(args, other)
    fewer = (args[0][:2], args[1][:2])
    assert signature.with_shapes_of(fewer, other) == signature.with_shapes_of(fewer, kwargs)
    with pytest.raises(autopar.InputError, match="same structure"):
        signature.flatten(args, {**other, "triple": True})


def test_nested_inputs_and_outputs_on_two_processes():
    torch.manual_seed(0)
    model = Nested()
    args, kwargs = nested_call()
    target = torch.randint(0, 4, (4,))

    def loss_fn(output: Result, target: Tensor) -> Tensor:
        return F.cross_entropy(output.scores, target)

    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with autopar.compile(model, 2, loss_fn=loss_fn, optimizer=sgd, profile_limit_s=0) as compiled:
        loss = compiled.train_step(*args, target=target, **kwargs)
        with torch.no_grad():
            output = compiled(*args, double=True, target=target, pair=kwargs["pair"])
    trained = copy.deepcopy(model)
    expected = loss_fn(trained(*args, **kwargs), target)
    expected.backward()
    sgd(list(trained.parameters())).step()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert isinstance(output, Result)
    wanted = trained(*args, **kwargs)
    torch.testing.assert_close(output.scores, wanted.scores, rtol=1e-4, atol=1e-5)
    assert output.further["name"] == "nested"
    assert torch.equal(output.further["largest"][0], wanted.further["largest"][0])
    torch.testing.assert_close(output.further["largest"][1][0], wanted.scores.amax())
