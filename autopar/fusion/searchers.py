"""Searchers: which configurations a sweep trains, and for how many steps.

A searcher is asked for trials and told the value of each; it does not know how they are trained.
Any object with the two methods of `Searcher` works, so samplers of other libraries can be wrapped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from autopar.base.errors import InputError

Configuration: TypeAlias = Mapping[str, Any]
"""The value of each hyperparameter by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """A float drawn uniformly from [``low``, ``high``]; log-uniformly with ``log=True``.

    Raises InputError where ``low`` exceeds ``high``, or is not positive with ``log=True``.
    """

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
        """One number between both bounds, or as likely in each decade if ``log``."""
        if self.log:
            return math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return generator.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """An integer drawn uniformly from ``low`` to ``high``, both included.

    Raises InputError where ``low`` exceeds ``high``.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise InputError(
                f"Integers(low={self.low}, high={self.high}): low must be at most high"
            )

    def draw(self, generator: random.Random) -> int:
        """One whole number between both bounds, each as likely as the others."""
        return generator.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ``values``, all equally likely. Raises InputError for no values."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        if not self.values:
            raise InputError("Choice([]) has nothing to choose from; give at least one value")

    def draw(self, generator: random.Random) -> Any:
        """One of the values, each as likely as the others."""
        return generator.choice(list(self.values))


Space: TypeAlias = Mapping[str, Uniform | Integers | Choice]
"""The distribution of each hyperparameter by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to train trial ``number`` until it has done ``num_steps`` steps in total."""

    number: int
    configuration: Configuration
    num_steps: int


class Searcher(Protocol):
    """A source of trials, which learns their values."""

    def ask(self) -> Sequence[Request]:
        """The trials to train besides those that are training: new ones, and some that go on.

        It is called at first, and whenever trials have been told a value. It returns none until
        more values are told, or when the search is over. A trial that has a value is finished if
        the next answer that is not empty leaves it out.
        """
        ...

    def tell(self, number: int, value: float) -> None:
        """Report the value of a trial that has done its steps, or diverged; lower is better."""
        ...


def drawn(space: Space, generator: random.Random) -> dict[str, Any]:
    """One random configuration; raises InputError for what is no distribution."""
    for name, distribution in space.items():
        if not hasattr(distribution, "draw"):
            raise InputError(
                f"the space has {name!r}: {distribution!r}, which is no distribution; write "
                "Choice([...]), Integers(low=..., high=...) or Uniform(low=..., high=...)"
            )
    return {name: distribution.draw(generator) for name, distribution in space.items()}


class RandomSearch:
    """Random search: ``num_trials`` random configurations, each trained for ``num_steps`` steps.

    ``seed`` fixes the configurations. Raises InputError for counts below 1.
    """

    def __init__(self, space: Space, *, num_trials: int, num_steps: int, seed: int = 0) -> None:
        check_counts(num_trials=num_trials, num_steps=num_steps)
        generator = random.Random(seed)
        self._rounds = [
            [
                Request(number=n, configuration=drawn(space, generator), num_steps=num_steps)
                for n in range(num_trials)
            ]
        ]

    def ask(self) -> Sequence[Request]:
        """All trials in the first round, then none."""
        return self._rounds.pop() if self._rounds else []

    def tell(self, number: int, value: float) -> None:
        """Ignore the value: random search does not adapt."""


@dataclass(slots=True)
class _Bracket:
    """One run of successive halving: its surviving trials, and the steps of each remaining rung."""

    trials: list[Request]
    rungs: list[int]
    values: dict[int, float] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """The trials that have no value yet."""
        return [trial.number for trial in self.trials if trial.number not in self.values]

    def begin_next(self, eta: int) -> None:
        """Begin the next rung, of the best ``1 / eta`` of the trials; none after the last."""
        self.rungs.pop(0)
        num_kept = len(self.trials) // eta if self.rungs else 0
        best = sorted(self.trials, key=lambda t: self.values[t.number])[:num_kept]
        self.trials = [
            Request(number=t.number, configuration=t.configuration, num_steps=self.rungs[0])
            for t in sorted(best, key=lambda t: t.number)
        ]
        self.values = {}


class Hyperband:
    """Hyperband (Li et al., JMLR 2018, algorithm 1): brackets of successive halving.

    Bracket ``s``, from ``s_max`` down to 0, starts ``n = ceil((s_max + 1) eta**s / (s + 1))``
    configurations with ``max_steps / eta**s`` steps each; from each rung the best ``1 / eta``
    continue with ``eta`` times as many steps. Brackets depend on each other in nothing and begin
    together, so that their trials share arrays. A value of NaN ranks last.

    Raises InputError for ``max_steps`` below 1 or ``eta`` below 2.
    """

    def __init__(self, space: Space, *, max_steps: int, eta: int = 3, seed: int = 0) -> None:
        check_counts(max_steps=max_steps)
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
        self._has_begun = self._is_told = False

    def ask(self) -> Sequence[Request]:
        """At first the first rung of every bracket, then the next rung of those whose trials all
        have values; empty until more are told, and after the last rungs.

        Raises InputError if values are missing, and none was told since the last answer.
        """
        if not self._has_begun:
            self._has_begun = True
            return [trial for bracket in self._brackets for trial in bracket.trials]
        missing = [number for bracket in self._brackets for number in bracket.missing()]
        if missing and not self._is_told:
            raise InputError(
                f"trials {missing} have no value yet; tell(number, value) those that have done "
                "their steps before the next ask()"
            )
        self._is_told = False
        ready = [bracket for bracket in self._brackets if not bracket.missing()]
        for bracket in ready:
            bracket.begin_next(self._eta)
        self._brackets = [bracket for bracket in self._brackets if bracket.trials]
        return [trial for bracket in ready for trial in bracket.trials]

    def tell(self, number: int, value: float) -> None:
        """Report the value of a trial; raises InputError for one that is not training."""
        for bracket in self._brackets:
            if number in {trial.number for trial in bracket.trials}:
                bracket.values[number] = math.inf if math.isnan(value) else value
                self._is_told = True
                return
        raise InputError(
            f"trial {number} is not training; tell() takes the trials that ask() returned"
        )


def check_counts(**counts: int) -> None:
    """Raise InputError for a count, by its name, that is no whole number from 1 on."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} is {count!r}; it must be a whole number, at least 1")
