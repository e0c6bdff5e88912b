"""Which stream an action runs on and what it waits for, and every order that this allows.

Steps are replayed in drawn orders (`autopar.testing.replay`); streams of a GPU are in `test_gpu`.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.base.errors import MovementError, PlanError
from autopar.cost_models import Cluster
from autopar.cost_models.update import OptimizerSpec
from autopar.ir.mesh import Mesh
from autopar.lowering.early import with_early_update
from autopar.lowering.pipeline import has_side_stream
from autopar.lowering.route import route_of
from autopar.lowering.streams import Issue, Part, streams_of
from autopar.lowering.types import RankProgram
from autopar.memory.program import program_memory
from autopar.movement.coverable import check_coverable
from autopar.runtime.machine import moments
from autopar.runtime.machine.streams import UpdateStream
from autopar.runtime.step.executor import action_times
from autopar.schedules import Action, Resource, Schedule, build, parse_schedule, verify
from autopar.testing.lockstep import LockstepRun
from autopar.testing.lockstep_updates import LockstepUpdates
from autopar.testing.replay import (
    LEARNING_RATE,
    Choose,
    Hazard,
    Replayed,
    ReplayMachine,
    _TapeStream,
    main_first,
    replayed_step,
    side_first,
)
from tests.equality.case import ALONE, Case
from tests.oracles import state_of

NUM_ORDERS = 12
TWO = Mesh(("x",), (2,))


@functools.cache
def case_of(name: str) -> Case:
    return Case(name, num_joined=2, num_steps=1)


def multi_stream(num_stages: int, num_microbatches: int, **options: object) -> Schedule:
    return build(
        "multi_stream", num_stages=num_stages, num_microbatches=num_microbatches, **options
    )


def by_hand(actions: str, num_stages: int, *, reduces: bool = False) -> Schedule:
    """A schedule of one micro-batch on one device."""
    made = parse_schedule(
        f"name: by hand\nnum_microbatches: 1\nplacement: {'0 ' * num_stages}\n"
        + "reduces: yes\nupdates: yes\n" * reduces
        + f"device 0: {actions}\n"
    )
    verify(made)
    return made


ALL_BEHIND = "0F0 1F0 2F0 2I0 1I0 0I0 2W0@side>0I0 1W0@side 0W0@side"
"""Every weight gradient behind the last input gradient."""
MIXED = "0F0 1F0 2F0 2I0 2W0@side 1I0 1W0 0I0>2W0 0W0@side"
SCHEDULED = "0F0 1F0 2F0 2I0 2W0@side 2G 1I0 1W0 1G 2U 0I0 0W0@side 0G 0U 1U"
"""Gradients that are reduced and used where the schedule says."""
SCHEDULES: dict[str, Schedule] = {
    "by layer": multi_stream(4, 1),
    "micro-batches": multi_stream(3, 2),
    "late regions": multi_stream(4, 1, placement={3: 3, 2: 2}),
    "large regions": multi_stream(4, 2, region_size=2),
    "behind": by_hand(ALL_BEHIND, 3),
    "mixed": by_hand(MIXED, 3),
    "scheduled reductions": by_hand(SCHEDULED, 3, reduces=True),
}


@functools.cache
def program_of(model: str, schedule: str, mesh: Mesh = ALONE) -> RankProgram:
    case, made = case_of(model), SCHEDULES[schedule]
    return case.piped(case.lowered(made.shape.num_microbatches, mesh, 0), made)


def issues_of(program: RankProgram) -> tuple[Issue, ...]:
    return streams_of(program, route_of(program, 0))


def table(program: RankProgram) -> list[str]:
    """The issues that cross streams, as text: each with what it waits for."""
    found = issues_of(program)
    return [
        f"{issue} on {issue.stream} behind {', '.join(str(found[n]) for n in issue.waits)}"
        for issue in found
        if issue.waits
    ]


def test_weight_gradients_wait_for_their_output_gradients_and_the_end_for_them() -> None:
    """ResNet ties no weights; the last W is on the main stream and is reduced on the other."""
    assert table(program_of("resnet", "by layer")) == [
        "3W0 on side behind 3I0",
        "2W0 on side behind 2I0",
        "1W0 on side behind 1I0",
        "0W0 reduce on side behind 0W0",
        "join on main behind 0W0 reduce",
    ]


def test_a_tied_weight_is_added_to_behind_the_other_stream() -> None:
    """GPT-2's head and embedding are one parameter: stage 0 adds to what stage 3 has made."""
    found = table(program_of("gpt2", "by layer"))
    assert found[-3:] == [
        "0W0 on main behind 3W0",
        "0W0 reduce on side behind 0W0",
        "join on main behind 0W0 reduce",
    ]


