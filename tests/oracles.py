"""Independent references: eager PyTorch against the programs of all ranks in lockstep.

``reference_steps`` trains a copy of the model in eager PyTorch; ``lockstep_steps`` trains the
lowered program of a strategy on every rank of its mesh, in one process. Both return losses, the
first step's gradients and the final weights under the model's own names.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.capture import Captured, capture
from autopar.frontend.checking.gradients import compare_with_eager
from autopar.ir.graph import Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R, S, V, is_valid
from autopar.lowering.program import lower
from autopar.lowering.training import lower_training
from autopar.lowering.types import ParameterProgram, RankProgram
from autopar.passes.prepare import Prepared
from autopar.rules import enumerate_choices
from autopar.sharding.strategy import Analysis, Assignment, Strategy
from autopar.testing.lockstep import LockstepRun, gather

NUM_STEPS = 3
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The results of a few steps of training."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def to_double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def reference_steps(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    make_optimizer: MakeOptimizer = sgd,
) -> Trained:
    model = copy.deepcopy(model)
    optimizer = make_optimizer(list(model.parameters()))
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
    return Trained(
        losses=losses,
        gradients=gradients,
        weights={n: p.detach() for n, p in model.named_parameters()},
        buffers=dict(model.named_buffers()),
    )


def lockstep_steps(
    strategy: Strategy,
    captured: Captured,
    state: dict[str, Tensor],
    batches: Sequence[dict[str, Tensor]],
    make_optimizer: MakeOptimizer = sgd,
) -> Trained:
    return train_program(lower(strategy), captured, state, batches, make_optimizer)


def train_program(
    program: RankProgram,
    captured: Captured,
    state: dict[str, Tensor],
    batches: Sequence[dict[str, Tensor]],
    make_optimizer: MakeOptimizer = sgd,
) -> Trained:
    """Train on every rank of the program's mesh and pipeline, each with an optimizer of its own."""
    run = LockstepRun(program, captured.graph, state)
    mesh, places = program.mesh, range(program.mesh.num_devices)
    held = [
        [p for p in program.parameters if p.trainable and p.value in rank.parameters]
        for rank in run.ranks
    ]
    optimizers = [
        [make_optimizer([rank.parameters[p.value][i] for p in own]) for i in places if own]
        for rank, own in zip(run.ranks, held)
    ]
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        results = run.steps(captured.signature.flatten((), batch))
        assert len({x.item() for r in results for x in r.loss}) == 1, "ranks disagree on the loss"
        losses.append(results[0].loss[0].item())
        if len(losses) == 1:
            gradients = _whole_gradients(run, held, results)
        for rank, own, result, of_rank in zip(run.ranks, held, results, optimizers):
            for place, optimizer in enumerate(of_rank):
                for p in own:
                    got = result.gradients.get(p.value)
                    rank.parameters[p.value][place].grad = None if got is None else got[place]
                optimizer.step()
    for rank in run.ranks:
        for value, shards in rank.parameters.items():
            for ours, first in zip(shards, run.parameters[value]):
                assert torch.equal(ours, first), f"copies of {value} differ between pipeline ranks"
    return Trained(
        losses=losses,
        gradients=gradients,
        weights={
            p.name: gather(run.parameters[p.value], p.stored, p.shape, mesh)
            for p in program.parameters
        },
        buffers={b.name: run.buffers[b.value][-1] for b in program.buffers},
    )


def assert_trains_as_eager(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    prepared: Prepared,
    make_optimizer: MakeOptimizer,
    meshes: Sequence[tuple[Mesh, int]],
) -> None:
    """Train under a random strategy on each mesh with its number of micro-batches, in lockstep."""
    expected = reference_steps(model, batches, make_optimizer)
    for seed, (mesh, num) in enumerate(meshes):
        analysis = prepared.cut(num).analysis
        strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
        program = lower_training(strategy, num)
        got = train_program(program, prepared.captured, state_of(model), batches, make_optimizer)
        assert_same(got, expected, tolerance=1e-5)


def _whole_gradients(
    run: LockstepRun, held: Sequence[Sequence[ParameterProgram]], results: Sequence[Any]
) -> dict[str, Tensor]:
    """Global gradients by name; the pipeline ranks that hold a parameter must have equal ones."""
    found: dict[str, Tensor] = {}
    for own, result in zip(held, results):
        for p in own:
            if p.value in result.gradients:
                whole = gather(result.gradients[p.value], p.stored, p.shape, run.program.mesh)
                same = torch.equal(found.setdefault(p.name, whole), whole)
                assert same, f"pipeline ranks have different gradients of {p.name}"
    return found


def assert_same(got: Trained, expected: Trained, *, tolerance: float) -> None:
    """Equal losses, gradients, weights and buffers, within ``tolerance`` of their size."""
    torch.testing.assert_close(got.losses, expected.losses, rtol=tolerance, atol=tolerance)
    assert set(got.gradients) == set(expected.gradients)
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(got, kind), getattr(expected, kind)
        for name, tensor in theirs.items():
            if not tensor.numel():
                continue
            scale = max(1.0, tensor.abs().max().item())
            error = (ours[name] - tensor).abs().max().item()
            assert error <= tolerance * scale, f"{kind} of {name}: off by {error:.3g}"
    for name, tensor in expected.buffers.items():
        if name in got.buffers:
            torch.testing.assert_close(
                got.buffers[name], tensor, rtol=tolerance, atol=tolerance, check_dtype=False
            )


def split_options(value: Value, mesh: Mesh, further: Sequence[Any]) -> list[Placements]:
    """Every valid placement of a value that uses plain splits and the ``further`` states."""
    states = [R, *further, *(S(d) for d in range(len(value.shape)))]
    options = itertools.product(states, repeat=mesh.num_axes)
    return [p for p in options if is_valid(p, value.shape, mesh)]


def assert_splits_equal_eager(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    meshes: Sequence[Mesh],
    *,
    tolerance: float = 1e-9,
) -> set[str]:
    """A model trains as in eager mode, whole and under a random assignment on each mesh. Returns
    the names of the operators of its graph."""
    captured = capture(model, batches[0])
    compare_with_eager(captured, model, batches[0])
    expected, analysis = reference_steps(model, batches), Analysis(captured.graph)
    for seed, mesh in enumerate(meshes):
        strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
        got = lockstep_steps(strategy, captured, state_of(model), batches)
        assert_same(got, expected, tolerance=tolerance)
    return {op.target_name for op in captured.graph.ops}


def random_assignment(analysis: Analysis, mesh: Mesh, seed: int) -> Assignment:
    """A valid joint decision drawn uniformly, op by op and value by value."""
    generator = random.Random(seed)
    graph = analysis.graph
    choices = tuple(
        generator.choice(enumerate_choices(space, mesh, bases))
        for space, bases in zip(analysis.spaces, analysis.bases)
    )
    stored = {
        v.index: generator.choice(split_options(v, mesh, ()))
        for v in graph.values
        if v.kind in (ValueKind.PARAMETER, ValueKind.INPUT)
    }
    relays = {
        index: generator.choice(
            split_options(
                graph.values[index], mesh, (V,) if graph.values[index].differentiable else ()
            )
        )
        for index in sorted(analysis.relayed)
    }
    released = frozenset(v.index for v in graph.parameters if generator.random() < 0.5)
    scattered = frozenset(v.index for v in graph.parameters if generator.random() < 0.5)
    return Assignment(
        mesh=mesh, choices=choices, stored=stored, relays=relays, released=released,
        scattered=scattered,
    )  # fmt: skip
