"""CSV round trips with torch.distributed.pipelining, checked by torch's own validator."""

import pytest
from hypothesis import given, settings
from schedule_cases import PLAIN, schedules
from torch_pipelines import pipeline_csv, validate_pipeline_csv

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    Action,
    Durations,
    Kind,
    Schedule,
    build,
    from_csv,
    simulate,
    to_csv,
    verify,
)
from autopar.schedules.schedule import schedule_of

EXPORTED = tuple(name for name in PLAIN if name != "dualpipe")
COSTS = (Durations(F=1, I=1, W=1), Durations(F=2, I=2, W=1), Durations(F=1, I=1, W=1, B=2.5))


@settings(deadline=None, max_examples=60)
@given(schedules((*EXPORTED, "fast_forward")))
def test_csv_is_read_back_and_torch_accepts_it(schedule: Schedule) -> None:
    text = to_csv(schedule)
    assert from_csv(text, name=schedule.name) == schedule
    shape = schedule.shape
    validate_pipeline_csv(
        text, num_stages=shape.num_stages, num_microbatches=shape.num_microbatches
    )


def test_torchs_validator_can_refuse() -> None:
    """The check above is effective: torch raises on a broken order and on a deadlock."""
    for broken in ("0B0,0F0\n1F0,1B0\n", "0F0,2F0,2B0,0B0,0F1,2F1,2B1,0B1\n1F0,1F1,1B0,1B1\n"):
        stages = 2 if "2F0" not in broken else 3
        batches = 1 if "0F1" not in broken else 2
        with pytest.raises((AssertionError, ValueError)):
            validate_pipeline_csv(broken, num_stages=stages, num_microbatches=batches)
        with pytest.raises(ScheduleError):
            verify(from_csv(broken))


@pytest.mark.parametrize(("devices", "factor"), [(2, 1), (2, 4), (4, 1), (4, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize(
    ("theirs", "ours", "per_device"),
    [("GPipe", "gpipe", 1), ("Interleaved1F1B", "interleaved", 2), ("ZBVZeroBubble", "zb_v", 2)],
)
def test_torchs_orders_simulate_to_our_bubble(
    theirs: str, ours: str, per_device: int, devices: int, factor: int
) -> None:
    batches = factor * devices
    text = pipeline_csv(
        theirs, num_devices=devices, num_microbatches=batches, stages_per_device=per_device
    )
    imported = from_csv(text)
    verify(imported)
    built = build(ours, num_stages=per_device * devices, num_microbatches=batches)
    for costs in COSTS:
        assert simulate(imported, costs).bubble_ratio == simulate(built, costs).bubble_ratio


def renumbered(schedule: Schedule) -> Schedule:
    """Every stage's forwards and backwards numbered from 0 in their order."""
    seen: dict[tuple[int, Kind], int] = {}
    orders: list[list[Action]] = []
    for steps in schedule.devices:
        orders.append([])
        for item in steps:
            key = (item.action.stage, item.action.kind)
            seen[key] = seen.get(key, -1) + 1
            orders[-1].append(item.action._replace(microbatch=seen[key]))
    batches = 1 + max(seen.values())
    shape = build("1f1b", num_stages=len(orders), num_microbatches=batches).shape
    return schedule_of("1f1b", shape, orders)


@pytest.mark.parametrize(("devices", "batches"), [(2, 4), (4, 8), (8, 16), (8, 32)])
def test_torchs_1f1b_simulates_to_our_bubble(devices: int, batches: int) -> None:
    """torch 2.13 counts the last rank's forwards from 1 in this order; its own validator and ours
    reject that, and with the numbers corrected it is our 1F1B."""
    text = pipeline_csv("1F1B", num_devices=devices, num_microbatches=batches)
    imported = from_csv(text)
    built = build("1f1b", num_stages=devices, num_microbatches=batches)
    if f"F{batches}" in text:
        with pytest.raises(AssertionError):
            validate_pipeline_csv(text, num_stages=devices, num_microbatches=batches)
        with pytest.raises(ScheduleError):
            verify(imported)
    mended = renumbered(imported)
    verify(mended)
    for costs in COSTS:
        assert simulate(mended, costs).bubble_ratio == simulate(built, costs).bubble_ratio


def test_overlapped_pairs_are_read_in_turn() -> None:
    text = pipeline_csv("DualPipeV", num_devices=4, num_microbatches=16, stages_per_device=2)
    assert "OVERLAP_F_B" in text
    imported = from_csv(text, name="dualpipe_v")
    verify(imported)
    assert imported.num_actions > 2 * 8 * 16


@pytest.mark.parametrize(
    "name_and_options",
    [
        ("chimera", {}),
        ("dualpipe", {}),
        ("multi_stream", {}),
        ("conventional", {"reduces": True}),
    ],
)
def test_what_the_format_cannot_hold_is_refused(name_and_options: tuple[str, dict]) -> None:
    name, options = name_and_options
    schedule = build(
        name, num_stages=4, num_microbatches=8 if name != "multi_stream" else 1, **options
    )
    with pytest.raises(ScheduleError, match="CSV format"):
        to_csv(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,junk\n", "rank 0, cell 2"),
        ("0F0,0G\n", "not a compute action"),
        ("0F0,0B0\n0F1,0B1\n", "also on rank 0"),
        ("0F0,0B0\n2F0,2B0\n", "numbered from 0"),
        ("", "numbered from 0"),
    ],
)
def test_broken_csv_names_the_cell(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


def test_idle_cells_are_skipped() -> None:
    assert from_csv("0F0,,0B0\n,1F0, 1B0\n") == from_csv("0F0,0B0\n1F0,1B0\n")