def test_one_event_stands_for_those_before_it() -> None:
    assert table(program_of("resnet", "behind")) == [
        "2W0 on side behind 0I0",
        "join on main behind 0W0",
    ]


def test_what_a_step_waits_for_is_waited_for() -> None:
    assert table(program_of("resnet", "mixed")) == [
        "2W0 on side behind 2I0",
        "1W0 reduce on side behind 1W0",
        "0I0 on main behind 2W0",
        "0W0 on side behind 0I0",
        "join on main behind 0W0",
    ]


def test_updates_of_the_schedule_wait_for_their_reductions() -> None:
    assert table(program_of("resnet", "scheduled reductions")) == [
        "2W0 on side behind 2I0",
        "1G on side behind 1W0",
        "2U on main behind 2G",
        "0W0 on side behind 0I0",
        "0U on main behind 0G",
    ]


def test_a_schedule_of_one_stream_has_no_issues() -> None:
    case = case_of("resnet")
    program = case.lowered(1, ALONE, 0)
    assert not issues_of(program)
    serial = build("conventional", num_stages=4, num_microbatches=1)
    assert not issues_of(case.piped(program, serial))


PROGRAMS = [
    *(("gpt2", schedule, ALONE) for schedule in SCHEDULES),
    ("gpt2", "by layer", TWO),
    ("resnet", "late regions", TWO),
    ("resnet", "mixed", ALONE),
    ("bert", "by layer", TWO),
]
IDS = [f"{m}, {s}, {mesh}" for m, s, mesh in PROGRAMS]


def drawn(seed: int) -> Choose:
    generator = random.Random(seed)
    return lambda streams: generator.choice(streams)


def replay(
    model: str,
    program: RankProgram,
    choose: Choose,
    changed: Mapping[tuple[Action | None, Part], Issue] | None = None,
) -> Replayed:
    case = case_of(model)
    tensors = case.captured.signature.flatten((), case.batches[0])
    return replayed_step(program, state_of(case.model), tensors, choose, changed=changed)


@functools.cache
def in_order(model: str, schedule: str, mesh: Mesh) -> tuple[list[torch.Tensor], dict[int, object]]:
    """The loss and the gradients of the same actions in the order of issue."""
    case, program = case_of(model), program_of(model, schedule, mesh)
    run = LockstepRun(program, case.captured.graph, state_of(case.model))
    result = run.step(case.captured.signature.flatten((), case.batches[0]))
    return result.loss, dict(result.gradients)


def equals(got: Replayed, expected: tuple[Sequence[torch.Tensor], Mapping[int, object]]) -> bool:
    loss, gradients = expected
    pairs = [(got.loss, loss), *((got.gradients[v], gradients[v]) for v in gradients)]
    return got.gradients.keys() == gradients.keys() and all(
        torch.equal(ours, theirs)
        for mine, others in pairs
        for ours, theirs in zip(mine, others, strict=True)  # type: ignore[call-overload]
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("model", "schedule", "mesh"), PROGRAMS, ids=IDS)
def test_every_order_gives_the_same_bits(model: str, schedule: str, mesh: Mesh) -> None:
    program = program_of(model, schedule, mesh)
    for choose in (main_first, side_first, *map(drawn, range(NUM_ORDERS))):
        assert equals(replay(model, program, choose), in_order(model, schedule, mesh))


@pytest.mark.parametrize("schedule", ["by layer", "mixed", "scheduled reductions"])
def test_actions_are_timed_on_their_streams_behind_what_they_wait_for(schedule: str) -> None:
    """In the device's time, the number of operations that its streams have run, not the host's."""
    program = program_of("resnet", schedule)
    issues, num_overlaps = [i for i in issues_of(program) if i.action is not None], 0
    for choose in (main_first, side_first, *map(drawn, range(NUM_ORDERS))):
        spans = replay("resnet", program, choose).spans
        assert [span.action for span in spans] == [issue.action for issue in issues]
        last = max(each.at for span in spans for each in (span.start, span.end))
        now = SimpleNamespace(at=last + 7)
        times = action_times(spans, now, 100.0)
        by_number = {issue.number: found for issue, found in zip(issues, times)}
        previous: dict[Resource, float] = {}
        for issue, span, found in zip(issues, spans, times):
            assert span.start.stream is span.end.stream is issue.stream
            assert found.resource in (issue.stream, Resource.COLLECTIVE)
            assert found.start_s == pytest.approx(100.0 - (now.at - span.start.at))
            assert found.end_s >= found.start_s >= previous.get(issue.stream, -math.inf)
            assert all(found.start_s >= by_number[n].end_s for n in issue.waits)
            previous[issue.stream] = found.end_s
            num_overlaps += any(
                other.start_s < found.end_s and found.start_s < other.end_s
                for number, other in by_number.items()
                if number < issue.number
            )
    assert num_overlaps


