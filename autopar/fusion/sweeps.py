"""Sweeps: trials that are packed into arrays and trained together.

In: a searcher, a function that makes the model of a configuration, and one that compiles a list of
models. Out: the value of every trial. Trials whose models are alike share an array, in each round
anew, so that those that go on fill it; one that diverges leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.fusion.array import Snapshot
from autopar.fusion.searchers import Configuration, Request, Searcher
from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a configuration means: a model, and what it trains with."""

    model: nn.Module
    optimizer: MakeOptimizer
    lr_scheduler: MakeScheduler | None = None
    max_grad_norm: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration, how many steps it has made, and its value then: the less the better."""

    number: int
    configuration: Configuration
    num_steps: int
    value: float


class TrainedArray(Protocol):
    """What a sweep needs of an array."""

    @property
    def active(self) -> tuple[int, ...]: ...

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def model(self, index: int) -> nn.Module: ...

    def snapshot(self, index: int) -> Snapshot: ...

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None: ...

    def close(self) -> None: ...


CompileArray: TypeAlias = Callable[..., TrainedArray]


def sweep(
    make: Callable[[Configuration], Candidate],
    searcher: Searcher,
    batch_of: Callable[[int], Any],
    compile: CompileArray,
    *,
    evaluate: Callable[[nn.Module], float] | None = None,
    array_size: int = 32,
) -> list[Trial]:
    """Train the searcher's trials in arrays, one array after the other; all trials, best first.

    Arguments:

    * ``make``: the model of a configuration and what it trains with.
    * ``batch_of``: the batch of step ``n``, the same for all trials: a tuple of the model's
      arguments, or a mapping.
    * ``compile``: makes the array of a list of models, such as
      ``functools.partial(autopar.compile, devices=1, example_inputs=batch, loss_fn=loss_fn)``; it
      is also given ``optimizer``, ``lr_scheduler``, ``max_grad_norm`` and ``seed``, each a list,
      and ``nonfinite="leave"``.
    * ``evaluate``: the value of a trained model, the less the better; by default the loss of its
      last step.
    * ``array_size``: how many trials train together at most, such as
      ``autopar.fusion.largest_array(...).largest.num_models``.
    """
    if array_size < 1:
        raise InputError(f"array_size is {array_size}; it must be at least 1")
    run = _Sweep(make, batch_of, compile, evaluate, array_size)
    while requests := list(searcher.ask()):
        run.train(requests)
        for request in requests:
            searcher.tell(request.number, run.found[request.number].value)
    return sorted(run.found.values(), key=lambda t: (t.value, t.number))


class _Sweep:
    """Trains rounds of trials; between rounds each lies in ``snapshots``, on the host."""

    def __init__(
        self,
        make: Callable[[Configuration], Candidate],
        batch_of: Callable[[int], Any],
        compile: CompileArray,
        evaluate: Callable[[nn.Module], float] | None,
        array_size: int,
    ) -> None:
        self.make, self.batch_of, self.compile = make, batch_of, compile
        self.evaluate, self.array_size = evaluate, array_size
        self.found: dict[int, Trial] = {}
        self.snapshots: dict[int, Snapshot] = {}

    def train(self, requests: Sequence[Request]) -> None:
        """One round. Trials that it lacks are over."""
        numbers = {r.number for r in requests}
        self.snapshots = {n: s for n, s in self.snapshots.items() if n in numbers}
        going = [r for r in requests if r.number not in self.found or r.number in self.snapshots]
        for chosen, candidates in _packed(going, self.make, self._steps_of, self.array_size):
            self._train_pack(chosen, candidates)

    def _steps_of(self, number: int) -> int:
        return self.found[number].num_steps if number in self.found else 0

    def _train_pack(self, requests: Sequence[Request], candidates: Sequence[Candidate]) -> None:
        array = _compiled(candidates, self.compile)
        try:
            known = {
                place: self.snapshots[r.number]
                for place, r in enumerate(requests)
                if r.number in self.snapshots
            }
            if known:
                array.restore(known)
            steps = {r.number: self._steps_of(r.number) for r in requests}
            losses: dict[int, float] = {}
            for step in range(self._steps_of(requests[0].number), requests[0].num_steps):
                training = [requests[place].number for place in array.active]
                if not training:
                    break
                losses.update(zip(training, _step(array, self.batch_of(step))))
                steps.update((requests[place].number, step + 1) for place in array.active)
            for place, request in enumerate(requests):
                self._note(array, place, request, steps[request.number], losses)
        finally:
            array.close()

    def _note(
        self,
        array: TrainedArray,
        place: int,
        request: Request,
        num_steps: int,
        losses: Mapping[int, float],
    ) -> None:
        value, number = math.inf, request.number
        self.snapshots.pop(number, None)
        if place in array.active:
            self.snapshots[number] = array.snapshot(place)
            if self.evaluate is not None:
                value = float(self.evaluate(array.model(place)))
            else:
                value = losses.get(number, self.found[number].value if number in self.found else 0)
        self.found[number] = Trial(
            number=number, configuration=request.configuration, num_steps=num_steps, value=value
        )


def _step(array: TrainedArray, batch: Any) -> list[float]:
    losses = array.train_step(**batch) if isinstance(batch, Mapping) else array.train_step(*batch)
    return [float(loss) for loss in losses]


def _packed(
    requests: Sequence[Request],
    make: Callable[[Configuration], Candidate],
    steps_of: Callable[[int], int],
    array_size: int,
) -> Iterator[tuple[list[Request], list[Candidate]]]:
    """Trials that share an array: of models alike, with as many steps before and after.

    Models are told apart by what they print and by the shapes of their state: where that misses a
    difference, an array of unlike models computes them one by one where they differ.
    """
    groups: dict[Any, list[tuple[Request, Candidate]]] = {}
    for request in requests:
        candidate = make(request.configuration)
        shapes = tuple((k, tuple(v.shape)) for k, v in candidate.model.state_dict().items())
        key = steps_of(request.number), request.num_steps, repr(candidate.model), shapes
        groups.setdefault(key, []).append((request, candidate))
    for members in groups.values():
        for start in range(0, len(members), array_size):
            chosen = members[start : start + array_size]
            yield [r for r, _ in chosen], [c for _, c in chosen]


def _compiled(candidates: Sequence[Candidate], compile: CompileArray) -> TrainedArray:
    return compile(
        [c.model for c in candidates],
        optimizer=[c.optimizer for c in candidates],
        lr_scheduler=[c.lr_scheduler for c in candidates],
        max_grad_norm=[c.max_grad_norm for c in candidates],
        seed=[c.seed for c in candidates],
        nonfinite="leave",
    )
