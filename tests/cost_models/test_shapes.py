"""The output shapes that the cost models assume are those of torch."""

import pytest
import torch
from op_samples import sample_ids, samples

from autopar.cost_models import CostError, OpCall, TensorSpec
from autopar.cost_models.shapes import is_view, outputs

CASES = list(zip(sample_ids(), samples()))
CASE_IDS = [name for name, _ in CASES]


def _leaves(result):
    leaves = result if isinstance(result, (tuple, list)) else (result,)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=CASE_IDS)
def test_outputs_have_the_shape_dtype_and_stride_of_eager_torch(case):
    op, args, kwargs = case
    want = [(tuple(t.shape), t.dtype, t.stride()) for t in _leaves(op(*args, **kwargs))]
    got = [(s.shape, s.dtype, s.strides) for s in outputs(OpCall.of(op, args, kwargs))]
    if "attention" in str(op):
        # The kernel that torch picks decides the order of dimensions in memory.
        want, got = [w[:2] for w in want], [g[:2] for g in got]
    assert got == want


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=CASE_IDS)
def test_a_call_is_a_view_exactly_where_torch_shares_the_storage(case):
    op, args, kwargs = case
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    inputs = {t.untyped_storage().data_ptr() for t in tensors}
    result = _leaves(op(*args, **kwargs))
    shares = bool(result) and all(r.untyped_storage().data_ptr() in inputs for r in result)
    assert is_view(OpCall.of(op, args, kwargs)) == shares


def test_contiguous_and_reshape_copy_only_where_the_layout_makes_them():
    flat = TensorSpec((4, 6))
    turned = TensorSpec((6, 4), torch.float32, (1, 6))
    for target, extra in (("aten.contiguous.default", ()), ("aten.reshape.default", ((24,),))):
        assert is_view(OpCall(target, (flat, *extra)))
        assert not is_view(OpCall(target, (turned, *extra)))


def test_shapes_that_depend_on_data_are_refused():
    with pytest.raises(CostError, match="depend on its data"):
        outputs(OpCall("aten.nonzero.default", (TensorSpec((4,)),)))


def test_unknown_operations_are_refused_with_the_form_of_a_target():
    with pytest.raises(CostError, match=r"aten\.linear\.default"):
        outputs(OpCall("aten.no_such_operation.default", (TensorSpec((4,)),)))


def test_negative_sizes_are_refused():
    with pytest.raises(CostError, match=r"\(-1, 8\): a size is at least 0"):
        TensorSpec((-1, 8))


def test_expanded_dimensions_count_once_in_bytes():
    real = torch.randn(3, 1).expand(3, 5)
    spec = TensorSpec.of(real)
    assert spec.num_elements == 15
    assert spec.size_bytes == real.untyped_storage().nbytes()


def test_calls_are_equal_wherever_the_tensors_live():
    x = torch.randn(2, 3)
    here = OpCall.of(torch.ops.aten.full.default, ([2, 3], 1.0), {"device": "cpu"})
    there = OpCall.of(torch.ops.aten.full.default, ((2, 3), 1.0), {"device": "cuda"})
    assert here == there
    assert hash(here) == hash(there)
    meta = OpCall.of(torch.ops.aten.relu.default, (x.to("meta"),))
    assert meta == OpCall.of(torch.ops.aten.relu.default, (x,))