def test_events_are_recorded_at_once_and_read_after_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not recorded while a CUDA graph is."""
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

    module = SimpleNamespace(
        Event=Event, synchronize=lambda: log.append("synchronize"),
        is_current_stream_capturing=lambda: is_capturing,
    )  # fmt: skip
    monkeypatch.setattr(moments, "is_accelerator", lambda device: True)
    monkeypatch.setattr(moments, "module_of", lambda kind: module)
    is_capturing = False
    assert isinstance(moments.moments_of(torch.device("cuda"))(), Event)
    assert log == ["record"]
    now, _ = moments.present_of(torch.device("cuda"))
    assert isinstance(now, Event)
    assert log == ["record", "record", "synchronize"]
    is_capturing = True
    moments.moments_of(torch.device("cuda"))()
    assert log == ["record", "record", "synchronize"]
    del module.is_current_stream_capturing  # of a kind without graphs
    moments.moments_of(torch.device("cuda"))()
    assert log == ["record", "record", "synchronize", "record"]


@pytest.mark.parametrize(("model", "schedule", "mesh"), PROGRAMS, ids=IDS)
def test_the_order_of_issue_equals_eager(model: str, schedule: str, mesh: Mesh) -> None:
    """Three ways of saying it once: the replays above equal this bit by bit."""
    case_of(model).check(program_of(model, schedule, mesh))


def is_noticed(model: str, schedule: str, mesh: Mesh, changed: Issue) -> bool:
    """Whether an order exists that a changed issue allows and that is wrong."""
    key = changed.action, changed.part
    for choose in (main_first, side_first):
        try:
            got = replay(model, program_of(model, schedule, mesh), choose, {key: changed})
        except Hazard:
            return True
        if not equals(got, in_order(model, schedule, mesh)):
            return True
    return False


@pytest.mark.parametrize(("model", "schedule", "mesh"), PROGRAMS, ids=IDS)
def test_no_event_can_be_left_out(model: str, schedule: str, mesh: Mesh) -> None:
    """Except those that a schedule asks for beyond what its data need (``>``), for I of GPT-2's
    embedding, which computes nothing, and for its reduction on one device, which moves nothing."""
    asked = {"0I0"} if schedule == "mixed" else set()
    if model == "gpt2" and schedule in ("mixed", "scheduled reductions"):
        asked.add("0W0")
    if model == "gpt2" and schedule == "late regions" and mesh.num_devices == 1:
        asked.add("join")
    for issue in issues_of(program_of(model, schedule, mesh)):
        if issue.waits and str(issue) not in asked:
            without = replace(issue, waits=())
            assert is_noticed(model, schedule, mesh, without), f"{issue} waits for nothing"


@pytest.mark.parametrize(("model", "schedule", "mesh"), PROGRAMS[:1], ids=IDS[:1])
def test_no_use_of_the_other_streams_memory_can_be_left_out(
    model: str, schedule: str, mesh: Mesh
) -> None:
    used = [issue for issue in issues_of(program_of(model, schedule, mesh)) if issue.uses]
    assert len(used) > 3
    for issue in used:
        if issue.stream is Resource.SIDE and issue.part is Part.RUN:
            without = replace(issue, uses=())
            assert is_noticed(model, schedule, mesh, without), f"{issue} notes nothing"


MEMORY = [*(p for p in PROGRAMS if p[2] is ALONE), ("resnet", "by layer", ALONE)]
MEMORY_IDS = [f"{model}, {schedule}" for model, schedule, _ in MEMORY]


@pytest.mark.parametrize(("model", "schedule", "mesh"), MEMORY, ids=MEMORY_IDS)
def test_what_two_streams_hold_is_counted(model: str, schedule: str, mesh: Mesh) -> None:
    """A GPU holds no more than is counted, in every order that the events allow."""
    program = program_of(model, schedule, mesh)
    gpu = Cluster.preset("h100-sxm", nodes=1, devices_per_node=1).device
    found = program_memory(program, gpu, optimizer=OptimizerSpec(num_states=0, is_fused=True))
    others = ("parameters", "optimizer_state", "buffers", "inputs")
    counted = found.peak_bytes - sum(found.by_category.get(name, 0) for name in others)
    held = [
        replay(model, program, choose).peak_bytes
        for choose in (main_first, side_first, *map(drawn, range(3)))
    ]
    assert max(held) <= counted


# --- the stream of early updates ----------------------------------------------------------------
EARLY = [
    ("gpt2", 1, ALONE, 4096),
    ("gpt2", 2, TWO, 2048),
    ("resnet", 1, TWO, 4096),
    ("bert", 2, ALONE, None),
    ("llama", 1, TWO, 2048),
]
EARLY_IDS = [f"{model}, {num} micro-batches, {mesh}" for model, num, mesh, _ in EARLY]
Early = tuple[str, int, Mesh, int | None]


@functools.cache
def early_program(model: str, num_microbatches: int, mesh: Mesh, tile: int | None) -> RankProgram:
    program = case_of(model).lowered(num_microbatches, mesh, 0)
    return with_early_update(program, tile_bytes=tile)


@functools.cache
def early_in_order(early: Early) -> dict[int, list[torch.Tensor]]:
    """The parameters behind the same updates in the order of issue, by torch's optimizer."""
    case, program = case_of(early[0]), early_program(*early)
    run = LockstepRun(program, case.captured.graph, state_of(case.model))
    updaters = [
        LockstepUpdates(rank, program, functools.partial(torch.optim.SGD, lr=LEARNING_RATE))
        for rank in run.ranks
    ]
    run.steps(case.captured.signature.flatten((), case.batches[0]), updaters)
    assert updaters[0].num_early
    return {value: list(shards) for value, shards in run.parameters.items()}


