"""Every move between placements, values and gradients, against shards made by index arithmetic.

A value is scattered over all ranks as its source placement says, moved, and compared, rank by
rank, with the whole value; likewise a gradient, the other way round. The reference knows nothing
of the compiler's reshapes: rank by rank it selects the indices whose digits are the rank's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.base.torch_private import FakeTensorMode
from autopar.comm.ops import COLLECTIVES, move
from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    P,
    Placement,
    Placements,
    R,
    S,
    State,
    V,
    format_placements,
    is_valid,
    local_shape,
    parse_placement,
    redistribute,
)
from autopar.ir.tracing import trace_fx
from autopar.testing.lockstep import LockstepMachine

# (source, target, collective in forward, collective in backward); None where nothing is sent.
TABLE = [
    ("R", "S", None, "all_gather"),
    ("R", "V", None, "all_reduce"),
    ("R", "P", None, None),
    ("S", "R", "all_gather", None),
    ("S", "V", "all_gather", "reduce_scatter"),
    ("S", "S", "all_to_all", "all_to_all"),
    ("S", "P", None, None),
    ("P", "R", "all_reduce", None),
    ("P", "S", "reduce_scatter", "all_gather"),
    ("P", "V", "all_reduce", "all_reduce"),
    ("V", "R", None, None),
    ("V", "S", None, None),
    ("V", "P", None, None),
]
MESHES = [
    Mesh(("a",), (2,)),
    Mesh(("a",), (3,)),
    Mesh(("a", "b"), (2, 2)),
    Mesh(("a", "b"), (3, 2)),
    Mesh(("a", "b", "c"), (2, 1, 3)),
    Mesh(("a", "b", "c"), (2, 2, 2)),
]
GRADIENT = {State.REPLICATE: R, State.PARTIAL: R, State.VARYING: P}


def indices(size: int, dim: int, placements: Placements, mesh: Mesh, rank: int) -> list[int]:
    """Indices along ``dim`` whose digits are those of ``rank``; of a padded one, its own run."""
    position = mesh.coordinate(rank)
    digits = [(p.outer, a) for a, p in enumerate(placements) if p[:2] == (State.SHARD, dim)]
    num = math.prod(mesh.axis_sizes[a] for _, a in digits)
    if size % num:
        run = math.ceil(size / num)
        place = 0
        for _, axis in sorted(digits):
            place = place * mesh.axis_sizes[axis] + position[axis]
        return list(range(size))[place * run : (place + 1) * run]
    return [
        i
        for i in range(size)
        if all(
            i * outer * mesh.axis_sizes[axis] // size % mesh.axis_sizes[axis] == position[axis]
            for outer, axis in digits
        )
    ]


def part_of(whole: Tensor, placements: Placements, mesh: Mesh, rank: int) -> Tensor:
    local = local_shape(whole.shape, placements, mesh)
    for dim, size in enumerate(whole.shape):
        own = torch.tensor(indices(size, dim, placements, mesh, rank), dtype=torch.int64)
        behind = (*whole.shape[:dim], local[dim] - len(own), *whole.shape[dim + 1 :])
        whole = torch.cat([whole.index_select(dim, own), whole.new_zeros(behind)], dim)
    return whole


def scattered(whole: Tensor, placements: Placements, mesh: Mesh) -> list[Tensor]:
    """One shard a rank; partial sums are random parts that add up to the whole."""
    shards = [part_of(whole, placements, mesh, rank) for rank in range(mesh.num_devices)]
    axes = tuple(a for a, p in enumerate(placements) if p == P)
    for first, *others in mesh.groups(axes):
        for rank in others:
            noise = torch.randint(-9, 9, whole.shape).to(whole.dtype)
            shards[rank] = part_of(noise, placements, mesh, rank)
            shards[first] = shards[first] - shards[rank]
    return shards


def assert_holds(
    shards: Sequence[Tensor], whole: Tensor, placements: Placements, mesh: Mesh, what: str
) -> None:
    """Every rank's shard, summed over the axes on which it is partial, is its part of ``whole``."""
    axes = tuple(a for a, p in enumerate(placements) if p == P)
    for group in mesh.groups(axes):
        total = torch.stack([shards[r] for r in group]).sum(0)
        for rank in group:
            expected = part_of(whole, placements, mesh, rank)
            torch.testing.assert_close(
                total, expected, rtol=0, atol=1e-9, msg=lambda m: f"{what}: {m}"
            )


