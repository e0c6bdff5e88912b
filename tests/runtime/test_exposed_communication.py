"""Waits in collectives: noted where they are, and part of the phases of measured steps."""

from __future__ import annotations

import functools
import itertools
import socket
import threading
from typing import Any

import pytest
import torch

import autopar
from autopar.comm.timed import TimedCollectives, Waits
from autopar.comm.transports.sockets import SocketCollectives
from autopar.runtime.profile import Profile
from autopar.runtime.step.timing import RankTimes
from tests.models.zoo import build

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


def test_a_wait_lasts_until_the_last_rank_has_come() -> None:
    """By a clock that moves on only between the two ranks."""
    here, there = socket.socketpair()
    now, has_begun = [3], threading.Event()

    def moment() -> int:
        has_begun.set()
        return now[0]

    waits = Waits()
    waits.moment = moment
    first = TimedCollectives(SocketCollectives([None, here], index=0), waits)
    second = SocketCollectives([there, None], index=1)
    found = torch.ones(4)
    thread = threading.Thread(target=lambda: first.all_reduce(found)())
    thread.start()
    assert has_begun.wait(60)
    now[0] = 10
    second.all_reduce(torch.full((4,), 2.0))
    thread.join(60)
    assert found.tolist() == [3.0] * 4
    assert waits.spans == [(3, 10)]
    here.close()
    there.close()


def test_nothing_is_noted_unless_somebody_measures() -> None:
    waits = Waits()
    assert waits.noting(divmod, 7, 4) == (1, 3)
    assert waits.spans == []
    waits.moment = functools.partial(next, itertools.count())
    assert waits.noting(divmod, 7, 4) == (1, 3)
    assert waits.noting(int, "ff", base=16) == 255
    assert waits.spans == [(0, 1), (2, 3)]


def inside(times: RankTimes) -> list[float]:
    """The seconds of the waits that are within each action, by their times."""
    return [
        sum(b - a for a, b in times.waits if action.start_s <= a and b <= action.end_s)
        for action in times.actions
    ]


def test_waits_of_actions_are_those_within_their_times(profiled: tuple[Any, Profile]) -> None:
    """Which the runtime does not compare: it counts waits in the order of issue."""
    compiled, profile = profiled
    for times, phases in zip(profile.times, profile.ranks, strict=True):
        assert times.waits
        for (_, end_s), (start_s, _) in itertools.pairwise(times.waits):
            assert end_s <= start_s  # one thread waits for one collective at a time
        found = [each.communication_s for each in times.actions]
        assert found == pytest.approx(inside(times), abs=1e-9)
        assert phases.communication_s == sum(b - a for a, b in times.waits) > 0
        computed = {"F": phases.forward_s, "IWB": phases.backward_s}
        for kinds, time_s in computed.items():
            spent = [
                each.end_s - each.start_s - waited_s
                for each, waited_s in zip(times.actions, inside(times))
                if each.action.kind.value in kinds
            ]
            assert time_s == pytest.approx(sum(spent), abs=1e-9)
    rows = {row[0]: row[1:] for row in profile._phase_section().rows}
    shown = dict(zip(("predicted", "rank 0", "rank 1"), rows["exposed communication"]))
    seconds = autopar.base.units.format_seconds
    assert shown["predicted"] == seconds(compiled.plan.prediction.communication_s)
    assert shown["rank 1"] == seconds(profile.ranks[1].communication_s)


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {"devices": 1},
    "clipped by a pass of its own": {
        "devices": 2, "max_grad_norm": 0.5,
        "update": autopar.Update(clipping="second_pass"),
        "constraints": autopar.Force("data_parallel"),
    },
    "scheduled reductions of replicas": {
        "devices": 2, "schedule": "chimera", "num_stages": 2, "num_microbatches": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_phases_and_passes_are_consistent(name: str) -> None:
    """The phases of a rank make up its step, and the ops of a pass are within it."""
    options = dict(OPTIONS[name])
    model, make_batch = build("gpt2")
    with autopar.compile(
        model, options.pop("devices"), make_batch(0), optimizer=ADAM, profile_limit_s=0.0, **options
    ) as compiled:
        profile = compiled.profile(num_steps=2, **make_batch(1))
        num_passes = compiled.plan.update.update.num_passes
    assert num_passes == 1 + (name == "clipped by a pass of its own")
    for times, rank in zip(profile.times, profile.ranks, strict=True):
        assert bool(times.waits) == (name != "alone")
        forward = [a for a in times.actions if a.action.kind.value == "F"]
        assert len(forward) % num_passes == 0
        parts = (
            rank.forward_s, rank.backward_s, rank.communication_s, rank.messages_s,
            rank.waiting_s, rank.rest_s,
        )  # fmt: skip
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(profile.step_time_s, rel=1e-6)
    assert len(profile.passes) == 2 * profile.plan.schedule.num_devices
    for each in profile.passes:
        assert each.ops_s > 0
        assert min(each.between_s, each.outside_s) >= 0
        assert each.ops_s + each.between_s <= each.measured_s
    assert ("exposed communication" in str(profile)) == (name != "alone")
