"""Sweeps: the trials of a search, packed into arrays and trained together.

Input: a searcher, a function that makes the model of a configuration, and one that compiles a list
of models. Output: the value of every trial. Trials with models alike that have done as many steps
share an array until the first of them has done all of its own. From then on its place is idle, as
is that of a trial that diverged; the others move to a smaller array once the work of idle places
has cost more than compiling does.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.fusion.array import Snapshot
from autopar.fusion.searchers import Configuration, Request, Searcher, check_counts
from autopar.runtime.runners.spmd import from_first_rank
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

    num_skipped_steps: list[int]

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

    * ``make``: returns the model of a configuration and how it is trained; it is called again for a
      trial that moves to another array.
    * ``searcher``: the source of trials, such as `Hyperband`.
    * ``batch_of``: returns the batch of step ``n`` (from 0), the same for all trials: a tuple of
      the model's arguments, or a mapping.
    * ``compile``: makes an array of a list of models, such as
      ``functools.partial(autopar.compile, devices=1, example_inputs=batch, loss_fn=loss_fn)``; it
      is also given ``optimizer``, ``lr_scheduler``, ``max_grad_norm`` and ``seed`` as lists, and
      ``nonfinite="skip"``.
    * ``evaluate``: returns the value of a trained model, lower is better; by default the value is
      the loss of the trial's last step.
    * ``array_size``: the largest number of trials trained together, such as
      ``autopar.fusion.largest_array(...).largest.num_models``.

    Returns all trials, best first. Raises InputError for an ``array_size`` that is no whole number
    from 1 on, where ``make`` returns no `Candidate`, and where the searcher asks for a trial that
    is training or finished.
    """
    check_counts(array_size=array_size)
    run = _Sweep(make, batch_of, compile, evaluate, array_size)
    try:
        run.take(searcher.ask())
        while run.training:
            for number in run.advance():
                searcher.tell(number, run.found[number].value)
            run.take(searcher.ask())
    finally:
        run.close()
    return sorted(run.found.values(), key=lambda t: (t.value, t.number))


@dataclass(slots=True, kw_only=True)
class Occupied:
    """An open array, and the place in it of each trial whose state it has; others are idle.

    ``compile_s`` is the time that making it took, ``step_s`` the least of a step, and ``idle_s``
    that of the work of idle places so far.
    """

    array: TrainedArray
    places: dict[int, int]
    num_places: int
    compile_s: float
    step_s: float = math.inf
    idle_s: float = 0.0

    def note_step(self, time_s: float, num_training: int) -> None:
        """Take account of a step of so many trials."""
        self.step_s = min(self.step_s, time_s)
        self.idle_s += self.step_s * self._idle_share(num_training)

    def is_too_large(self, num_training: int, num_steps: int, num_perhaps: int) -> bool:
        """Whether the trials that train should move to an array of their own.

        They should if idle places will cost more than compiling one in the ``num_steps`` steps that
        are certain to come, or have cost that much already and may again in ``num_perhaps``.
        """
        idle_share = self._idle_share(num_training)
        if not idle_share:
            return False
        coming_s, perhaps_s = (n * self.step_s * idle_share for n in (num_steps, num_perhaps))
        return max(coming_s, min(self.idle_s, perhaps_s)) > self.compile_s

    def _idle_share(self, num_training: int) -> float:
        return 1 - num_training / self.num_places


