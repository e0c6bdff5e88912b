"""Drawn programs with buffers: steps that read them, and steps that change them for the next call.

A program mixes the steps of `drawn_programs` with reads of buffers (the tensor itself, views of it,
products with earlier values) and updates: copies, assignments, running means, queues, swaps,
writes in place through views. What an update takes is an earlier value, the input, a parameter,
another buffer or a row of one of these, so that memory is shared wherever eager mode shares it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from tests.models.drawn_programs import (
    DTYPE,
    INPUT,
    OF_FORM,
    WRITES,
    Drawn,
    Told,
    chain_of_views,
    extend,
    fit,
    view_step,
    write_operator_step,
    write_step,
)

SHAPES: dict[str, tuple[int, ...]] = {
    "whole": (2, 3, 4), "row": (4,), "other_row": (4,), "grid": (3, 4), "number": (),
}  # fmt: skip
BATCHES = [INPUT, INPUT.flip(2) - 0.25, INPUT.roll(1, 1) * 0.75, INPUT + 0.125]


class Stateful(Drawn):
    """Steps over a list of values, the first of which are computed from input and buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in (*SHAPES, "count"):
            self.register_buffer(name, None)
        self.reset()

    def reset(self) -> None:
        """Give the buffers the contents that they have before training."""
        for place, (name, shape) in enumerate(SHAPES.items()):
            size = torch.Size(shape).numel()
            values = torch.sin(torch.arange(size, dtype=DTYPE) + place).reshape(shape)
            setattr(self, name, values)
        self.count = torch.zeros((), dtype=torch.int64)

    def values(self, x: Tensor) -> list[Tensor]:
        return self.run_on([self.start * x, x])


def draw_stateful(seed: int) -> Stateful:
    """Program number ``seed``."""
    generator = random.Random(seed)
    for _ in itertools.count():
        if (model := _attempt(generator)) is not None:
            return model
    raise AssertionError


def _attempt(generator: random.Random) -> Stateful | None:
    model = Stateful()
    kinds = [_read, _update, *generator.choices(_KINDS, k=generator.randint(2, 5))]
    generator.shuffle(kinds)
    for kind in kinds:
        extend(model, functools.partial(kind, model, generator))
        model.reset()
    is_scaled = model.scale()
    model.reset()
    return model if is_scaled and _trains(model) else None


def _trains(model: Stateful) -> bool:
    """Whether a few steps of training in eager mode run and stay finite."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in BATCHES:
        optimizer.zero_grad()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss = model(x.clone())
                loss.backward()
        except RuntimeError:  # a value that was needed was written to, or overlaps itself
            return False
        optimizer.step()
        found = [loss, *model.parameters(), *(b for b in model.buffers() if b is not None)]
        if not all(bool(tensor.isfinite().all()) for tensor in found):
            return False
    return True


# --- reads -----------------------------------------------------------------------------------
def _read(model: Stateful, generator: random.Random) -> Told:
    name = generator.choice(list(SHAPES))
    shape = SHAPES[name]
    chained, views = chain_of_views(generator, shape, generator.randint(0, 2), written=False)
    position = generator.random()
    form = generator.choice(["itself", "product", "sum", "by count"])

    def run(model: Drawn, pool: list[Tensor]) -> Tensor:
        read = chained(getattr(model, name))
        value = fit(pool[int(position * len(pool))], read.shape, 0.5)
        if form == "itself":
            return read
        if form == "product":
            return read * value
        if form == "sum":
            return read + value
        return torch.where(model.count % 2 == 0, read, -read) * value

    return Told(run, f"reads {views or 'all'} of {name} ({form})")


# --- updates ---------------------------------------------------------------------------------
Taken = Callable[[Drawn, list[Tensor]], Tensor]


def _source(generator: random.Random) -> tuple[Taken, str]:
    """The source tensor of an update, which may alias a parameter, an input or a buffer."""
    kind = generator.choice(["value", "value", "parameter", "input", "buffer", "buffer"])
    name, position = generator.choice(list(SHAPES)), generator.random()

    def take(model: Drawn, pool: list[Tensor]) -> Tensor:
        if kind == "parameter":
            return model.start.detach()
        if kind == "input":
            return pool[1].detach()
        if kind == "buffer":
            return getattr(model, name)
        value = pool[int(position * len(pool))]
        return (torch.view_as_real(value) if value.is_complex() else value).detach()

    return take, f"buffer {name}" if kind == "buffer" else kind


def _like(source: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A row, a part or all of the source, without a copy where the shapes allow it."""
    while source.dim() > len(shape):
        source = source[-1] if source.shape[0] else source.flatten()
    if tuple(source.shape) == shape and source.dtype == DTYPE:
        return source
    return fit(source, shape, 0.5)


