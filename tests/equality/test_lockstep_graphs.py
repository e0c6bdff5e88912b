"""A graph in lockstep computes on each rank what `torch.fx.Interpreter` computes there."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from autopar.ir.mesh import Mesh
from autopar.testing.lockstep import LockstepMachine

ATEN = torch.ops.aten
MESH = Mesh(("x",), (3,))


def graph() -> fx.GraphModule:
    """Literals, constants, calls without operands, lists of values, and values as keywords."""
    g = fx.Graph()
    x, held = g.placeholder("x"), g.get_attr("held")
    counted = g.call_function(ATEN.arange.default, (4,), {"dtype": torch.float64})
    joined = g.call_function(ATEN.cat.default, ([x, held, counted], 0))
    picked = g.call_function(ATEN.index.Tensor, (x, [g.call_function(ATEN.argsort.default, (x,))]))
    clamped = g.call_function(ATEN.clamp.Tensor, (x,), {"min": held, "max": picked})
    parts = g.call_function(ATEN.split.Tensor, (joined, 4))
    second = g.call_function(operator.getitem, (parts, 1))
    summed = g.call_function(ATEN.add.Tensor, (second, clamped), {"alpha": 2})
    g.output([joined, picked, summed, held])
    return fx.GraphModule({"held": torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)}, g)


def shards() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_each_rank_computes_what_an_interpreter_does() -> None:
    module, machine = graph(), LockstepMachine(MESH)
    for given in (shards(), [-x for x in shards()]):
        results = machine.run(module, [given])
        for rank, x in enumerate(given):
            expected = fx.Interpreter(module).run(x)
            for ours, theirs in zip([column[rank] for column in results], expected, strict=True):
                assert torch.equal(ours, theirs)


def test_random_numbers_are_those_of_the_call_and_the_rank() -> None:
    g = fx.Graph()
    drawn = g.call_function(ATEN.rand.default, ([5],))
    drawn.meta["custom"] = {"split_axes": (0,)}
    copied = g.call_function(ATEN.rand.default, ([5],))
    g.output([drawn, copied])
    module, machine = fx.GraphModule({}, g), LockstepMachine(MESH)
    first, second = machine.run(module, []), machine.run(module, [])
    assert [x.tolist() for column in first for x in column] == [
        x.tolist() for column in second for x in column
    ]
    (a, b, c), copies = first
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)
    assert torch.equal(copies[0], copies[1])
    assert torch.equal(copies[1], copies[2])