class _Sweep:
    """Trains trials, whose states are kept on the host while no array has them.

    ``training``: the trials that have steps to do; ``undecided``: those that have done them, of
    which the searcher has not said whether they go on; ``diverged``: those that never do.
    """

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
        self.training: dict[int, Request] = {}
        self.undecided: set[int] = set()
        self.diverged: set[int] = set()
        self._kinds: dict[int, Hashable] = {}
        self._new: dict[int, Candidate] = {}
        """Candidates of which no array has been compiled yet."""
        self._snapshots: dict[int, Snapshot] = {}
        self._open: Occupied | None = None

    def take(self, requests: Sequence[Request]) -> None:
        """Train these trials too. If there are any, undecided ones that are not among them are
        finished."""
        given = Counter(request.number for request in requests)
        for request in requests:
            number = request.number
            if number in self.training or given[number] > 1:
                raise InputError(
                    f"the searcher asks for trial {number}, which is training; give every trial a "
                    "number of its own, and ask for more steps once it has been told a value"
                )
            if number not in self.found:
                self._new[number] = _made(self.make, request.configuration)
                self._kinds[number] = _kind(self._new[number].model)
            elif number not in self.undecided | self.diverged:
                raise InputError(
                    f"the searcher asks for trial {number}, which is finished, as its ask() left "
                    "it out after it had been told the value; ask for it in the next answer then"
                )
        self.training |= {request.number: request for request in requests}
        if requests:
            for number in self.undecided - self.training.keys():
                self._snapshots.pop(number, None)
            self.undecided.clear()

    def advance(self) -> list[int]:
        """Train the trials that have done the fewest steps until the first has done all of its
        own; returns those that have done so, or diverged, with their values in ``found``."""
        if all(map(self._has_more, self.training)):
            now = min(map(self._steps_of, self.training))
            group = [number for number in self.training if self._steps_of(number) == now]
            until = min(self.training[number].num_steps for number in group)
            for pack in self._packs(group):
                self._train(pack, now, until)
        done = sorted(number for number in self.training if not self._has_more(number))
        for number in done:
            del self.training[number]
        self.undecided.update(done)
        return done

    def close(self) -> None:
        """Close the array that is open; what it holds is dropped."""
        if self._open is not None:
            self._open.array.close()
            self._open = None

    def _steps_of(self, number: int) -> int:
        return self.found[number].num_steps if number in self.found else 0

    def _has_more(self, number: int) -> bool:
        is_short = self._steps_of(number) < self.training[number].num_steps
        return is_short and number not in self.diverged

    def _packs(self, numbers: Sequence[int]) -> list[list[int]]:
        """Groups of trials with models alike, each for one array, as few as possible.

        Models are compared by their repr and the shapes of their tensors. Where that misses a
        difference, the array computes the differing ops model by model. What the open array has is
        a group of its own, the first, if there are no more groups by that.
        """
        alike: dict[Hashable, list[int]] = {}
        for number in numbers:
            alike.setdefault(self._kinds[number], []).append(number)
        packs: list[list[int]] = []
        for members in alike.values():
            held = [number for number in members if self._is_open_with([number])]
            rest = [number for number in members if number not in held]
            if held and 1 + self._num_arrays(rest) <= self._num_arrays(members):
                packs.insert(0, held)
                members = rest
            packs += [
                members[start : start + self.array_size]
                for start in range(0, len(members), self.array_size)
            ]
        return packs

    def _num_arrays(self, members: Sequence[int]) -> int:
        return -(-len(members) // self.array_size)

    def _is_open_with(self, pack: Collection[int]) -> bool:
        return self._open is not None and self._open.places.keys() >= set(pack)

    def _train(self, pack: Sequence[int], now: int, until: int) -> None:
        opened = self._opened(pack)
        furthest = max(self.training[number].num_steps for number in pack)
        losses: dict[int, float] = {}
        for step in range(now, until):
            going = [number for number in pack if number not in self.diverged]
            if not going:
                break
            if self._is_too_large(opened, len(going), until - step, furthest - step):
                opened = self._opened(going, anew=True)
            losses.update(self._step(opened, going, step))
        for number in pack:
            if number not in self.diverged:
                value = losses.get(number, math.inf)
                if self.evaluate is not None and self.training[number].num_steps == until:
                    value = float(self.evaluate(opened.array.model(opened.places[number])))
                self._note(number, until, math.inf if math.isnan(value) else value)

    def _step(self, opened: Occupied, going: Sequence[int], step: int) -> dict[int, float]:
        """The losses of the trials of a step; those that diverge have none."""
        array, batch, begun_s = opened.array, self.batch_of(step), time.perf_counter()
        skipped = list(array.num_skipped_steps)
        is_named = isinstance(batch, Mapping)
        losses = (array.train_step(**batch) if is_named else array.train_step(*batch)).tolist()
        opened.note_step(time.perf_counter() - begun_s, len(going))
        found = {}
        for number in going:
            place = opened.places[number]
            if array.num_skipped_steps[place] > skipped[place]:
                self.diverged.add(number)
                self._note(number, step, math.inf)
            else:
                found[number] = losses[place]
        return found

    def _note(self, number: int, num_steps: int, value: float) -> None:
        self.found[number] = Trial(
            number=number, configuration=self.training[number].configuration, num_steps=num_steps,
            value=value,
        )  # fmt: skip

    # --- arrays -----------------------------------------------------------------------------

    @staticmethod
    def _is_too_large(opened: Occupied, num_training: int, *num_steps: int) -> bool:
        """As `Occupied.is_too_large`; the same on all ranks, whose clocks differ."""
        if num_training == opened.num_places:
            return False
        return from_first_rank(
            lambda: opened.is_too_large(num_training, *num_steps), "the choice of an array"
        )

    def _opened(self, pack: Sequence[int], *, anew: bool = False) -> Occupied:
        """An array that has the trials of a pack: the open one if it does, unless ``anew``."""
        if self._open is not None and not anew and self._is_open_with(pack):
            self._keep(self._open.places.keys() - set(pack))
            return self._open
        if self._open is not None:
            self._keep(self._open.places.keys())
            self.close()
        self._open = self._compiled(pack)
        return self._open

    def _keep(self, numbers: Iterable[int]) -> None:
        """Free the places of trials in the open array, with snapshots of those that may go on."""
        assert self._open is not None
        freed = {number: self._open.places.pop(number) for number in [*numbers]}
        wanted = (self.training.keys() | self.undecided) - self.diverged
        places = {place: number for number, place in freed.items() if number in wanted}
        if places:
            for place, snapshot in self._open.array.snapshots(sorted(places)).items():
                self._snapshots[places[place]] = snapshot

    def _compiled(self, pack: Sequence[int]) -> Occupied:
        begun_s = time.perf_counter()
        candidates = [
            self._new.pop(number)
            if number in self._new
            else _made(self.make, self.training[number].configuration)
            for number in pack
        ]
        array = self.compile(
            [c.model for c in candidates],
            optimizer=[c.optimizer for c in candidates],
            lr_scheduler=[c.lr_scheduler for c in candidates],
            max_grad_norm=[c.max_grad_norm for c in candidates],
            seed=[c.seed for c in candidates],
            nonfinite="skip",
        )
        places = {number: place for place, number in enumerate(pack)}
        known = {
            place: self._snapshots.pop(n) for n, place in places.items() if n in self._snapshots
        }
        if known:
            array.restore(known)
        compile_s = time.perf_counter() - begun_s
        return Occupied(array=array, places=places, num_places=len(pack), compile_s=compile_s)


def _kind(model: nn.Module) -> Hashable:
    """Equal for models that share an array."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return repr(model), tuple((name, tuple(tensor.shape)) for name, tensor in tensors)


def _made(make: Callable[[Configuration], Candidate], configuration: Configuration) -> Candidate:
    candidate = make(configuration)
    if not isinstance(candidate, Candidate):
        raise InputError(
            f"make({dict(configuration)}) returned a {type(candidate).__name__}; return an "
            "autopar.fusion.Candidate(model=..., optimizer=functools.partial(torch.optim.SGD, "
            "lr=...))"
        )
    return candidate
