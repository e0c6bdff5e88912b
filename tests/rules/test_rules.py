"""Every choice of every rule: outputs and gradients on shards equal those of the unsplit op."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.rules import registered_targets
from autopar.testing.check_rule import MESHES, check_rule
from tests.rules import further_cases, indexing_cases, view_cases  # noqa: F401 - they fill CASES
from tests.rules.op_cases import CASES, INTEGER_TOO, New

FLOATING = [torch.float64, torch.float64, torch.float32, torch.bfloat16]
NO_HALF = {
    "aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input",
    "aten.avg_pool3d.default", "aten.cdist.default",
    # In bfloat16 the CPU kernel leaves out outputs that the fake one has.
    "aten.embedding_bag.default", "aten.embedding_bag.padding_idx",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def overload(name: str):
    if name.startswith("transformers."):
        import transformers.integrations.moe  # noqa: F401 - registers the operator
    namespace, packet, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


def test_every_rule_has_a_generator():
    assert set(registered_targets()) == set(CASES)


@pytest.mark.parametrize("target", list(CASES))
def test_every_choice_equals_the_unsplit_op(target):
    make = CASES[target]
    further = {"target": target} if "target" in inspect.signature(make).parameters else {}
    dtypes = [d for d in FLOATING if d is not torch.bfloat16 or target not in NO_HALF]
    dtypes = [torch.bfloat16] if "._grouped_mm" in target else dtypes
    dtypes += [torch.int64] if target in INTEGER_TOO else []

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data(), st.sampled_from(MESHES), st.sampled_from(dtypes), st.integers(0, 2**31))
    def check(data, mesh, dtype, seed):
        new = New(dtype, torch.Generator().manual_seed(seed))
        args = make(data.draw, new, **further)
        kwargs = args[-1] if isinstance(args[-1], dict) else {}
        args = args[:-1] if kwargs else args
        check_rule(overload(target), *args, mesh=mesh, **kwargs)

    check()
