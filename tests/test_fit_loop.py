"""The budget loop's order: a plan that is found is never lost, nor exchanged for a slower one."""

from __future__ import annotations

import heapq
import math
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.base.errors import ConstraintError, PlanError
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.fit import MAX_LATE, Fit

OVER = Deadline(-math.inf, 0.0)


def option_of(time_s: float, estimated_bytes: float, movement: str | None = None) -> Any:
    return SimpleNamespace(
        time_s=time_s, estimated_bytes=estimated_bytes, estimate_key="", is_settled=True, trial=1,
        is_decided=False, is_counted_to_fit=None, movement=movement,
    )  # fmt: skip


def push(fit: Any, option: Any, *, fits: bool = True) -> None:
    heapq.heappush(fit.heap, (not fits, (option.time_s,), next(fit.numbers), option))


@pytest.fixture
def fit() -> Any:
    """A loop over options that all fit once they are lowered."""
    found: Any = object.__new__(Fit)
    found.heap, found.postponed, found.ratios, found.numbers = [], [], {}, iter(range(99))
    found.cutoff_s = found.decided_s = math.inf
    found.longest_try_s = 0.0
    found.deadline = NEVER
    found.num_late, found.max_late = 0, MAX_LATE
    found.setting = SimpleNamespace(budget_bytes=10.0, end=NEVER)
    found._lowered = lambda option: SimpleNamespace(option=option, movement=option.movement)
    found._or_nearly_too_large = found._or_sharper = lambda fitted: fitted
    found._refuse = lambda option, reason: None
    return found


def test_a_time_limit_amid_a_postponed_search_brings_no_slower_plan(fit: Any) -> None:
    def searched(postponed: Any, found: Any) -> None:
        push(fit, option_of(1.0, 2.0))
        fit.deadline = OVER

    fit._searched, fit.postponed = searched, ["postponed"]
    push(fit, option_of(2.0, 2.0))
    push(fit, option_of(5.0, 1.0), fits=False)
    assert fit.best().option.time_s == 2.0


@pytest.mark.parametrize(
    ("movement", "end", "time_s"), [("moved", NEVER, 4.0), ("moved", OVER, 9.0), (None, NEVER, 9.0)]
)
def test_a_plan_that_moves_tensors_is_held_against_others_that_fit_by_moving(
    movement: str | None, end: Deadline, time_s: float, fit: Any
) -> None:
    fit.setting.end = end
    push(fit, option_of(9.0, 2.0, movement))
    push(fit, option_of(4.0, 9.0, "moved"), fits=False)
    assert fit.best().option.time_s == time_s


def test_an_error_of_a_postponed_search_loses_no_plan(fit: Any) -> None:
    def searched(postponed: Any, found: Any) -> None:
        raise PlanError("it cannot be staged")

    fit._searched, fit.postponed = searched, ["postponed"]
    push(fit, option_of(2.0, 2.0))
    assert fit.best().option.time_s == 2.0


def test_the_fastest_postponed_option_is_searched_first(fit: Any) -> None:
    searched: list[str] = []
    fit._searched = lambda postponed, found: searched.append(postponed)
    fit.postponed = ["fast", "slow"]
    push(fit, option_of(2.0, 2.0))
    fit.best()
    assert searched == ["fast", "slow"]


def test_after_the_time_limit_the_least_postponed_option_is_tried_too(fit: Any) -> None:
    searched: list[float] = []

    def search(postponed: Any, found: Any) -> None:
        searched.append(postponed.option.estimated_bytes)
        push(fit, option_of(3.0, 1.0))

    fit._searched, fit.deadline, fit.num_late = search, OVER, MAX_LATE
    fit.postponed = [SimpleNamespace(option=option_of(1.0, size)) for size in (3.0, 1.0, 2.0)]
    assert fit.best().option.time_s == 3.0
    assert searched == [1.0]


def test_after_the_time_limit_what_is_decided_comes_before_what_is_small(fit: Any) -> None:
    fit.deadline = OVER
    for time_s, estimated_bytes, is_decided in ((2.0, 1.0, False), (4.0, 9.0, True)):
        option = option_of(time_s, estimated_bytes)
        option.is_decided = is_decided
        push(fit, option)
    assert fit.best().option.time_s == 4.0


def test_after_the_time_limit_what_is_counted_to_fit_comes_first(fit: Any) -> None:
    fit.deadline = OVER
    for time_s, is_counted_to_fit in ((2.0, False), (4.0, True), (3.0, None)):
        option = option_of(time_s, 9.0)
        option.is_decided, option.is_counted_to_fit = True, is_counted_to_fit
        push(fit, option, fits=is_counted_to_fit is not False)
    assert fit.best().option.time_s == 4.0


