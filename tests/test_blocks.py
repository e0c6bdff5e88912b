"""Blocks of a model: their boundaries, their names, and the possible starts of stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.frontend.capture import capture
from autopar.ir.graph import Graph
from autopar.lowering.stages import staged_blocks, stages_from_cuts

WIDTH = 4


class Layer(nn.Module):
    """Five ops: a pre-norm feed-forward layer and its residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Attributes(nn.Module):
    """``l1``, ``l2``, ...: called one after the other, with or without a residual sum around
    each."""

    def __init__(self, *layers: nn.Module, residual: bool = False) -> None:
        super().__init__()
        self.num, self.residual = len(layers), residual
        for number, layer in enumerate(layers, start=1):
            self.add_module(f"l{number}", layer)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, self.num + 1):
            y = self.get_submodule(f"l{number}")(x)
            x = x + y if self.residual else y
        return x


class Residual(nn.Module):
    """Elements of a list, each with a residual sum around it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Functions(nn.Module):
    """One parameter and no child module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x @ self.weight)
        return x


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))


def dense() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(WIDTH, WIDTH), nn.ReLU()


def layers(num: int) -> list[nn.Module]:
    return [Layer() for _ in range(num)]


def graph_of(model: nn.Module) -> Graph:
    batch = (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    return capture(model, batch, loss_fn=nn.functional.mse_loss).graph


def names_of(model: nn.Module) -> list[str]:
    return [block.name for block in staged_blocks(graph_of(model))]


class Twice(nn.Module):
    """The same layers, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Attributes(*layers(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.layers(x))


BLOCKS: list[tuple[nn.Module, list[str]]] = [
    (Attributes(*layers(4)), ["l1", "l2", "l3", "l4"]),
    (Attributes(*[feed_forward() for _ in range(4)], residual=True), ["l1", "l2", "l3", "l4"]),
    (Residual(*[feed_forward() for _ in range(8)]), [f"layers.{i}" for i in range(8)]),
    (nn.Sequential(*layers(3)), ["0", "1", "2", "model"]),
    (nn.Sequential(*dense(), *dense(), *dense()), ["0+1", "2+3", "4+5"]),
    (
        nn.Sequential(*[module for _ in range(16) for module in dense()]),
        [f"{i}..{i + 3}" for i in range(0, 32, 4)],
    ),
    (
        Attributes(Attributes(*layers(5)), Attributes(*layers(5)), nn.Linear(WIDTH, WIDTH)),
        [f"l{i}.l{j}" for i in (1, 2) for j in range(1, 6)] + ["l3"],
    ),
    (
        nn.Sequential(Attributes(*layers(4)), nn.Linear(WIDTH, WIDTH)),
        ["0.l1", "0.l2", "0.l3", "0.l4", "1"],
    ),
    (Twice(), ["layers.l1", "layers.l2", "layers.l1#2", "layers.l2#2"]),
    (Functions(), ["model"]),
    (nn.Linear(WIDTH, WIDTH), ["model"]),
]


@pytest.mark.parametrize(("model", "names"), BLOCKS, ids=lambda value: str(value)[:40])
def test_blocks_are_layers(model: nn.Module, names: list[str]) -> None:
    assert names_of(model) == names


def test_an_embedding_and_a_head_keep_the_layers_between_them() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers(8), nn.LayerNorm(WIDTH))
    assert names_of(model) == ["0", *[str(i) for i in range(1, 9)], "9"]


def test_every_op_is_in_the_block_that_names_it() -> None:
    graph = graph_of(Attributes(*layers(4)))
    for block in graph.blocks:
        found = {op.module_path.partition(".")[0] for op in graph.block_ops(block)}
        assert found - {""} == {block.name}


class Sliced(nn.Module):
    """Modules that are reached through slices of lists, and slices of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([nn.ModuleList(layers(2)) for _ in "abc"])
        self.many = nn.ModuleList(layers(6))
        self.pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups[:2]:
            for layer in group[1:]:
                x = layer(x)
        for layer in [*self.many[1:][::2], *self.many[-2:]]:
            x = layer(x)
        return self.pair[1:](x)


def test_modules_in_slices_have_the_models_own_names() -> None:
    model = Sliced()
    named = {name for name, _ in model.named_modules()}
    found = {op.module_path for op in graph_of(model).ops}
    assert found - {""} <= named
    prefixes = {"groups.0.1", "groups.1.1", "many.1", "many.3", "many.5", "many.4", "pair.1"}
    reached = {".".join(path.split(".")[: 3 if path.startswith("g") else 2]) for path in found}
    assert reached - {""} == prefixes


# --- cuts ---------------------------------------------------------------------------------------
CUTS: list[tuple[nn.Module, list[str], list[str]]] = [
    (Attributes(*layers(4)), ["l3"], ["l1", "l3"]),
    (Attributes(*layers(4)), ["l2", "l3.norm"], ["l1", "l2", "l3"]),
    (Residual(*[feed_forward() for _ in range(8)]), ["layers.5"], ["layers.0", "layers.5"]),
    (nn.Sequential(*dense(), *dense(), *dense()), ["2", "4+5"], ["0+1", "2+3", "4+5"]),
    (Attributes(Attributes(*layers(5)), Attributes(*layers(5))), ["l2"], ["l1.l1", "l2.l1"]),
    (Twice(), ["layers.l1#2"], ["layers.l1", "layers.l1#2"]),
]


@pytest.mark.parametrize(("model", "cuts", "firsts"), CUTS, ids=lambda value: str(value)[:40])
def test_a_stage_begins_at_blocks_and_modules(
    model: nn.Module, cuts: list[str], firsts: list[str]
) -> None:
    assert list(stages_from_cuts(graph_of(model), cuts).first_blocks) == firsts


WRONG_CUTS = [
    ("l3.up", r"'l3.up', a module that begins in the middle of block 'l3'.* begin at 'l2', 'l3'"),
    ("l9", r"'l9', which is no block, and no module that a stage computes; .* at 'l2', 'l3', 'l4'"),
    ("l1", r"each must begin behind the one before it"),
]


@pytest.mark.parametrize(("cut", "message"), WRONG_CUTS)
def test_other_cuts_are_refused_with_the_reason(cut: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        stages_from_cuts(graph_of(Attributes(*layers(4))), [cut])


def test_a_model_of_one_block_says_so() -> None:
    with pytest.raises(InputError, match=r"begin at none: the model is one block"):
        stages_from_cuts(graph_of(Functions()), ["model.weight"])
