"""Each collective on real processes equals its lockstep computation from all shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.comm.coalesced import ALONE_BYTES
from autopar.ir.mesh import Mesh
from autopar.testing.lockstep import LockstepMachine
from tests.runtime.conftest import Groups
from tests.runtime.processes import single_op

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
    module = single_op(MESH, op, label, static)
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


def test_what_travels_as_one_equals_what_travels_alone(groups: Groups) -> None:
    """Mixed kinds, groups, dtypes and sizes: small ones are bucketed, a large one is sent alone."""
    wanted, shards = [], []
    for number, (op, static) in enumerate(CASES):
        for dtype in (torch.float64, torch.int64, torch.bfloat16, torch.bool):
            label = ("a", "b", "a,b")[number % 3]
            wanted.append((op, label, static))
            shards.append(operands(dtype, strided=bool(number % 2)))
    for op in ("ALL_GATHER", "REDUCE_SCATTER"):
        generator = torch.Generator().manual_seed(5)
        size = (4, ALONE_BYTES // 8)
        parts = [
            torch.randint(0, 8, size, generator=generator).to(torch.float32)
            for _ in range(MESH.num_devices)
        ]
        wanted.append((op, "b", (0, 1)))
        shards.append(parts)
    by_rank = [[each[rank] for each in shards] for rank in range(MESH.num_devices)]
    got = groups(4).call("moves", MESH, wanted, per_rank_args=[(x,) for x in by_rank])
    for place, (op, label, static) in enumerate(wanted):
        want = expected(op, label, static, shards[place])
        for rank in range(MESH.num_devices):
            where = f"{op}{static} over {label} of {want[rank].dtype} on rank {rank}"
            assert got[rank][place].dtype == want[rank].dtype, where
            assert torch.equal(got[rank][place], want[rank]), where
