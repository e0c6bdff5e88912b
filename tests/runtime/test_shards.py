"""A rank's shard has the elements whose digits are its coordinates, and holds no others."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R, S, State
from autopar.runtime.state.shards import local_part

MESH = Mesh(("a", "b", "c"), (2, 3, 2))
SHAPE = (24, 12)
PLACEMENTS: list[Placements] = [
    (S(0), S(0, 2), S(0, 6)),
    (S(0, 3), S(0), R),
    (S(0, 2), R, S(0)),
    (R, S(0, 2), R),
    (R, S(0, 4), S(0, 2)),
    (S(0), S(1), S(0, 2)),
    (S(1, 2), S(0), S(1)),
    (S(0, 6), R, R),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=lambda each: " ".join(map(str, each)))
def test_a_shard_is_what_its_digits_say(placements: Placements) -> None:
    whole = torch.arange(float(torch.Size(SHAPE).numel())).reshape(SHAPE)
    for rank in range(MESH.num_devices):
        part = local_part(whole, placements, MESH, rank)
        rows = [torch.ones(size, dtype=torch.bool) for size in SHAPE]
        for placement, num, own in zip(placements, MESH.axis_sizes, MESH.coordinate(rank)):
            if placement.state is State.SHARD:
                size = SHAPE[placement.dim]
                digits = torch.arange(size) // (size // (placement.outer * num)) % num
                rows[placement.dim] &= digits == own
        assert torch.equal(part, whole[rows[0]][:, rows[1]])
        held = part.untyped_storage()
        is_view = held.data_ptr() == whole.untyped_storage().data_ptr()
        assert is_view or held.nbytes() == part.nbytes