def run_move(
    whole: Tensor, gradient: Tensor, source: Placements, target: Placements, mesh: Mesh
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Shards after the move, shards of the gradient before it, and the collectives called."""
    shape, floating = tuple(whole.shape), whole.is_floating_point()

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        leaf = primals[0].detach().requires_grad_(floating)
        with torch.enable_grad():
            moved = move(leaf, source, target, shape, mesh)
        if not floating:
            return [moved, leaf]
        return [moved.detach(), *torch.autograd.grad(moved, leaf, tangents)]

    shards = scattered(whole, source, mesh)
    cotangents = scattered(gradient, gradient_placements(target), mesh)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [[torch.empty(x[0].shape, dtype=x[0].dtype)] for x in (shards, cotangents)]
    module = trace_fx(joint, mode, *fakes)
    called = [str(n.target).split(".")[1] for n in module.graph.nodes if n.target in COLLECTIVES]
    after, before = LockstepMachine(mesh).run(module, [shards, cotangents])
    return after, before, called


def gradient_placements(placements: Placements) -> Placements:
    return tuple(GRADIENT.get(p.state, p) for p in placements)


def options(chosen: Placements, shape: tuple[int, ...], mesh: Mesh, states: str) -> list[Placement]:
    """The options for the next axis, after ``chosen`` for the axes before it."""
    found = [p for p in (R, P, V) if str(p) in states]
    if "S" in states:
        splits = (S(d, outer) for d in range(len(shape)) for outer in (1, 2, 3, 4, 6))
        rest = (R,) * (mesh.num_axes - len(chosen) - 1)
        found += [s for s in splits if is_valid((*chosen, s, *rest), shape, mesh)]
    return found


@st.composite
def moves(draw, source_state: str, target_state: str):
    """A mesh, a shape and two placements; axis ``a`` makes the wanted move."""
    mesh = draw(st.sampled_from(MESHES))
    sizes = draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 7, 11, 12]), min_size=0, max_size=2))
    shape = tuple(draw(st.permutations([12 if 3 in mesh.axis_sizes else 8, *sizes])))
    sides = []
    for state in (source_state, target_state):
        chosen: Placements = ()
        for axis in range(mesh.num_axes):
            found = options(chosen, shape, mesh, state if axis == 0 else "RPVS")
            chosen = (*chosen, draw(st.sampled_from(found)))
        sides.append(chosen)
    return mesh, shape, sides[0], sides[1]


@pytest.mark.parametrize(("source_state", "target_state"), [row[:2] for row in TABLE])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=["float", "int"])
def test_moves_keep_value_and_gradient(source_state, target_state, dtype):
    @settings(max_examples=12 if dtype.is_floating_point else 4, deadline=None)
    @given(moves(source_state, target_state), st.integers(0, 2**31))
    def check(case, seed):
        mesh, shape, source, target = case
        torch.manual_seed(seed)
        whole, gradient = torch.randint(-99, 99, (2, *shape)).to(dtype).unbind()
        after, before, _ = run_move(whole, gradient, source, target, mesh)
        assert_holds(after, whole, target, mesh, "value")
        if dtype.is_floating_point:
            assert_holds(before, gradient, gradient_placements(source), mesh, "gradient")

    check()


@pytest.mark.parametrize(("source_state", "target_state", "forward", "backward"), TABLE)
def test_a_move_along_one_axis_sends_what_the_table_says(
    source_state, target_state, forward, backward
):
    mesh, shape = Mesh(("a",), (2,)), (4, 6)
    source = S(0) if source_state == "S" else parse_placement(source_state)
    target = S(1) if target_state == "S" else parse_placement(target_state)
    whole, gradient = torch.randn(2, *shape, dtype=torch.float64).unbind()
    _, _, called = run_move(whole, gradient, (source,), (target,), mesh)
    assert called == [kind for kind in (forward, backward) if kind]
    (step,) = redistribute((source,), (target,), shape, mesh)
    assert (step.forward, step.backward) == (forward, backward)


@pytest.mark.parametrize("shape", [(12, 6), (11, 6), (7, 13)], ids=str)
@pytest.mark.parametrize("mesh", [m for m in MESHES if m.num_devices <= 6], ids=str)
def test_every_pair_of_plain_placements_on_small_meshes(mesh, shape):
    states = [R, P, V, S(0), S(1), S(0, 2)]
    every = [p for p in itertools.product(states, repeat=mesh.num_axes) if is_valid(p, shape, mesh)]
    for source, target in itertools.product(every, every):
        now = local_shape(shape, source, mesh)
        steps = redistribute(source, target, shape, mesh)
        for step in steps:
            assert step.shape == now, format_placements(source)
            sizes = list(now)
            num = mesh.size(step.axes)
            if step.source.state is State.SHARD:
                sizes[step.source.dim] = sizes[step.source.dim] * num - step.padding
            if step.target.state is State.SHARD:
                whole = sizes[step.target.dim] + step.target_padding
                assert whole % num == 0
                sizes[step.target.dim] = whole // num
            now = tuple(sizes)
        assert now == local_shape(shape, target, mesh)
        assert (not steps) == (source == target)


@given(st.sampled_from(MESHES), st.data())
@settings(max_examples=30, deadline=None)
def test_placement_text_is_read_back(mesh, data):
    shape = (24, 12)
    chosen: Placements = ()
    for _ in range(mesh.num_axes):
        chosen = (*chosen, data.draw(st.sampled_from(options(chosen, shape, mesh, "RPVS"))))
    assert tuple(map(parse_placement, format_placements(chosen).split())) == chosen
