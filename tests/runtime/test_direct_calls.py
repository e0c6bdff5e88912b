"""Direct bindings against the dispatcher's overloads: same results, strides and aliases."""

from typing import Any

import pytest
import torch

from autopar.runtime.machine.direct_calls import DIRECT

aten = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(4, 6)
SQUARE, ROW = torch.randn(6, 6), torch.randn(6)
CUBE = torch.randn(3, 4, 6)
WHOLE = torch.arange(24).reshape(4, 6)

ARGUMENTS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.add.Tensor: [((X, Y), {}), ((X, 2.5), {}), ((X, Y), {"alpha": 3}), ((WHOLE, 1.5), {})],
    aten.addmm.default: [((ROW, X, SQUARE), {}), ((ROW, X, SQUARE), {"beta": 0.5, "alpha": 2})],
    aten.baddbmm.default: [
        ((CUBE[:, :1, :4], CUBE, CUBE.transpose(1, 2)), {}),
        ((CUBE[:, :, :4], CUBE, CUBE.transpose(1, 2)), {"beta": 0.5, "alpha": 2}),
    ],
    aten.bmm.default: [((CUBE, CUBE.transpose(1, 2)), {})],
    aten.cat.default: [(([X, Y],), {}), (([X, Y], 1), {}), (([X, WHOLE], -1), {})],
    aten.div.Tensor: [((X, Y), {}), ((WHOLE, 4), {})],
    aten.embedding.default: [
        ((SQUARE, torch.tensor([[1, 5], [0, 1]])), {}),
        ((SQUARE, torch.tensor([3]), 3, False, False), {}),
    ],
    aten.mm.default: [((X, SQUARE), {}), ((X.t(), Y), {})],
    aten.mul.Tensor: [((X, Y), {}), ((WHOLE, 0.5), {}), ((X, torch.tensor(2.0)), {})],
    aten.native_layer_norm.default: [
        ((X, [6], ROW, ROW, 1e-5), {}),
        ((X, [6], None, None, 1e-6), {}),
    ],
    aten.permute.default: [((CUBE, [2, 0, 1]), {})],
    aten.pow.Tensor_Scalar: [((X, 2), {}), ((WHOLE, 3), {}), ((X.abs(), 0.5), {})],
    aten.relu.default: [((X,), {})],
    aten.reshape.default: [((X, [2, 12]), {}), ((X.t(), [-1]), {}), ((CUBE, [3, -1]), {})],
    aten.rsqrt.default: [((X.abs(),), {}), ((WHOLE + 1,), {})],
    aten.select.int: [((CUBE, 1, 2), {}), ((CUBE, -1, -1), {})],
    aten.sub.Tensor: [((X, Y), {}), ((X, 1), {}), ((X, Y), {"alpha": 2})],
    aten.sum.dim_IntList: [
        ((CUBE, [0, 1]), {}),
        ((CUBE, [1], True), {}),
        ((CUBE, None), {}),
        ((CUBE, []), {}),
        ((X, [0]), {"dtype": torch.float64}),
    ],
    aten.t.default: [((X,), {}), ((ROW,), {})],
    aten.tanh.default: [((X,), {}), ((WHOLE,), {})],
    aten.transpose.int: [((CUBE, 0, 2), {}), ((CUBE, -1, -2), {})],
    aten.unsqueeze.default: [((X, 1), {}), ((X, -1), {})],
}


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def test_every_direct_call_has_arguments_here() -> None:
    assert set(ARGUMENTS) == set(DIRECT)


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_results_strides_and_aliasing_are_those_of_the_overload(op: Any) -> None:
    for arguments, options in ARGUMENTS[op]:
        wanted, found = flat(op(*arguments, **options)), flat(DIRECT[op](*arguments, **options))
        assert len(wanted) == len(found)
        for left, right in zip(wanted, found):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
            assert left.stride() == right.stride()
            storages = {a.untyped_storage().data_ptr() for a in arguments if torch.is_tensor(a)}
            aliases = [x.untyped_storage().data_ptr() in storages for x in (left, right)]
            assert aliases[0] == aliases[1]
