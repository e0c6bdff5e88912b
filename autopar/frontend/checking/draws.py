"""The same random numbers for a model and its captured graph, whatever the order of their draws.

A model applies dropout by ``bernoulli_``, its graph by ``native_dropout``, and that of an array by
``model_dropout``; an unread draw is absent from the graph. Therefore, while a check runs, every
draw starts from one seed: all draws between two outcomes decide alike, and so do all draws from a
range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.base.accelerators import default_generator, is_accelerator
from autopar.base.torch_private import TorchDispatchMode
from autopar.ir.model_dropout import MODEL_DROPOUT

_ATEN = torch.ops.aten
_SEED = 20231


class FixedDraws(TorchDispatchMode):
    """A mode in which every random operator draws as if it were the first.

    It does not restore the generators of the CPU and of ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generators = [torch.default_generator]
        if is_accelerator(device):
            self._generators.append(default_generator(device))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is _ATEN.native_dropout.default:
            return _native_dropout(*args, **kwargs)
        if func is MODEL_DROPOUT:
            return _model_dropout(args[0], args[2])
        if func in (_ATEN.bernoulli_.float, _ATEN.bernoulli.p):
            x, p = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            drawn = _is_drawn(x, p).to(x.dtype)
            return x.copy_(drawn) if func is _ATEN.bernoulli_.float else drawn
        if func in (_ATEN.rrelu_with_noise.default, _ATEN.rrelu_with_noise_.default):
            return _rrelu(func, *args, **kwargs)
        if func in (_ATEN.uniform_.default, _ATEN.uniform.default):
            drawn = _uniform(args[0], *args[1:], **kwargs)
            return args[0].copy_(drawn) if func is _ATEN.uniform_.default else drawn
        for generator in self._generators:
            generator.manual_seed(_SEED)
        return func(*args, **kwargs)


def _is_drawn(like: Tensor, p: float) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(_SEED)
    drawn = torch.rand(like.shape, dtype=torch.float32, device=like.device, generator=generator)
    return drawn < p


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _is_drawn(x, 1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * kept * scale, kept


def _model_dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    dropped, kept = zip(*(_native_dropout(row, p, True) for row in x))
    return torch.stack(dropped), torch.stack(kept)


def _uniform(like: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(_SEED)
    drawn = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return drawn.uniform_(low, high, generator=generator)


def _rrelu(
    func: Any,
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Tensor:
    if not training:
        return func(x, noise, lower, upper, training)
    noise.copy_(torch.where(x > 0, 1, _uniform(x, lower, upper)))
    return x.mul_(noise) if func is _ATEN.rrelu_with_noise_.default else x * noise
