"""Movement plans: text and JSON, the rules that they obey, and their timelines."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from autopar.base.errors import MovementError
from autopar.movement.gaps import gaps_by_tensor, gaps_of, movement_plan, transfer_bytes
from autopar.movement.lifetimes import Lifetime, StepLifetimes, step_of
from autopar.movement.plan import MovementPlan, parse_plan
from autopar.movement.residency import held_bytes
from autopar.movement.simulate import HostLink, simulate
from autopar.movement.verify import verify, worst_case_bytes
from tests.movement.drawn import drawn_step, subsets

UNLIMITED = 10**9


def tensor(name: str, size: int, uses: tuple[int, ...], *, writes=None, persistent=False):
    return Lifetime(
        name=name,
        category="activations",
        size_bytes=size,
        uses=uses,
        writes=uses[:1] if writes is None else writes,
        persistent=persistent,
    )


def chain() -> StepLifetimes:
    """Three layers forward and backward: activations a, b, c and a weight."""
    return step_of(
        6,
        [
            tensor("a", 4, (0, 1, 5)),
            tensor("b", 3, (1, 2, 4)),
            tensor("c", 2, (2, 3)),
            tensor("weight", 5, (0, 5), writes=(5,), persistent=True),
        ],
    )


TEXT = """num_ops: 6
starts_on_host:
to_host a after 1 before 3
from_host a after 3 before 5
"""


def test_the_plan_of_one_gap_reads_as_it_is_meant():
    (gap,) = (g for g in gaps_of(chain()) if g.tensor == 0)
    plan = movement_plan(chain(), [gap])
    assert str(plan) == TEXT
    assert parse_plan(TEXT) == plan
    assert plan.moved_bytes({"a": 4}) == 8
    verify(plan, chain(), 14)


def test_a_tensor_with_an_up_to_date_copy_is_dropped_and_not_copied_again():
    step = step_of(9, [tensor("x", 4, (0, 4, 8), writes=(0,))])
    plan = movement_plan(step, gaps_of(step))
    assert [str(t) for t in plan.transfers] == [
        "to_host x after 0 before 2",
        "from_host x after 2 before 4",
        "drop x after 4",
        "from_host x after 6 before 8",
    ]


def test_a_weight_that_waits_on_the_host_is_back_before_its_first_use_in_every_step():
    step = step_of(8, [tensor("w", 4, (3, 4), writes=(4,), persistent=True)])
    plan = movement_plan(step, gaps_of(step))
    assert plan.starts_on_host == ("w",)
    assert [str(t) for t in plan.transfers] == [
        "from_host w after 1 before 3",
        "to_host w after 4 before 6",
    ]
    verify(plan, step, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("to_host a", "to_host z"), "to_host z after 1 before 3: the step has no tensor"),
        (("num_ops: 6", "num_ops: 7"), "the plan is for 7 operations, the step has 6"),
        (("from_host a after 3 before 5\n", ""), "operation 5 uses a, which is on the host"),
        (("to_host a after 1 before 3\n", ""), "it is on the device already"),
        (("to_host a after 1", "to_host a after 0"), "operation 1 uses a, which is on the host"),
        (("to_host a after 1 before 3", "drop a after 1"), "no up-to-date copy"),
        (("starts_on_host:", "starts_on_host: weight"), "operation 0 uses weight"),
        (("starts_on_host:", "starts_on_host: a"), "'a' is not a persistent tensor"),
        (("after 3 before 5", "after 3 before 9"), "the operations are 0..5"),
    ],
)
def test_a_broken_rule_is_named(change: tuple[str, str], message: str):
    plan = parse_plan(TEXT.replace(*change))
    with pytest.raises(MovementError, match=re.escape(message)):
        verify(plan, chain(), UNLIMITED)


def test_transfers_out_of_order_and_tensors_that_end_elsewhere_are_refused():
    plan = parse_plan(TEXT)
    with pytest.raises(MovementError, match="list transfers by 'after'"):
        verify(replace(plan, transfers=plan.transfers[::-1]), chain(), UNLIMITED)
    step = step_of(4, [tensor("w", 4, (0,), writes=(), persistent=True)])
    away = parse_plan("num_ops: 4\nstarts_on_host:\nto_host w after 0\n")
    with pytest.raises(MovementError, match="starts on the device but ends on the host"):
        verify(away, step, UNLIMITED)


def test_a_capacity_below_the_worst_case_is_refused_with_the_bytes_that_would_do():
    plan = parse_plan(TEXT)
    worst = max(worst_case_bytes(plan, chain()))
    verify(plan, chain(), worst)
    with pytest.raises(MovementError, match=f"allow {worst} bytes") as caught:
        verify(plan, chain(), worst - 1)
    assert caught.value.least_bytes == worst


@pytest.mark.parametrize(
    "text",
    [
        "",
        "num_ops: 6\n",
        "num_ops: 6\nstarts_on_host:\nto_host a\n",
        "num_ops: 6\nstarts_on_host:\nfrom_host a after 3\n",
        "num_ops: 6\nstarts_on_host:\nfrom_host a after 3 before 3\n",
        "num_ops: 6\nstarts_on_host:\ndrop a after 3 before 5\n",
    ],
)
def test_text_that_is_no_plan_is_refused(text: str):
    with pytest.raises(MovementError):
        parse_plan(text)


def test_json_of_another_version_or_with_other_fields_is_refused():
    text = parse_plan(TEXT).to_json()
    with pytest.raises(MovementError, match="schema version 2"):
        MovementPlan.from_json(text.replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(MovementError, match="num_opps"):
        MovementPlan.from_json(text.replace("num_ops", "num_opps"))


def test_transfers_overlap_computation_and_loads_wait_for_offloads():
    plan = movement_plan(chain(), [g for g in gaps_of(chain()) if g.tensor in (0, 3)])
    fast = simulate(plan, chain(), [1.0] * 6, HostLink(bandwidth_bytes_per_s=100.0))
    assert fast.stall_s == 0
    slow = simulate(plan, chain(), [1.0] * 6, HostLink(bandwidth_bytes_per_s=1.0))
    out = [span for span in slow.spans if span.stream == "to_host"]
    back = [span for span in slow.spans if span.stream == "from_host"]
    assert [span.name for span in out] == ["weight", "a"]
    assert all(b.start_s >= max(o.end_s for o in out) for b in back)
    assert slow.stall_s > 0
    assert slow.busy_s("to_host") == sum(s.end_s - s.start_s for s in out)
    assert slow.stall_s == pytest.approx(slow.makespan_s - 6)


def test_every_drawn_plan_is_valid_and_no_timing_exceeds_its_worst_case():
    """Every subset of the gaps of a drawn step is a plan; speeds are drawn too."""
    draw = random.Random(0)
    num_plans = num_tight = 0
    while num_plans < 1500:
        step = drawn_step(draw)
        gaps, by_tensor = gaps_of(step), gaps_by_tensor(step)
        if len(gaps) > 7:
            continue
        sizes = {t.name: t.size_bytes for t in step.tensors}
        for chosen in subsets(len(gaps)):
            moved = {gaps[i] for i in chosen}
            plan = movement_plan(step, moved)
            verify(plan, step, UNLIMITED)
            assert parse_plan(str(plan)) == MovementPlan.from_json(plan.to_json()) == plan
            assert plan.moved_bytes(sizes) == sum(
                transfer_bytes(t, of, moved) for t, of in zip(step.tensors, by_tensor)
            )
            worst = max(worst_case_bytes(plan, step))
            assert worst <= max(map(max, held_bytes(step, moved)))
            times = [draw.choice([0.0, 1.0, 5.0]) for _ in step.ops]
            link = HostLink(bandwidth_bytes_per_s=draw.choice([0.5, 2.0, 100.0]))
            timeline = simulate(plan, step, times, link)
            assert timeline.peak_bytes <= worst
            assert timeline.makespan_s >= sum(times)
            num_tight += timeline.peak_bytes == worst
            num_plans += 1
    assert num_tight > num_plans / 10, "the worst case is far from what happens"
