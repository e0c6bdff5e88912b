"""The shares of the time limit: what is left out once one is used up, and what comes first."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Cluster, MemoryBudget
from autopar.frontend.capture import capture
from autopar.planning.combinations import Combinations
from autopar.planning.deadline import Deadline
from autopar.planning.planner import make_planned, make_setting
from autopar.planning.ranking import rank
from autopar.planning.recompute_request import Recompute, Request
from autopar.planning.schedule_search import MAX_FEWEST_MESHES, Search
from autopar.planning.setting import LEAST_OPENED_SHARE, LEAST_WITHOUT_PLAN, Setting
from autopar.planning.sharding_search import search_meshes, search_within
from autopar.planning.space import Space
from tests.models.zoo import build

OVER = Deadline(-math.inf, 0.0)
NODES = Cluster.preset("v100", nodes=4, devices_per_node=4)


class Deep(nn.Module):
    """Layers whose activations take most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def setting_of(space: Space, **options: Any) -> Setting:
    with torch.device("meta"):
        captured = capture(Deep(), (torch.empty(64, 1024, 256),))
    return make_setting(captured, NODES, space, **options)


def test_meshes_without_time_are_left_out_first_those_least_like_a_node() -> None:
    setting = setting_of(Space())
    cut, meshes = setting.prepared.cut(1), setting.space.meshes(NODES)
    assert [mesh.axis_sizes for mesh in meshes] == [(16,), (2, 8), (4, 4), (8, 2)]
    found = search_meshes(setting, cut, meshes, OVER)
    assert {candidate.mesh.axis_sizes for candidate in found} == {(16,)}
    searched: list[str] = []
    shown = replace(setting, progress=_Shown(searched))
    found = search_meshes(shown, cut, meshes)
    assert searched[1] == "search on mesh x=4 x y=4"
    assert list(dict.fromkeys(candidate.mesh for candidate in found)) == list(meshes)
    within = search_within(setting, found, 1e12, deadline=OVER)
    assert len(within) == 1
    assert len(search_within(setting, found, 1e12)) == len(meshes)


def test_meshes_are_left_out_sooner_if_nothing_fits_as_it_is() -> None:
    """Five sixths of the time are over: what is found is a plan in the first setting alone."""
    late = Deadline(time.process_time() + 100.0, 600.0)
    roomy = setting_of(Space())
    tight = setting_of(Space(), constraints=MemoryBudget(1 << 20))
    for setting, num_meshes in ((roomy, 4), (tight, 1)):
        found = search_meshes(setting, setting.prepared.cut(1), setting.space.meshes(NODES), late)
        assert len({each.mesh for each in found}) == num_meshes


