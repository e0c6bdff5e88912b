"""Which configurations a sweep trains, and for how long: random search and Hyperband.

A searcher is asked for a round of trials and told the value of each; it needs no knowledge of how
they are trained. Anything with `Searcher`'s two methods will do, another library's sampler too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from autopar.base.errors import InputError

Configuration: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """A number between ``low`` and ``high``; with ``log``, its logarithm is uniform."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.high or (self.log and self.low <= 0):
            raise InputError(
                f"Uniform(low={self.low}, high={self.high}, log={self.log}): low must be at most "
                "high, and above 0 with log=True"
            )

    def draw(self, generator: random.Random) -> float:
        if self.log:
            return math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return generator.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """A whole number from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise InputError(
                f"Integers(low={self.low}, high={self.high}): low must be at most high"
            )

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        if not self.values:
            raise InputError("Choice([]) has nothing to choose from; give at least one value")

    def draw(self, generator: random.Random) -> Any:
        return generator.choice(list(self.values))


Space: TypeAlias = Mapping[str, Uniform | Integers | Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Train trial ``number``, of this configuration, until it has made ``num_steps`` in all."""

    number: int
    configuration: Configuration
    num_steps: int


class Searcher(Protocol):
    """Rounds of trials. A trial that a round lacks is over."""

    def ask(self) -> Sequence[Request]:
        """The next round, trials that go on and new ones; nothing when the search is over."""
        ...

    def tell(self, number: int, value: float) -> None:
        """The value of a trial of this round: the less the better."""
        ...


def drawn(space: Space, generator: random.Random) -> dict[str, Any]:
    """One configuration at random."""
    return {name: distribution.draw(generator) for name, distribution in space.items()}


class RandomSearch:
    """So many configurations at random, each trained for as many steps."""

    def __init__(self, space: Space, *, num_trials: int, num_steps: int, seed: int = 0) -> None:
        _check_counts(num_trials=num_trials, num_steps=num_steps)
        generator = random.Random(seed)
        self._rounds = [
            [
                Request(number=n, configuration=drawn(space, generator), num_steps=num_steps)
                for n in range(num_trials)
            ]
        ]

    def ask(self) -> Sequence[Request]:
        return self._rounds.pop() if self._rounds else []

    def tell(self, number: int, value: float) -> None:
        """Random search learns nothing."""


@dataclass(slots=True)
class _Bracket:
    """Successive halving: trials of one start, and the rungs that the best of them climb."""

    trials: list[Request]
    rungs: list[int]
    values: dict[int, float] = field(default_factory=dict)


class Hyperband:
    """Hyperband (Li et al., JMLR 2018, algorithm 1): brackets of successive halving.

    Bracket ``s``, of ``s_max`` down to 0, starts ``n = ceil((s_max + 1) eta**s / (s + 1))``
    configurations with ``max_steps / eta**s`` steps each; of each rung the best ``1 / eta`` go on
    with ``eta`` times as many.
    """

    def __init__(self, space: Space, *, max_steps: int, eta: int = 3, seed: int = 0) -> None:
        _check_counts(max_steps=max_steps)
        if eta < 2:
            raise InputError(f"eta is {eta}; it must be at least 2, such as eta=3")
        self._eta = eta
        generator = random.Random(seed)
        most = 0
        while eta ** (most + 1) <= max_steps:
            most += 1
        numbers = iter(range(10**9))
        self._brackets = []
        for s in range(most, -1, -1):
            count = -(-(most + 1) * eta**s // (s + 1))
            rungs = [max_steps // eta ** (s - i) for i in range(s + 1)]
            trials = [
                Request(
                    number=next(numbers), configuration=drawn(space, generator), num_steps=rungs[0]
                )
                for _ in range(count)
            ]
            self._brackets.append(_Bracket(trials, rungs))
        self._current: _Bracket | None = None

    def ask(self) -> Sequence[Request]:
        current = self._current
        if current is not None and len(current.rungs) > 1:
            missing = [t.number for t in current.trials if t.number not in current.values]
            if missing:
                raise InputError(
                    f"trials {missing} of the round have no value yet; tell(number, value) all of "
                    "them before the next ask()"
                )
            kept = len(current.trials) // self._eta
            current.rungs.pop(0)
            best = sorted(current.trials, key=lambda t: current.values[t.number])[:kept]
            current.trials = [
                Request(number=t.number, configuration=t.configuration, num_steps=current.rungs[0])
                for t in sorted(best, key=lambda t: t.number)
            ]
            current.values = {}
            if current.trials:
                return list(current.trials)
        self._current = self._brackets.pop(0) if self._brackets else None
        return [] if self._current is None else list(self._current.trials)

    def tell(self, number: int, value: float) -> None:
        if self._current is None or number not in {t.number for t in self._current.trials}:
            raise InputError(f"trial {number} is not in this round; tell what ask() has asked for")
        self._current.values[number] = math.inf if math.isnan(value) else value


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} is {count!r}; it must be a whole number, at least 1")
