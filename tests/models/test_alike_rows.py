"""Constants with equal rows are computed once, and the model reads the same values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

from autopar.base.torch_private import returns_views
from autopar.frontend.capture import capture
from autopar.ir.block_names import FIXED
from autopar.ir.graph import Graph

BATCH, LENGTH = 6, 5


class Masked(nn.Module):
    """A weight times the result of ``constant`` for the batch: its gradient shows each element."""

    def __init__(self, constant: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.constant = constant
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, math.prod(shape)).reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        return (self.constant(x) * self.weight).sum() + x.sum()


def positions() -> Tensor:
    return torch.arange(LENGTH)[None].expand(BATCH, LENGTH)


def causal(x: Tensor) -> Tensor:
    return (positions()[:, :, None] >= positions()[:, None, :]).float()


def packed(x: Tensor) -> Tensor:
    """As models detect several sequences packed in one row, element by element."""
    ids = positions()
    group = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row, column = torch.arange(BATCH)[:, None, None], torch.arange(LENGTH)
    return (group[row, column[None, :, None]] == group[row, column[None, None, :]]).float()


def differing(x: Tensor) -> Tensor:
    """Unequal rows, by an operator next to one with equal rows."""
    return positions() + torch.arange(BATCH)[:, None]


def along_rows(x: Tensor) -> Tensor:
    return positions().cumsum(0)


def flattened(x: Tensor) -> Tensor:
    """A view that only contiguous memory allows."""
    return (positions() * 2).view(-1).view(LENGTH, BATCH)


def reversed_transposed(x: Tensor) -> Tensor:
    return (positions() * 3).flip(1).transpose(0, 1).unsqueeze(0)[:, 1:4].float()


def one_by_one(x: Tensor) -> Tensor:
    ids = positions() * 2
    return ids[torch.arange(BATCH), torch.arange(BATCH) % LENGTH]


def swapped(x: Tensor) -> Tensor:
    """Gathered by an index with equal rows, from a table whose rows differ."""
    table = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    return table[torch.arange(BATCH)[:, None], (LENGTH - 1 - positions())]


def chosen(x: Tensor) -> Tensor:
    rows = torch.zeros_like(positions(), dtype=torch.float32) + positions().new_ones((LENGTH,))
    return torch.where(positions() > 2, rows, -rows)


def summed(x: Tensor) -> Tensor:
    return (positions() + 1).sum(0)


def twice(x: Tensor) -> Tensor:
    """Expanded again, with further dimensions."""
    return (positions() + 1).expand(2, BATCH, LENGTH).expand(3, 2, BATCH, LENGTH)


CASES = {
    causal: (BATCH, LENGTH, LENGTH), packed: (BATCH, LENGTH, LENGTH), differing: (BATCH, LENGTH),
    along_rows: (BATCH, LENGTH), flattened: (LENGTH, BATCH),
    reversed_transposed: (1, 3, BATCH), one_by_one: (BATCH,), swapped: (BATCH, LENGTH),
    chosen: (BATCH, LENGTH), summed: (LENGTH,), twice: (3, 2, BATCH, LENGTH),
}  # fmt: skip


@pytest.mark.parametrize("constant", CASES, ids=lambda c: c.__name__)
def test_what_is_read_is_what_the_model_made(constant: Callable[[Tensor], Tensor]) -> None:
    model, x = Masked(constant, CASES[constant]), torch.ones(BATCH, 2)
    graph = capture(model, {"x": x}).graph
    product = next(op for op in graph.ops if not graph.values[op.outputs[0]].fixed)
    (read,) = (i for i in product.inputs if graph.values[i].fixed)
    held = run_fixed(graph)[read]
    assert torch.equal(held, constant(x))
    strides = graph.values[read].strides
    if strides is None:
        assert held.is_contiguous()
    else:  # those of size 1 are never used
        pairs = zip(held.stride(), strides)
        assert all(a == b for size, (a, b) in zip(held.shape, pairs) if size > 1)


@pytest.mark.parametrize("constant", [causal, packed, chosen, twice], ids=lambda c: c.__name__)
def test_rows_that_are_alike_take_the_memory_of_one(
    constant: Callable[[Tensor], Tensor],
) -> None:
    model = Masked(constant, CASES[constant])
    graph = capture(model, {"x": torch.ones(BATCH, 2)}).graph
    of_one_row = LENGTH * (LENGTH if constant in (causal, packed) else 1)
    assert max(made_elements(graph)) == of_one_row


def test_rows_that_differ_stay() -> None:
    graph = capture(Masked(differing, CASES[differing]), {"x": torch.ones(BATCH, 2)}).graph
    assert max(made_elements(graph)) == BATCH * LENGTH


def test_masks_of_a_decoder_take_the_memory_of_one_sequence() -> None:
    config = MistralConfig(  # whose window is a mask, unlike plain causal attention
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=128, use_cache=False, sliding_window=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = MistralForCausalLM(config), torch.zeros(512, 8192, dtype=torch.int64)
    graph = capture(model, {"input_ids": ids, "labels": ids}).graph
    assert max(made_elements(graph)) == 8192 * 8192
    assert any(v.fixed and v.shape == (512, 1, 8192, 8192) for v in graph.values)


def run_fixed(graph: Graph) -> dict[int, Tensor]:
    """The fixed values as torch computes them."""
    constants = dict(graph.constants)
    held = {v.index: constants[v.name] for v in graph.values if v.name in constants}
    for op in graph.block_ops(graph.blocks[0]):
        args, kwargs = op.bind([held[i] for i in op.inputs])
        lists = [list(a) if isinstance(a, tuple) else a for a in args]
        (output,) = op.outputs
        held[output] = op.target(*lists, **kwargs)
    return held


def made_elements(graph: Graph) -> list[int]:
    """Elements of the fixed values that own memory."""
    assert graph.blocks[0].name == FIXED
    return [
        math.prod(graph.values[output].shape)
        for op in graph.block_ops(graph.blocks[0])
        for output in op.outputs
        if not returns_views(op.target)
    ]