class _Shown:
    """A log of what is done alone."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __call__(self, doing: str) -> None:
        self.lines.append(doing)

    def found(self, step_s: float) -> None:
        """Nothing is kept."""


def test_a_combination_without_time_has_one_schedule_simulated() -> None:
    model, make_batch = build("gpt2")
    two = Cluster.preset("a100-80", nodes=1, devices_per_node=2)
    setting = make_setting(
        capture(model, make_batch(0)), two, Space(is_open=True, num_stages=2, num_microbatches=4)
    )
    every = Search(setting).run()
    one = Search(setting)
    one.setting = _WithoutTurns(setting)
    one.run()
    simulated = [
        {name for name in search.times_s if not name.startswith("searched")}
        for search in (one, every)
    ]
    assert len(simulated[0]) == 1 < len(simulated[1])
    assert any("not simulated: the combination reached" in why for why in one.reasons.values())


class _WithoutTurns:
    """A setting whose combinations have no time after their first schedule."""

    combination_limit_s = -1.0

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._setting, name)


def test_the_fewest_micro_batches_that_are_estimated_to_fit_are_searched_first() -> None:
    """Where the whole batch does not fit: a plan to beat, whatever is guessed of pipelines."""
    none = Recompute(request=Request.NONE)
    whole = Search(setting_of(Space(recompute=none))).run()
    budget = MemoryBudget(int(0.4 * whole.options[0].estimated_bytes))
    setting = setting_of(Space(is_open=True, recompute=none), constraints=budget)
    search = Search(setting, whole=whole.unrestricted[1, 1])
    search.combinations = Combinations(setting)
    done = search._fewest_microbatches(list(search.combinations.all()))
    fastest = [each.mesh for each in sorted(whole.unrestricted[1, 1], key=rank)]
    assert {each.mesh for each in done} == set(list(dict.fromkeys(fastest))[:MAX_FEWEST_MESHES])
    counts = sorted({each.num_microbatches for each in done})
    assert counts == [2, 4, 8, 16][: len(counts)]
    fitting = [option for option in search.options if search.pricing.fits(option)]
    fewest = min(option.combination.num_microbatches for option in fitting)
    assert fewest == counts[-2]  # and twice as many are no faster


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_a_whole_batch_that_has_had_its_time_is_tried_again_where_nothing_else_fits(
    limit_s: float,
) -> None:
    """One sample cannot be cut, so there are no micro-batches to search instead."""
    with torch.device("meta"):
        layers = [
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)
        ]
        captured = capture(
            nn.Sequential(*layers), (torch.empty(1, 4096, 256), torch.empty(1, 4096, 256)),
            loss_fn=nn.functional.mse_loss,
        )  # fmt: skip
    one = Cluster.preset("a100-80", nodes=1, devices_per_node=1)
    free = make_planned(captured, one).plan
    budget = MemoryBudget(int(0.7 * sum(free.prediction.memory_bytes.values())))
    space = Space(offload=False)
    found = make_planned(captured, one, space, constraints=budget, time_limit_s=limit_s).plan
    assert found.recomputation
    assert sum(found.prediction.memory_bytes.values()) <= budget.size_bytes


def test_a_search_goes_on_with_what_there_was_no_time_for() -> None:
    setting = setting_of(Space(is_open=True))
    every, cut = Search(setting).run(), Search(setting)
    cut.deadline = cut.turn = OVER
    cut.run()
    assert cut.late
    assert len(cut.options) < len(every.options)
    best_s, num_known = cut.best_s, len(cut.options)
    promising = {str(each) for each in cut.promising(best_s)}
    found = cut.resume(100.0, best_s)
    assert not cut.late
    untried = {name for name, why in cut.reasons.items() if "not tried" in why}
    assert promising
    assert untried
    assert not promising & untried
    assert all(option.time_s < best_s for option in found)
    assert {*map(id, found)} <= {*map(id, cut.options[num_known:])}
    assert cut.best_s == pytest.approx(every.best_s)
    assert not cut.resume(100.0, best_s)


def test_a_plan_uses_the_time_that_its_first_search_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first option alone is a third slower."""
    prepared, space = setting_of(Space()).prepared, Space(is_open=True, schedule="1f1b")
    free = make_planned(prepared, NODES, space).plan
    monkeypatch.setattr("autopar.planning.setting.SEARCH_SHARE", 0.0)
    found = make_planned(prepared, NODES, space).plan
    assert found.prediction.step_time_s == pytest.approx(free.prediction.step_time_s, rel=1e-3)


def test_a_search_shares_what_is_left_of_the_time() -> None:
    space = Space(is_open=True)
    setting = setting_of(Space(), time_limit_s=1000.0)
    late = replace(setting, begun_s=setting.begun_s - 400.0)
    without = late.opened(space, has_plan=False)
    assert without.search_limit_s == pytest.approx(LEAST_WITHOUT_PLAN * late.search_limit_s)
    shared = late.opened(space, has_plan=True)
    assert shared.search_limit_s == pytest.approx(0.6 * late.search_limit_s, rel=0.05)
    assert shared.end.at_s == pytest.approx(late.end.at_s, abs=1.0)
    spent = replace(setting, begun_s=setting.begun_s - 2000.0)
    least = spent.opened(space, has_plan=True)
    assert least.search_limit_s == pytest.approx(LEAST_OPENED_SHARE * spent.search_limit_s)