Update = Callable[[Drawn, str, Tensor], None]


def _set(model: Drawn, name: str, source: Tensor) -> None:
    setattr(model, name, source)


def _set_copy(model: Drawn, name: str, source: Tensor) -> None:
    setattr(model, name, source.clone())


def _swap(model: Drawn, name: str, source: Tensor) -> None:
    row = model.row.clone()
    model.row.copy_(model.other_row)
    model.other_row.copy_(row + source.mean())


def _count(model: Drawn, name: str, source: Tensor) -> None:
    model.count += 1
    getattr(model, name).mul_(1 / (1 + model.count))


def _queue(model: Drawn, name: str, source: Tensor) -> None:
    model.grid.copy_(torch.cat([model.grid[1:], _like(source, (4,))[None]]))


def _queue_set(model: Drawn, name: str, source: Tensor) -> None:
    model.grid = torch.cat([_like(source, (4,))[None], model.grid[:-1]])


def _place(model: Drawn, name: str, source: Tensor) -> None:
    model.grid.index_copy_(0, (model.count % 3)[None], _like(source, (4,))[None])
    model.count.add_(1)


UPDATES: dict[str, Update] = {
    "copy": lambda m, name, x: getattr(m, name).copy_(x),
    "set": _set,
    "set to a copy": _set_copy,
    "mean": lambda m, name, x: getattr(m, name).mul_(0.9).add_(x, alpha=0.1),
    "lerp": lambda m, name, x: getattr(m, name).lerp_(x, 0.25),
    "set lerp": lambda m, name, x: setattr(m, name, torch.lerp(getattr(m, name), x, 0.25)),
    "add": lambda m, name, x: getattr(m, name).add_(x.tanh()),
    "operator": lambda m, name, x: getattr(m, name).__iadd__(x.mean()),
    "most": lambda m, name, x: getattr(m, name).copy_(torch.maximum(getattr(m, name), x)),
    "where": lambda m, name, x: getattr(m, name).copy_(
        torch.where(x > getattr(m, name), x, getattr(m, name))
    ),
    "flip": lambda m, name, x: getattr(m, name).copy_(getattr(m, name).flip(list(range(x.dim())))),
    "out": lambda m, name, x: torch.add(x, 0.5, out=getattr(m, name)),
    "swap": _swap,
    "count": _count,
    "queue": _queue,
    "queue set": _queue_set,
    "place": _place,
}  # fmt: skip


def _update(model: Stateful, generator: random.Random) -> Told:
    """A buffer changed as a whole; the loss may read what it was before, too."""
    name, update = generator.choice(list(SHAPES)), generator.choice(list(UPDATES))
    take, text = _source(generator)
    hidden = generator.random() < 0.7
    before = generator.random() < 0.3

    def run(model: Drawn, pool: list[Tensor]) -> list[Tensor]:
        held = getattr(model, name)
        made = [held * pool[0].mean()] if before else []
        with torch.set_grad_enabled(not hidden):
            UPDATES[update](model, name, _like(take(model, pool), SHAPES[name]))
        return made

    return Told(run, f"{update} {name} from {text}")


def _write(model: Stateful, generator: random.Random) -> Told:
    """A part of a buffer written to in place."""
    name = generator.choice(list(SHAPES))
    form = generator.choice([form for form in WRITES if form not in OF_FORM])
    chained, views = chain_of_views(generator, SHAPES[name], generator.randint(0, 3), written=True)
    take, text = _source(generator)

    def run(model: Drawn, pool: list[Tensor]) -> list[Tensor]:
        view = chained(getattr(model, name))
        with torch.no_grad():
            WRITES[form](view, fit(take(model, pool), view.shape, 0.5))
        return []

    return Told(run, f"{form} through {views or 'nothing'} of {name} from {text}")


_KINDS = [_read, _read, _update, _update, _update, _write, _write, view_step, write_step,
          write_operator_step]  # fmt: skip
