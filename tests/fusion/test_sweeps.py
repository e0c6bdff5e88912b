"""Sweeps train each trial as alone, whoever searches: random search, Hyperband, or Optuna."""

from __future__ import annotations

import functools
import math
from collections import Counter
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
from autopar.fusion.sweeps import Occupied
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
        assert nonfinite == "skip"
        self.sizes.append(len(models))
        return array_of(
            self.groups, models, BATCHES[0], loss_fn=F.cross_entropy,
            nonfinite=NonFinite.SKIP, **own,
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
    searcher, rounds = Hyperband(SPACE, max_steps=81), []
    bracket_of: dict[int, int] = {}
    while requests := searcher.ask():
        if not rounds:
            starts = [1, 3, 9, 27, 81]
            bracket_of = {r.number: starts.index(r.num_steps) for r in requests}
        rungs = Counter((bracket_of[r.number], r.num_steps) for r in requests)
        rounds.append([(num, steps) for (_, steps), num in sorted(rungs.items())])
        for request in requests:
            searcher.tell(request.number, float(request.number))
    assert rounds == [
        [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)],
        [(27, 3), (11, 9), (5, 27), (2, 81)],
        [(9, 9), (3, 27), (1, 81)],
        [(3, 27), (1, 81)],
        [(1, 81)],
    ]


def test_hyperband_goes_on_with_each_bracket_that_has_its_values() -> None:
    searcher = Hyperband(SPACE, max_steps=9)
    first = searcher.ask()
    for request in first:
        if request.num_steps == 3:
            searcher.tell(request.number, 1.0)
    assert [r.num_steps for r in searcher.ask()] == [9]
    searcher.tell(first[0].number, 1.0)
    assert searcher.ask() == []  # eight others of its rung are training
    with pytest.raises(InputError, match="have no value yet"):
        searcher.ask()
    with pytest.raises(InputError, match="trial 99 is not training"):
        searcher.tell(99, 1.0)


@pytest.mark.parametrize("moves", [False, True])
def test_hyperband_goes_on_with_the_best_where_they_stopped(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """Whether the others of an array stay, or move to one of their own as soon as they can."""
    monkeypatch.setattr(Occupied, "is_too_large", lambda *_: moves)
    fixed = {**SPACE, "width": Choice([16])}
    searcher, compiled = Hyperband(fixed, max_steps=9), Compile(groups)
    trials = sweep(candidate, searcher, batch_of, compiled)
    assert compiled.sizes == ([17, 11, 5] if moves else [17])
    for trial in trials:
        assert trial.value == pytest.approx(alone(trial.configuration, trial.num_steps), rel=1e-9)
    first = [t for t in trials if t.number < 9]
    assert len(trials) == 9 + 5 + 3
    assert sorted(t.num_steps for t in first) == [1] * 6 + [3] * 2 + [9]
    after_one = {t.number: alone(t.configuration, 1) for t in first}
    best = sorted(after_one, key=lambda number: after_one[number])[:3]
    assert sorted(best) == sorted(t.number for t in first if t.num_steps > 1)


def test_trials_that_do_not_fit_one_array_go_on_in_the_open_one(groups: Groups) -> None:
    fixed = {**SPACE, "width": Choice([16])}
    compiled = Compile(groups)
    trials = sweep(candidate, Hyperband(fixed, max_steps=9), batch_of, compiled, array_size=10)
    assert compiled.sizes == [10, 7, 4, 5]  # after a step 11 go on, 7 of them where they are
    for trial in trials:
        assert trial.value == pytest.approx(alone(trial.configuration, trial.num_steps), rel=1e-9)


def test_trials_move_when_idle_places_cost_more_than_compiling() -> None:
    opened = Occupied(array=None, places={}, num_places=4, compile_s=10.0)  # type: ignore[arg-type]
    opened.note_step(3.0, 4)
    opened.note_step(2.0, 4)
    assert opened.idle_s == 0
    assert not opened.is_too_large(4, 1000, 1000)
    assert not opened.is_too_large(2, 10, 1000)  # 10 steps of 2 s with half of the places idle
    assert opened.is_too_large(2, 11, 11)
    for _ in range(11):
        opened.note_step(2.0, 2)
    assert opened.idle_s == 11
    assert opened.is_too_large(2, 1, 11)
    assert not opened.is_too_large(2, 1, 9)  # too few steps are left


class Waiting:
    """A searcher that waits for all trials of a round, some of which have more steps to do."""

    def __init__(self, rounds: Sequence[Sequence[Request]]) -> None:
        self.rounds = [list(each) for each in rounds]
        self.training: set[int] = set()
        self.told: list[int] = []

    def ask(self) -> Sequence[Request]:
        if self.training or not self.rounds:
            return []
        requests = self.rounds.pop(0)
        self.training = {request.number for request in requests}
        return requests

    def tell(self, number: int, value: float) -> None:
        self.training.remove(number)
        self.told.append(number)


def request(number: int, num_steps: int) -> Request:
    configuration = {"lr": 0.01 * (number + 1), "width": 16, "seed": number}
    return Request(number=number, configuration=configuration, num_steps=num_steps)


def test_a_trial_that_waits_for_others_goes_on_where_it_stopped(groups: Groups) -> None:
    searcher = Waiting(
        [[request(0, 1), request(1, 4), request(2, 2)], [request(0, 5), request(2, 5)]]
    )
    trials = sweep(candidate, searcher, batch_of, Compile(groups))
    assert searcher.told == [0, 2, 1, 0, 2]
    assert {t.number: t.num_steps for t in trials} == {0: 5, 1: 4, 2: 5}
    for trial in trials:
        assert trial.value == pytest.approx(alone(trial.configuration, trial.num_steps), rel=1e-9)


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        (
            [[request(0, 1), request(1, 1)], [request(0, 2)], [request(1, 2)]],
            "1, which is finished",
        ),
        ([[request(0, 1)], [request(1, 2), request(1, 3)]], "1, which is training"),
    ],
)
def test_a_searcher_that_asks_for_what_cannot_train_is_refused(
    groups: Groups, rounds: Sequence[Sequence[Request]], message: str
) -> None:
    with pytest.raises(InputError, match=f"the searcher asks for trial {message}"):
        sweep(candidate, Waiting(rounds), batch_of, Compile(groups))


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
