"""Rules on the sample inputs that PyTorch's own operator database has for their operators.

The samples were written by others to find the odd cases: empty and scalar tensors, negative and
repeated dimensions, broadcasting, unusual options. Their sizes are mostly 5, 3, 10 and 20, hence
the meshes. A sample is given to the first overload that takes it; an operator of which no sample
fits any overload with a rule fails the test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import CaptureError, InputError
from autopar.base.torch_private import canonical_call, pytree
from autopar.frontend.capture import capture
from autopar.ir.graph import Op
from autopar.ir.mesh import Mesh
from autopar.rules import registered_targets, rule_of
from autopar.rules.local import call_op
from autopar.testing.check_rule import check_rule

pytest.importorskip("expecttest", reason="PyTorch's operator database imports expecttest")
from torch.testing._internal.common_methods_invocations import (
    binary_ufuncs,
    op_db,
    unary_ufuncs,
)

MESHES = (Mesh(("a",), (5,)), Mesh(("a", "b"), (2, 3)))
MAX_SAMPLES, MAX_SAMPLES_POINTWISE = 3, 2
POINTWISE = {entry.name for entry in (*unary_ufuncs, *binary_ufuncs)}
MAX_NUMEL = 2000
# The database's name where it is not the operator's.
RENAMED = {
    "nn.functional.cross_entropy": "cross_entropy_loss",
    "linalg.vector_norm": "linalg_vector_norm",
    "nn.functional.unfold": "im2col",
}
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def overloads(entry: Any) -> list[Any]:
    name = RENAMED.get(entry.name, entry.name.split(".")[-1])
    if entry.name.startswith(("masked.", "sparse.", "_refs", "fft.", "special.", "signal.")):
        return []
    found = []
    for prefix in ("", "_"):
        packet = getattr(torch.ops.aten, prefix + name, None)
        for overload in packet.overloads() if packet else ():
            target = getattr(packet, overload)
            op = Op(index=0, name="", target=target, args=(), kwargs=(), outputs=(), module_path="")
            if rule_of(op) is not None and not target._schema.is_mutable:
                found.append(target)
    return found


def samples(entry: Any) -> list[Any]:
    dtypes = entry.supported_dtypes("cpu")
    dtype = next(d for d in DTYPES if d in dtypes)
    gradient = entry.supports_autograd and dtype.is_floating_point
    found = []
    large = []
    for sample in entry.sample_inputs("cpu", dtype, requires_grad=gradient):
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        tensors = [t for t in leaves if torch.is_tensor(t)]
        if all(t.layout is torch.strided for t in tensors):
            small = all(t.numel() <= MAX_NUMEL for t in tensors)
            (found if small else large).append(sample)
    found = found or large
    # From all over the list, which starts with the plain cases.
    most = MAX_SAMPLES_POINTWISE if entry.name in POINTWISE else MAX_SAMPLES
    return found[:: max(1, len(found) // most)][:most]


def direct_call(entry: Any, sample: Any) -> Any:
    """The sample as (target, args, kwargs) of the first overload that takes it, or None."""
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    if kwargs.get("reduction") in REDUCTIONS:
        kwargs["reduction"] = REDUCTIONS[kwargs["reduction"]]
    kwargs.pop("return_indices", None)  # the operators have an overload each instead
    for target in overloads(entry):
        try:
            bound = canonical_call(target, args, kwargs)
            target(*bound[0], **bound[1])
        except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
            continue
        return target, args, kwargs
    return None


class Call(nn.Module):
    """The database's own function on the sample's tensors."""

    def __init__(self, entry: Any, sample: Any) -> None:
        super().__init__()
        self.op = entry.op
        leaves, self.spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.tensors = tuple(x.detach() for x in leaves if torch.is_tensor(x))
        self.others = [None if torch.is_tensor(x) else x for x in leaves]
        self.is_tensor = [torch.is_tensor(x) for x in leaves]

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if is_t else o for is_t, o in zip(self.is_tensor, self.others)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


def captured_calls(entry: Any, sample: Any) -> list[Any]:
    """The calls in torch.export's graph of the sample whose operators have a rule."""
    call = Call(entry, sample)
    try:
        graph = capture(call, call.tensors).graph
    except (CaptureError, InputError):
        return []
    env = dict(zip(graph.inputs, call.tensors))
    found = []
    for op in graph.ops:
        args, kwargs = op.bind([env[i] for i in op.inputs])
        results = call_op(op, args, kwargs)
        results = [results] if isinstance(results, Tensor) else results
        env.update({o: r for o, r in zip(op.outputs, results) if o is not None})
        if op.target in overloads(entry):
            found.append((op.target, args, kwargs))
    return found


ENTRIES = [
    pytest.param(e, id=f"{e.name}-{e.variant_test_name}" if e.variant_test_name else e.name)
    for e in op_db
    if overloads(e) and set(DTYPES) & e.supported_dtypes("cpu")
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("entry", ENTRIES)
def test_sample_inputs_of_the_operator_database(entry):
    torch.manual_seed(0)
    num_checked = 0
    for sample in samples(entry):
        direct = direct_call(entry, sample)
        for target, args, kwargs in [direct] if direct else captured_calls(entry, sample):
            for mesh in MESHES:
                check_rule(target, *args, mesh=mesh, **kwargs)
            num_checked += 1
    if not num_checked:
        assert (entry.name, entry.variant_test_name) in OTHER_OVERLOADS


# Variants whose samples all use overloads that have no rule (reductions of a whole tensor), or are
# refused (running statistics); their rules have cases in `tests.rules.test_rules`.
OTHER_OVERLOADS = {
    ("max", "reduction_no_dim"), ("min", "reduction_no_dim"), ("norm", "nuc"), ("norm", "fro"),
    ("linalg.norm", ""), ("linalg.norm", "subgradients_at_zero"),
    ("nn.functional.instance_norm", ""),
}  # fmt: skip


def test_the_database_covers_most_rules():
    covered = {str(target) for p in ENTRIES for target in overloads(p.values[0])}
    targets = {target for target in map(str, registered_targets()) if target.startswith("aten.")}
    missing = targets - covered
    assert len(covered & targets) >= 0.8 * len(targets), missing
