"""Sweeps: the trials of a search, packed into arrays and trained together.

Input: a searcher, a function that makes the model of a configuration, and one that compiles a list
of models. Output: the value of every trial. Trials with models alike share an array. Each round is
packed anew, so that the surviving trials fill their arrays; a trial that diverges leaves its array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.fusion.array import Snapshot
from autopar.fusion.searchers import Configuration, Request, Searcher, check_counts
from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The model of a configuration, and how it is trained.

    ``optimizer`` makes its optimizer and ``lr_scheduler`` its scheduler. ``max_grad_norm``: the
    2-norm to which its gradients are clipped, None for no clipping. ``seed``: the seed of its
    random numbers.
    """

    model: nn.Module
    optimizer: MakeOptimizer
    lr_scheduler: MakeScheduler | None = None
    max_grad_norm: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one trial: its configuration, the number of its steps, and its value.

    Lower values are better; a trial that diverged, or whose value is NaN, has the value ``inf``.
    """

    number: int
    configuration: Configuration
    num_steps: int
    value: float


class TrainedArray(Protocol):
    """The part of the interface of an array that a sweep uses."""

    @property
    def active(self) -> tuple[int, ...]: ...

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def model(self, index: int) -> nn.Module: ...

    def snapshots(self, indices: Iterable[int] | None = None) -> dict[int, Snapshot]: ...

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None: ...

    def close(self) -> None: ...


CompileArray: TypeAlias = Callable[..., TrainedArray]
"""Compiles a list of models, with the keywords that `sweep` passes."""


def sweep(
    make: Callable[[Configuration], Candidate],
    searcher: Searcher,
    batch_of: Callable[[int], Any],
    compile: CompileArray,
    *,
    evaluate: Callable[[nn.Module], float] | None = None,
    array_size: int = 32,
) -> list[Trial]:
    """Train the trials of a searcher in arrays, one array after another.

    Arguments:

    * ``make``: returns the model of a configuration and how it is trained.
    * ``searcher``: the source of trials, such as `Hyperband`.
    * ``batch_of``: returns the batch of step ``n`` (from 0), the same for all trials: a tuple of
      the model's arguments, or a mapping.
    * ``compile``: makes an array of a list of models, such as
      ``functools.partial(autopar.compile, devices=1, example_inputs=batch, loss_fn=loss_fn)``; it
      is also given ``optimizer``, ``lr_scheduler``, ``max_grad_norm`` and ``seed`` as lists, and
      ``nonfinite="leave"``.
    * ``evaluate``: returns the value of a trained model, lower is better; by default the value is
      the loss of the trial's last step.
    * ``array_size``: the largest number of trials trained together, such as
      ``autopar.fusion.largest_array(...).largest.num_models``.

    Returns all trials, best first. Raises InputError for an ``array_size`` that is no whole number
    from 1 on, and where ``make`` returns no `Candidate`.
    """
    check_counts(array_size=array_size)
    run = _Sweep(make, batch_of, compile, evaluate, array_size)
    while requests := list(searcher.ask()):
        run.train(requests)
        for request in requests:
            searcher.tell(request.number, run.found[request.number].value)
    return sorted(run.found.values(), key=lambda t: (t.value, t.number))


class _Sweep:
    """Trains rounds of trials, whose states are kept on the host in between."""

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
        """Train one round. Trials that are missing from it are finished."""
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
            held = array.snapshots(array.active)
            for place, request in enumerate(requests):
                snapshot = held.get(place)
                self._note(array, place, request, steps[request.number], losses, snapshot)
        finally:
            array.close()

    def _note(
        self,
        array: TrainedArray,
        place: int,
        request: Request,
        num_steps: int,
        losses: Mapping[int, float],
        snapshot: Snapshot | None,
    ) -> None:
        value, number = math.inf, request.number
        self.snapshots.pop(number, None)
        if snapshot is not None:
            self.snapshots[number] = snapshot
            if self.evaluate is not None:
                value = float(self.evaluate(array.model(place)))
            else:
                value = losses.get(number, self.found[number].value if number in self.found else 0)
        if math.isnan(value):
            value = math.inf
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
    """Groups of trials that share an array: models alike, and the same steps done and to do.

    Models are compared by their repr and the shapes of their tensors. Where that misses a
    difference, the array computes the differing ops model by model.
    """
    groups: dict[Any, list[tuple[Request, Candidate]]] = {}
    for request in requests:
        candidate = _made(make, request.configuration)
        model = candidate.model
        tensors = (*model.named_parameters(), *model.named_buffers())
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors)
        key = steps_of(request.number), request.num_steps, repr(model), shapes
        groups.setdefault(key, []).append((request, candidate))
    for members in groups.values():
        for start in range(0, len(members), array_size):
            chosen = members[start : start + array_size]
            yield [r for r, _ in chosen], [c for _, c in chosen]


def _made(make: Callable[[Configuration], Candidate], configuration: Configuration) -> Candidate:
    candidate = make(configuration)
    if not isinstance(candidate, Candidate):
        raise InputError(
            f"make({dict(configuration)}) returned a {type(candidate).__name__}; return an "
            "autopar.fusion.Candidate(model=..., optimizer=functools.partial(torch.optim.SGD, "
            "lr=...))"
        )
    return candidate


def _compiled(candidates: Sequence[Candidate], compile: CompileArray) -> TrainedArray:
    return compile(
        [c.model for c in candidates],
        optimizer=[c.optimizer for c in candidates],
        lr_scheduler=[c.lr_scheduler for c in candidates],
        max_grad_norm=[c.max_grad_norm for c in candidates],
        seed=[c.seed for c in candidates],
        nonfinite="leave",
    )