def test_after_the_time_limit_the_fastest_with_room_are_tried_and_at_last_the_smallest(
    fit: Any,
) -> None:
    tried: list[float] = []
    fit._lowered = lambda option: tried.append(option.time_s)
    fit.failure = lambda: ConstraintError("nothing fits")
    fit.deadline = OVER
    sizes = {0.1: 9.0, 0.2: 4.0, 0.3: 3.0, 0.4: 4.5, 0.5: 1.0, 0.6: 2.0}
    for time_s, estimated_bytes in sizes.items():
        push(fit, option_of(time_s, estimated_bytes))
    with pytest.raises(ConstraintError):
        fit.best()
    assert tried == [0.2, 0.3, 0.5]


def test_what_late_options_become_does_not_take_the_try_of_the_smallest(fit: Any) -> None:
    tried: list[float] = []

    def lowered(option: Any) -> None:
        tried.append(option.time_s)
        push(fit, option_of(option.time_s + 0.01, option.estimated_bytes))

    fit._lowered, fit.deadline = lowered, OVER
    fit.failure = lambda: ConstraintError("nothing fits")
    for time_s, estimated_bytes in {0.1: 4.0, 0.2: 4.5, 0.9: 1.0}.items():
        push(fit, option_of(time_s, estimated_bytes))
    with pytest.raises(ConstraintError):
        fit.best()
    assert tried[-1] == 0.9
    assert len(tried) == MAX_LATE


def test_a_loop_with_a_deadline_of_its_own_begins_nothing_after_it(fit: Any) -> None:
    fit.deadline, fit.max_late = OVER, 0
    fit.failure = lambda: ConstraintError("nothing fits")
    push(fit, option_of(2.0, 2.0))
    with pytest.raises(ConstraintError):
        fit.best()


def test_an_option_that_is_decided_after_the_time_limit_is_lowered_at_once(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used up one of the few options that are tried then, and was never lowered."""
    undecided, decided = option_of(2.0, 1.0), option_of(3.0, 1.0)
    undecided.is_decided, undecided.recomputes = False, True
    decided.is_decided, decided.recomputes = True, True
    decided.best = SimpleNamespace(mesh="x=2")
    decided.movement = None
    del fit._lowered
    monkeypatch.setattr("autopar.planning.fit.fullest", lambda memories: memories[0])
    fit.is_open, fit.deadline, fit.max_late = True, OVER, 1
    fit.lowering = SimpleNamespace(
        decided=lambda option, cutoff_s: decided,
        lower=lambda option: ("program", ["memory"], "update"),
        traces_of=lambda candidate: "traces",
    )
    fit.setting = SimpleNamespace(
        progress=lambda doing: None,
        budget_bytes=10.0,
        limit=SimpleNamespace(tightest=lambda memory: (1, 2)),
    )
    fit.known = SimpleNamespace(baselines=lambda option: None)
    fit._note_time = lambda option: None
    fit._fits = lambda option: True
    fit._rival = lambda option, fitted: None
    push(fit, undecided)
    assert fit.best().option is decided


@pytest.mark.parametrize("fits", [False, True])
def test_known_strategies_are_priced_for_a_program_that_fits_alone(
    fit: Any, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """Where an option is not estimated to fit, they were priced before it was counted."""
    asked: list[str] = []
    option = option_of(2.0, 4.0)
    option.trial, option.recomputes, option.movement = 0, False, None
    option.best = SimpleNamespace(mesh="x=2")
    del fit._lowered
    monkeypatch.setattr("autopar.planning.fit.fullest", lambda memories: memories[0])
    monkeypatch.setattr("autopar.planning.fit.format_seconds", str)
    fit.is_open, fit.moves = True, False
    fit.lowering = SimpleNamespace(
        lower=lambda option: ("program", ["memory"], "update"),
        traces_of=lambda candidate: "traces",
    )
    fit.setting = SimpleNamespace(
        progress=lambda doing: asked.append(doing.split(",")[0].split()[0]),
        budget_bytes=2.0,
        limit=SimpleNamespace(tightest=lambda memory: (1, 2) if fits else (4, 2)),
    )
    fit.known = SimpleNamespace(
        baselines=lambda option: asked.append("baselines"),
        fitting=lambda option, found: asked.append("fitting"),
        note_refused=lambda option, within: asked.append(f"refused beyond {within} B"),
    )
    fit._fits = lambda option: False
    fit._push_smaller = lambda option, program: False
    fit._smaller = lambda option, target_bytes, is_smaller: None
    fitted = fit._counted(option)
    assert (fitted is not None) == fits
    if fits:
        assert asked == ["lower", "baselines", "fitting"]
    else:
        assert asked == ["lower", "refused beyond 2.0 B"]  # 4 estimated: needs 4 where 2 are free


def test_a_known_strategy_in_place_of_a_later_option_is_no_slower_than_the_plan(fit: Any) -> None:
    def lowered(option: Any) -> Any:
        chosen = option_of(9.0, 1.0) if option.time_s == 1.0 else option
        return SimpleNamespace(option=chosen, movement=None)

    fit._searched = lambda postponed, found: push(fit, option_of(1.0, 2.0))
    fit._lowered, fit.postponed = lowered, ["postponed"]
    push(fit, option_of(2.0, 2.0))
    assert fit.best().option.time_s == 2.0