def is_early_wrong(early: Early, choose: Choose) -> bool:
    """Whether a replay of early updates reads what is not there, or ends with other parameters."""
    try:
        got = replay(early[0], early_program(*early), choose)
    except Hazard:
        return True
    expected = early_in_order(early)
    assert got.parameters.keys() == expected.keys()
    return not all(
        torch.equal(mine, other)
        for value, shards in got.parameters.items()
        for mine, other in zip(shards, expected[value], strict=True)
    )


@pytest.mark.parametrize("early", EARLY, ids=EARLY_IDS)
def test_early_updates_on_a_second_stream_give_the_same_bits_in_every_order(early: Early) -> None:
    assert early_program(*early).early
    for choose in (main_first, side_first, *map(drawn, range(NUM_ORDERS))):
        assert not is_early_wrong(early, choose)


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (_TapeStream, "wait_stream", lambda self, other: None),
        (ReplayMachine, "updating", lambda self, gradients: self.updates.on(())),
    ],
    ids=["the update waits for nothing", "no gradient is held"],
)
def test_what_early_updates_wait_for_and_hold_cannot_be_left_out(
    place: type, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong)
    assert any(is_early_wrong(EARLY[0], choose) for choose in (main_first, side_first))


def test_the_main_stream_waits_for_an_early_update_before_its_gradients_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def join(self: UpdateStream) -> None:
        self._held = None

    monkeypatch.setattr(UpdateStream, "join", join)
    assert any(is_early_wrong(EARLY[0], choose) for choose in (main_first, side_first))


@pytest.mark.parametrize("early", EARLY, ids=EARLY_IDS)
def test_what_early_updates_on_a_second_stream_hold_is_counted(early: Early) -> None:
    """In every order, the gradients of one update beside those that are being made."""
    program = early_program(*early)
    gpu = Cluster.preset("h100-sxm", nodes=1, devices_per_node=1).device
    cpu = Cluster.preset("cpu", nodes=1, devices_per_node=1).device
    optimizer = OptimizerSpec(num_states=0, is_fused=True)
    found = program_memory(program, gpu, optimizer=optimizer)
    others = ("parameters", "optimizer_state", "buffers", "inputs")
    counted = found.peak_bytes - sum(found.by_category.get(name, 0) for name in others)
    held = [
        replay(early[0], program, choose).peak_bytes
        for choose in (main_first, side_first, *map(drawn, range(3)))
    ]
    assert max(held) <= counted
    assert found.gradient_bytes > program_memory(program, cpu, optimizer=optimizer).gradient_bytes


def test_early_updates_are_refused_beside_a_second_stream() -> None:
    program = program_of("gpt2", "by layer")
    assert has_side_stream(program)
    with pytest.raises(PlanError, match=r"'multi_stream' makes gradients on a second compute.*at_"):
        with_early_update(program)


def test_offloading_is_refused_beside_a_second_stream() -> None:
    program = program_of("gpt2", "by layer")
    with pytest.raises(MovementError, match="computes on a second stream"):
        check_coverable(program, route_of(program, 0))
