"""Sweeps train each trial as alone, whoever searches: random search, Hyperband, or Optuna."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.fusion import (
    Candidate,
    Choice,
    Hyperband,
    Integers,
    RandomSearch,
    Request,
    Uniform,
    sweep,
)
from autopar.fusion.array import Array
from autopar.fusion.members import Member
from autopar.fusion.searchers import Configuration
from autopar.runtime.step.agreement import NonFinite
from tests.fusion.arrays import Alone, array_of
from tests.fusion.test_array import batches_of, mlp
from tests.runtime.conftest import Groups

SPACE = {
    "lr": Uniform(low=1e-3, high=0.3, log=True),
    "width": Choice([8, 16]),
    "seed": Integers(low=0, high=99),
}
BATCHES = batches_of(9)


def candidate(configuration: Configuration) -> Candidate:
    torch.manual_seed(configuration["seed"])
    return Candidate(
        model=mlp(configuration["width"]),
        optimizer=functools.partial(torch.optim.SGD, lr=configuration["lr"], momentum=0.9),
        seed=0,
    )


class Compile:
    """Arrays on the tests' workers; ``sizes`` are those of all that were made."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.sizes: list[int] = []

    def __call__(self, models: Sequence[nn.Module], *, nonfinite: str, **own: Any) -> Array:
        assert nonfinite == "leave"
        self.sizes.append(len(models))
        return array_of(
            self.groups, models, BATCHES[0], loss_fn=F.cross_entropy,
            nonfinite=NonFinite.SKIP, leaves=True, **own,
        )  # fmt: skip


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    return BATCHES[step % len(BATCHES)]


def alone(configuration: Configuration, num_steps: int) -> float:
    """The loss of the last step of a trial in eager PyTorch."""
    made = candidate(configuration)
    eager = Alone(Member(model=made.model, loss_fn=F.cross_entropy, optimizer=made.optimizer))
    return float([eager.step(batch_of(step)) for step in range(num_steps)][-1])


def test_random_search_gives_every_trial_the_value_it_has_alone(groups: Groups) -> None:
    compiled = Compile(groups)
    searcher = RandomSearch(SPACE, num_trials=7, num_steps=3)
    trials = sweep(candidate, searcher, batch_of, compiled, array_size=4)
    assert sorted(t.number for t in trials) == list(range(7))
    assert [t.value for t in trials] == sorted(t.value for t in trials)
    for trial in trials:
        assert trial.value == pytest.approx(alone(trial.configuration, 3), rel=1e-9)
    widths = [t.configuration["width"] for t in trials]
    expected = [math.ceil(widths.count(w) / 4) for w in set(widths)]
    assert len(compiled.sizes) == sum(expected)
    assert max(compiled.sizes) <= 4


def test_hyperband_asks_for_the_rungs_of_its_paper() -> None:
    searcher, rungs = Hyperband(SPACE, max_steps=81), []
    while requests := searcher.ask():
        rungs.append((len(requests), requests[0].num_steps))
        for request in requests:
            searcher.tell(request.number, float(request.number))
    assert rungs == [
        (81, 1), (27, 3), (9, 9), (3, 27), (1, 81),
        (34, 3), (11, 9), (3, 27), (1, 81),
        (15, 9), (5, 27), (1, 81),
        (8, 27), (2, 81),
        (5, 81),
    ]  # fmt: skip


def test_hyperband_goes_on_with_the_best_where_they_stopped(groups: Groups) -> None:
    fixed = {**SPACE, "width": Choice([16])}
    searcher = Hyperband(fixed, max_steps=9)
    trials = sweep(candidate, searcher, batch_of, Compile(groups))
    for trial in trials:
        assert trial.value == pytest.approx(alone(trial.configuration, trial.num_steps), rel=1e-9)
    first = [t for t in trials if t.number < 9]
    assert sorted(t.num_steps for t in first) == [1] * 6 + [3] * 2 + [9]
    after_one = {t.number: alone(t.configuration, 1) for t in first}
    best = sorted(after_one, key=lambda number: after_one[number])[:3]
    assert sorted(best) == sorted(t.number for t in first if t.num_steps > 1)


def test_a_trial_that_diverges_is_worth_infinity_and_holds_up_no_other(groups: Groups) -> None:
    space = {**SPACE, "width": Choice([16]), "lr": Choice([0.01, 1e200])}
    searcher = RandomSearch(space, num_trials=6, num_steps=4)
    trials = sweep(candidate, searcher, batch_of, Compile(groups))
    rates = {t.configuration["lr"] for t in trials}
    assert rates == {0.01, 1e200}
    for trial in trials:
        if trial.configuration["lr"] == 0.01:
            assert trial.value == pytest.approx(alone(trial.configuration, 4), rel=1e-9)
        else:
            assert trial.value == math.inf


class OptunaSearcher:
    """Optuna's own sampler, some trials a round."""

    def __init__(self, study: Any, *, num_rounds: int, num_trials: int, num_steps: int) -> None:
        self.study, self.num_rounds = study, num_rounds
        self.num_trials, self.num_steps = num_trials, num_steps
        self.trials: dict[int, Any] = {}

    def ask(self) -> list[Request]:
        if self.num_rounds == 0:
            return []
        self.num_rounds -= 1
        requests = []
        for _ in range(self.num_trials):
            trial = self.study.ask()
            self.trials[trial.number] = trial
            configuration = {
                "lr": trial.suggest_float("lr", 1e-3, 0.3, log=True),
                "width": trial.suggest_categorical("width", [8, 16]),
                "seed": trial.suggest_int("seed", 0, 99),
            }
            requests.append(
                Request(number=trial.number, configuration=configuration, num_steps=self.num_steps)
            )
        return requests

    def tell(self, number: int, value: float) -> None:
        self.study.tell(self.trials[number], value)


def test_optuna_drives_a_sweep(groups: Groups) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    searcher = OptunaSearcher(study, num_rounds=2, num_trials=4, num_steps=2)
    trials = sweep(candidate, searcher, batch_of, Compile(groups))
    assert len(study.trials) == len(trials) == 8
    assert study.best_value == trials[0].value
    for told in study.trials:
        assert told.value == pytest.approx(alone(told.params, 2), rel=1e-9)


def test_what_makes_no_sweep_is_refused() -> None:
    with pytest.raises(InputError, match="low must be at most high"):
        Uniform(low=2, high=1)
    with pytest.raises(InputError, match="num_trials is 0"):
        RandomSearch(SPACE, num_trials=0, num_steps=1)
    with pytest.raises(InputError, match="eta is 1"):
        Hyperband(SPACE, max_steps=9, eta=1)
    searcher = Hyperband(SPACE, max_steps=9)
    searcher.ask()
    with pytest.raises(InputError, match="have no value yet"):
        searcher.ask()
