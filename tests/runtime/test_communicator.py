"""Each collective on real processes equals the function of all shards that lockstep computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar import collectives
from autopar.mesh import Mesh
from autopar.runtime.lockstep import LockstepMachine
from tests.runtime.conftest import Groups

MESH = Mesh(("a", "b"), (2, 2))
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool,
]  # fmt: skip
CASES: list[tuple[str, tuple[int, ...]]] = [
    ("ALL_REDUCE", ()),
    ("ALL_REDUCE_MAX", ()),
    ("ALL_GATHER", (0, 1)),
    ("ALL_GATHER", (1, 3)),
    ("ALL_GATHER", (0, 2)),
    ("REDUCE_SCATTER", (0, 1)),
    ("REDUCE_SCATTER", (1, 3)),
    ("REDUCE_SCATTER", (0, 2)),
    ("ALL_TO_ALL", (0, 1, 1, 1)),
    ("ALL_TO_ALL", (1, 3, 0, 2)),
    ("SHARD", (0, 1)),
    ("SHARD", (1, 3)),
    ("UNSHARD", (0, 1)),
    ("UNSHARD", (1, 3)),
    ("MASK", ()),
    ("AXIS_INDEX", ()),
]


def operands(dtype: torch.dtype, *, strided: bool) -> list[Tensor]:
    """One (8, 12) tensor per rank, of small integers: sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(3)
    shards = []
    for _ in range(MESH.num_devices):
        numbers = torch.randint(0, 2 if dtype is torch.bool else 8, (12, 8), generator=generator)
        tensor = numbers.to(dtype).t()
        shards.append(tensor if strided else tensor.contiguous())
    return shards


def expected(op: str, label: str, static: tuple[int, ...], shards: list[Tensor]) -> list[Tensor]:
    graph = torch.fx.Graph()
    operand = graph.placeholder("x")
    num = MESH.size(MESH.axes_of(label))
    result = graph.call_function(getattr(collectives, op), (operand, label, num, *static))
    graph.output((result,))
    module = torch.fx.GraphModule({}, graph)
    return LockstepMachine(MESH).run(module, [shards])[0]


@pytest.mark.parametrize("label", ["a", "b", "a,b"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_lockstep_and_leaves_its_operand_alone(
    groups: Groups, dtype: torch.dtype, label: str
) -> None:
    group = groups(4)
    for op, static in CASES:
        shards = operands(dtype, strided=label == "b")
        # The inner axis of a pair of digits sees one part of the outer one.
        wanted = expected(op, label, static, shards)
        got = group.call(
            "collective", MESH, op, label, static, per_rank_args=[(x,) for x in shards]
        )
        for rank, ((result, operand_is_same), want) in enumerate(zip(got, wanted, strict=True)):
            where = f"{op}{static} over {label} of {dtype} on rank {rank}"
            assert operand_is_same, f"{where} changed its operand"
            assert result.dtype == want.dtype, where
            assert torch.equal(result, want), where
