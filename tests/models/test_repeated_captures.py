"""Captures after the first replay torch's registrations: same programs, and nothing left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._export.utils import _collect_all_valid_cia_ops
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import exported_program

from autopar.base.torch_registrations import _replayed, without_repeated_registrations


class Composites(nn.Module):
    """Operators that are kept as they are, and some that call others of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.conv(x)))
        x = F.scaled_dot_product_attention(x, x, x) + F.dropout(x, 0.0)
        x = torch.einsum("bij,bkj->bik", x, x) @ self.recurrent(x.reshape_as(x))[0]
        return F.cross_entropy(x.flatten(0, 1), x.new_zeros(8, dtype=torch.long))


def program_of(model: nn.Module, x: Tensor) -> str:
    return str(torch.export.export(model, (x,)).run_decompositions({}).graph)


def registrations() -> dict[Any, tuple[dict[Any, Any], bool]]:
    return {
        op: (dict(op.py_kernels), op in op_implementations_dict)
        for op in _collect_all_valid_cia_ops()
    }


def test_the_program_is_torchs_own_each_time() -> None:
    model, x = Composites(), torch.randn(2, 4, 8)
    expected = program_of(model, x)
    before = registrations()
    for _ in range(3):
        with without_repeated_registrations():
            assert program_of(model, x) == expected
        assert registrations() == before
    assert program_of(model, x) == expected


def test_another_thread_registers_as_torch_does() -> None:
    own = exported_program._override_composite_implicit_decomp
    with without_repeated_registrations(), ThreadPoolExecutor(1) as elsewhere:
        there = elsewhere.submit(exported_program._override_composite_implicit_decomp, {}).result()
        here = exported_program._override_composite_implicit_decomp({})
        assert (there.func, here.func) == (own.__wrapped__, _replayed.__wrapped__)
    assert exported_program._override_composite_implicit_decomp is own


def test_kernels_that_were_added_or_replaced_since_then_count() -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def thrice(x: Tensor) -> Tensor:
        return x * 3

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.autopar_test_captures.scaled(F.linear(x, x))

    with torch.library._scoped_library("autopar_test_captures", "FRAGMENT") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", twice, "CompositeImplicitAutograd")
        x = torch.randn(4, 4)
        expected = program_of(Own(), x)
        for _ in range(2):
            with without_repeated_registrations():
                assert program_of(Own(), x) == expected
        op = torch.ops.autopar_test_captures.scaled.default
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        assert key not in op.py_kernels
        op.py_kernels[key] = thrice
        expected = program_of(Own(), x)
        with without_repeated_registrations():
            assert program_of(Own(), x) == expected
        assert op.py_kernels[key] is thrice
        del op.py_kernels[key]
