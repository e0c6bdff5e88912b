"""Models of a family with weights of their own, fused, and one step of the graph of all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture, split_inputs
from autopar.frontend.checking.evaluation import evaluate
from autopar.fusion.fuse import LOSSES, Fused, fuse
from autopar.fusion.stacked import rows_of, state_of
from autopar.ir.graph import ValueKind
from tests.fusion.arrays import doubled
from tests.models.zoo import MODELS, MORE_MODELS


def fused_of(models: Sequence[nn.Module], batch: Any, loss_fn: Any = None) -> Fused:
    captures = [capture(m, batch, loss_fn=loss_fn) for m in models]
    return fuse(captures, [state_of(m, loss_fn) for m in models], shares_batch=True)


def variants(name: str, num: int, *, double: bool = True) -> tuple[list[nn.Module], Any]:
    """So many models of the zoo's ``name``, each with numbers of its own, and a batch."""
    make, make_batch = {**MODELS, **MORE_MODELS}[name]
    models = []
    for seed in range(num):
        torch.manual_seed(seed)
        models.append(make().train())
    batch = make_batch(0)
    return ([doubled(m) for m in models], doubled(batch)) if double else (models, batch)


def graph_step(
    fused: Fused, models: Sequence[nn.Module], batch: Any
) -> tuple[Tensor, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Losses, and per model gradients and next buffers, by the graph of all."""
    graph = fused.captured.graph
    state: dict[str, Tensor] = {LOSSES: torch.zeros(len(models))}
    for model, slices in zip(models, fused.slices):
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for part in slices:
            state.setdefault(part.name, _room(graph, part.name, own[part.target]))
            target = state[part.name]
            (target if part.row is None else target[part.row]).copy_(own[part.target].detach())
    for value in graph.parameters:
        if value.differentiable:
            state[str(value.target)].requires_grad_()
    args, kwargs = split_inputs(batch)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    found = evaluate(graph, state, tensors, torch.device("cpu"), None)
    found[graph.loss or 0].backward()
    names = {v.index: str(v.target) for v in graph.values if v.kind is ValueKind.BUFFER}
    following = {**state, **{names[old]: found[new] for old, new in graph.mutations}}
    gradients, buffers = [], []
    for slices in fused.slices:
        trained = [s for s in slices if s.is_parameter]
        held = {s.name: state[s.name].grad for s in trained if state[s.name].grad is not None}
        gradients.append(rows_of([s for s in trained if s.name in held], held))  # type: ignore[arg-type]
        buffers.append(rows_of([s for s in slices if not s.is_parameter], following))
    return following[LOSSES].detach(), gradients, buffers


def _room(graph: Any, name: str, like: Tensor) -> Tensor:
    (shape,) = (v.shape for v in graph.values if v.target == name)
    return torch.zeros(shape, dtype=like.dtype)


def check_step(models: Sequence[nn.Module], batch: Any, *, tolerance: float = 1e-8) -> Fused:
    """The graph of all models gives each the loss, gradients and buffers that it has alone."""
    fused = fused_of(models, batch)
    losses, gradients, buffers = graph_step(fused, models, batch)
    args, kwargs = split_inputs(batch)
    for index, model in enumerate(models):
        alone = copy.deepcopy(model)
        out = alone(*args, **kwargs)
        loss = out if isinstance(out, Tensor) else out["loss"] if isinstance(out, dict) else out[0]
        loss.backward()
        close(losses[index], loss.detach().reshape(()), tolerance, f"loss of {index}")
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None and name in gradients[index]:
                close(gradients[index][name], parameter.grad, tolerance, name)
        given = {n for n, p in alone.named_parameters() if p.grad is not None}
        assert given <= gradients[index].keys(), given - gradients[index].keys()
        for name, buffer in alone.named_buffers():
            if name in buffers[index]:
                close(buffers[index][name], buffer, tolerance, name)
    return fused


def close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        got, expected.to(got.dtype), rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}"
    )
