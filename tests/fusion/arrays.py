"""Arrays on workers that are kept between tests, and each of their models alone in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.torch_private import pytree
from autopar.cost_models import Cluster
from autopar.frontend.capture import Captured, capture, split_inputs
from autopar.fusion.array import Array
from autopar.fusion.members import Member, members_of
from autopar.fusion.stacked import StackedModels
from autopar.ir.mesh import Mesh
from autopar.lowering.program import lower
from autopar.passes.prepare import prepare
from autopar.planning.planner import make_planned
from autopar.planning.space import space_of
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.state.initial import initial_state, state_keys
from autopar.runtime.state.model_options import ArrayOptions
from autopar.runtime.step.agreement import NonFinite
from autopar.runtime.step.rank_options import RankOptions
from autopar.sharding.strategy import Strategy
from tests.oracles import random_assignment
from tests.runtime.conftest import Groups

ALONE = Mesh(("x",), (1,))


def alone_of(
    groups: Groups, model: nn.Module, batch: tuple[Tensor, ...], *, optimizer: Any, seed: int
) -> LocalRunner:
    """One model that is compiled as itself, not as an array of one."""
    captured = capture(model, batch)
    analysis = prepare(captured).analysis
    program = lower(Strategy(analysis, random_assignment(analysis, ALONE, 0)))
    keys = state_keys(model, captured, program)
    ranks = RankOptions(keys=keys, optimizer=optimizer, seed=seed)
    group = groups(1)
    return LocalRunner(program, initial_state(model), ranks, lambda: group, owns_group=False)


class OnGroup:
    """The methods of a compiled model that an array calls, on workers that go on afterwards."""

    plan = None

    def __init__(self, runner: LocalRunner) -> None:
        self.runner = runner
        self.program = runner.program
        self.full_state_dict = runner.full_state_dict
        self.model_states = runner.model_states
        self.load_state_dict = runner.load_state_dict
        self.load_model_states = runner.load_model_states
        self.close = runner.close

    def train_step(self, *tensors: Tensor) -> Tensor:
        return self.runner.train_step(tensors)


def array_of(
    groups: Groups,
    models: Sequence[nn.Module],
    example_inputs: Any,
    *,
    mesh: Mesh = ALONE,
    seed_of_plan: int = 0,
    is_searched: bool = False,
    nonfinite: NonFinite = NonFinite.RAISE,
    leaves: bool = False,
    loss_fn: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    max_grad_norm: Any = None,
    seed: Any = 0,
) -> Array:
    """As ``autopar.compile([...])``, under a drawn strategy, or one searched by roofline prices."""

    def start(
        stacked: StackedModels, captured: Captured, _: Any, options: ArrayOptions, _checks: bool
    ) -> OnGroup:
        if is_searched:
            cluster = Cluster.detect(mesh.num_devices)
            program = make_planned(captured, cluster, space_of(mesh.num_devices)).program
        else:
            analysis = prepare(captured).analysis
            program = lower(Strategy(analysis, random_assignment(analysis, mesh, seed_of_plan)))
        ranks = RankOptions(
            keys=state_keys(stacked, captured, program),
            optimizer=options.models[0].optimizer,
            nonfinite=nonfinite,
            array=options,
        )
        group = groups(mesh.num_devices)
        runner = LocalRunner(
            program, initial_state(stacked), ranks, lambda: group, owns_group=False
        )
        return OnGroup(runner)

    members = members_of(
        models, loss_fn=loss_fn, optimizer=optimizer, lr_scheduler=lr_scheduler,
        max_grad_norm=max_grad_norm, seed=seed,
    )  # fmt: skip
    return Array(
        members,
        example_inputs,
        start,  # type: ignore[arg-type]
        nonfinite_leaves=leaves,
        raises=nonfinite is NonFinite.RAISE,
    )


def doubled(tree: Any) -> Any:
    """Models and batches in double precision, where rounding hides nothing."""
    if isinstance(tree, nn.Module):
        return tree.double()
    return pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, tree)


class Alone:
    """One model in eager PyTorch, trained as its member of an array says."""

    def __init__(self, member: Member) -> None:
        self.model = copy.deepcopy(member.model)
        self.loss_fn: Callable[..., Tensor] | None = member.loss_fn
        self.limit = member.max_grad_norm
        self.optimizer = member.optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = member.lr_scheduler(self.optimizer) if member.lr_scheduler else None

    def step(self, batch: Any) -> Tensor:
        args, kwargs = split_inputs(batch)
        self.optimizer.zero_grad()
        if self.loss_fn is None:
            out = self.model(*args, **kwargs)
            loss = out if isinstance(out, Tensor) else out.loss
        else:
            loss = self.loss_fn(self.model(*args[:-1], **kwargs), args[-1])
        loss.backward()
        if self.limit is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        self.optimizer.step()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        elif self.scheduler is not None:
            self.scheduler.step()
        return loss.detach()


def assert_state(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_array(
    array: Array, batches: Sequence[Any], *, tolerance: float = 1e-9, own: bool = False
) -> None:
    """Losses and state of every model equal those of the model alone. With ``own``, each of
    ``batches`` is a list with one for each model."""
    alone = [Alone(member) for member in array.members]
    for batch in batches:
        given = (batch,) if own else split_inputs(batch)[0]
        kwargs = {} if own else split_inputs(batch)[1]
        losses = array.train_step(*given, **kwargs)
        expected = [m.step(batch[i] if own else batch) for i, m in enumerate(alone)]
        torch.testing.assert_close(
            losses, torch.stack(expected).to(losses.dtype), rtol=tolerance, atol=tolerance
        )
    for index, model in enumerate(alone):
        assert_state(array.state_dict(index), model.model.state_dict(), tolerance)
