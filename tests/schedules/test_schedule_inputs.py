"""Users' mistakes: each is rejected with the value, the rule and the fix."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    CoRun,
    Durations,
    Kind,
    Link,
    Links,
    Memory,
    PipelineShape,
    Schedule,
    SearchProblem,
    build,
    from_csv,
    multi_stream_gain,
    parse_action,
    parse_schedule,
    parse_step,
    reverse_first_k_gain,
    search_schedule,
    simulate,
    to_csv,
    verify,
    with_offloading,
    with_recomputation,
    with_reductions,
)
from autopar.schedules.generators.oracle import optimal_schedule

CHAIN = build("1f1b", num_stages=4, num_microbatches=4)
LAYERS = build("conventional", num_stages=3, num_microbatches=1)
UNIT = Durations(F=1, I=1, W=1)
PROBLEM = SearchProblem(num_devices=2, num_microbatches=4, num_blocks=4, durations=UNIT)
SHAPE: dict[str, Any] = {"num_microbatches": 1, "placement": ((0, 1),)}
ONE_STAGE = "name: x\nnum_microbatches: 1\nplacement: 0\n"


def refused(message: str, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(ScheduleError, match=message):
        function(*args, **options)


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf, "half", None, True])
def test_a_share_of_the_device_is_between_0_and_1(value: Any) -> None:
    refused("CoRun.default_occupancy=", CoRun, default_occupancy=value)
    refused(r"CoRun.occupancy\[W\]=", CoRun, occupancy={Kind.W: value})
    refused(r"CoRun.occupancy\[W\]=", CoRun, occupancy={Kind.W: (0.5, value)})


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "5%", None, True])
def test_interference_is_a_finite_number_from_0_on(value: Any) -> None:
    refused("CoRun.interference=.*0.05 for 5%", CoRun, interference=value)


def test_shares_are_by_kind_and_one_a_stage() -> None:
    refused("the key is a Kind", CoRun, occupancy={"weights": 0.5})
    co_run = CoRun(occupancy={Kind.W: (0.5, 0.5)})
    refused(
        r"CoRun.occupancy\[W\] has 2 entries for 3 stages", simulate, LAYERS, UNIT, co_run=co_run
    )


@pytest.mark.parametrize("value", [-0.1, 1.1, 2, math.nan, "all", None, True])
def test_a_hidden_share_is_between_0_and_1(value: Any) -> None:
    refused("hidden_share=", with_reductions, CHAIN, UNIT, hidden_share=value)


@pytest.mark.parametrize(
    "value", [-1.0, math.nan, math.inf, "1", (1, -1), (1, None), True, object()]
)
def test_costs_are_finite_numbers_from_0_on(value: Any) -> None:
    refused(r"Durations\.W=", Durations, F=1, W=value)
    refused(r"Memory\.gradient_bytes=", Memory, gradient_bytes=value)
    refused(r"Links\.message_bytes=", Links, message_bytes=value)


def test_numpy_numbers_are_numbers() -> None:
    costs = Durations(F=np.ones(4, dtype=np.float32), I=np.float32(1), W=np.int64(1))
    assert simulate(CHAIN, costs).makespan_s == simulate(CHAIN, UNIT).makespan_s


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latency_s": -1.0}, "latency_s="),
        ({"latency_s": "1"}, "latency_s="),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s="),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth_bytes_per_s="),
        ({"between": {(0, 0): Link()}}, "pair of different devices"),
        ({"between": {(0, 1, 2): Link()}}, "pair of different devices"),
        ({"between": {0: Link()}}, "pair of different devices"),
        ({"between": {(0, 1): 1e9}}, "the value a Link"),
    ],
)
def test_a_link_joins_two_devices_at_a_speed(fields: dict[str, Any], message: str) -> None:
    refused(message, Links, **fields)


@pytest.mark.parametrize("pair", [(0, 4), (7, 1), (-1, 0)])
def test_links_between_devices_that_do_not_exist_are_refused(pair: tuple[int, int]) -> None:
    links = Links(between={pair: Link(latency_s=1.0)})
    message = r"Links.between\[.*the devices of this schedule are 0..3"
    refused(message, simulate, CHAIN, UNIT, links)
    refused(message, build, "fast_forward", num_stages=8, num_microbatches=4, links=links)
    refused(r"are 0..1", replace, PROBLEM, links=links)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recomputed": (2,)}, r"recomputed=\(2,\): .* 0..1"),
        ({"recomputed": (-1,)}, "recomputed="),
        ({"offloaded": (0, 5)}, "offloaded="),
        ({"offloaded": (1, 0)}, "ascending"),
        ({"offloaded": (0, 0)}, "each once"),
        ({"recomputed": [0]}, "recomputed="),
        ({"recomputed": ("0",)}, "recomputed="),
        ({"recomputed": (True,)}, "recomputed="),
        ({"num_microbatches": 1.0}, "num_microbatches=1.0"),
        ({"num_microbatches": True}, "num_microbatches=True"),
        ({"placement": ((0.0, 1.0),)}, "placement="),
        ({"placement": [[0, 1]]}, "placement="),
        ({"placement": (0, 1)}, "placement="),
        ({"placement": ((),)}, "placement is empty"),
        ({"replica_of": ("0",)}, "replica_of="),
        ({"replica_of": [0]}, "replica_of="),
    ],
)
def test_a_shape_names_stages_and_devices_that_exist(fields: dict[str, Any], message: str) -> None:
    refused(message, PipelineShape, **{**SHAPE, **fields})


@pytest.mark.parametrize("name", ["", " x", "x ", "two\nlines", None, 3])
def test_a_name_is_one_line(name: Any) -> None:
    refused("one line", Schedule, name=name, shape=CHAIN.shape, devices=CHAIN.devices)


@pytest.mark.parametrize("stages", [3, "01", ("0",), (1.0,), (True,), (9,), (-1,)])
def test_activations_are_given_up_by_stages_that_exist(stages: Any) -> None:
    refused("stages", with_recomputation, CHAIN, stages)
    refused("stages", with_offloading, CHAIN, stages)


@pytest.mark.parametrize("ahead", [-1, 1.5, "2", None])
def test_loads_start_a_whole_number_of_actions_ahead(ahead: Any) -> None:
    refused("actions_ahead=", with_offloading, CHAIN, (0,), actions_ahead=ahead)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reverse_first_k", {"k": "a"}),
        ("reverse_first_k", {"k": 1.0}),
        ("reverse_first_k", {"k": True}),
        ("reverse_first_k", {"k": None}),
        ("chimera", {"num_pipelines": "2"}),
        ("chimera", {"num_pipelines": 2.0}),
        ("chimera", {"concatenation": 1}),
        ("chimera", {"concatenation": "merged", "max_activations": 2.5}),
        ("chimera", {"durations": 1.0}),
        ("fast_forward", {"num_devices": "2"}),
        ("fast_forward", {"group_size": 1.0}),
        ("fast_forward", {"in_flight": False}),
        ("fast_forward", {"links": {}}),
        ("interleaved", {"num_devices": 2.0}),
        ("multi_stream", {"placement": [1]}),
        ("multi_stream", {"region_size": "1"}),
        ("conventional", {"reduces": 1}),
        ("dualpipe", {"overlap": "yes"}),
    ],
)
def test_options_of_the_wrong_type_are_refused(name: str, options: dict[str, Any]) -> None:
    option, value = list(options.items())[-1]
    message = f"{name}: {option}={value!r} has the wrong type; it must be ".replace("[1]", r"\[1\]")
    refused(message, build, name, num_stages=4, num_microbatches=8, **options)


@pytest.mark.parametrize("value", ["4", 4.0, True, None])
def test_counts_are_whole_numbers(value: Any) -> None:
    refused("a whole number", build, "1f1b", num_stages=value, num_microbatches=4)
    refused("a whole number", build, "1f1b", num_stages=4, num_microbatches=value)
    for field in ("num_devices", "num_microbatches", "num_blocks"):
        refused(f"{field}=", replace, PROBLEM, **{field: value})
    refused("num_iterations=", simulate, CHAIN, UNIT, num_iterations=value and 0.5)
    refused("num_layers=", reverse_first_k_gain, UNIT, num_layers=value)
    refused("num_layers=", multi_stream_gain, UNIT, num_layers=value, co_run=CoRun())


@pytest.mark.parametrize(
    ("name", "options", "fix"),
    [
        ("chimera", {"concatenation": "merged", "max_activations": 0}, "at least one activation"),
        ("fast_forward", {"num_devices": 0}, "use num_devices=1"),
        ("fast_forward", {"num_devices": 9}, "use num_devices=8"),
        ("fast_forward", {"group_size": 0}, "use group_size=1"),
        ("interleaved", {"num_devices": 3}, "pass num_devices=2"),
        ("interleaved", {"num_devices": -2}, "pass num_devices=1"),
        ("multi_stream", {"placement": {"a": 0}}, "layers are 0..7"),
        ("multi_stream", {"placement": {True: 0}}, "layers are 0..7"),
        ("reverse_first_k", {"k": -1}, "use k=0"),
        ("reverse_first_k", {}, "needs the option k="),
    ],
)
def test_options_out_of_range_come_with_one_that_fits(
    name: str, options: dict[str, Any], fix: str
) -> None:
    refused(fix, build, name, num_stages=8, num_microbatches=8, **options)


@pytest.mark.parametrize(
    "text", ["1\u0663F0", "\u0662F0", "9" * 10 + "F0", "9" * 5000 + "F0", "0F0\n", 3, None, ["0F0"]]
)
def test_only_the_notation_is_an_action(text: Any) -> None:
    refused("is not an action", parse_action, text)


@pytest.mark.parametrize(
    "text", ["0F0~", "0F0~1_0", "0F0~x", "0F0@", "0F0@main", "0F0>", "0F0@moon", "", 3, None]
)
def test_only_the_notation_is_a_step(text: Any) -> None:
    refused("is not a", parse_step, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE_STAGE + "reduces: maybe\n", "write 'yes'"),
        (ONE_STAGE + "updates: no\n", "write 'yes'"),
        (ONE_STAGE.replace("batches: 1", "batches: 1_0"), "num_microbatches"),
        (ONE_STAGE.replace("batches: 1", "batches: +1"), "num_microbatches"),
        (ONE_STAGE.replace("batches: 1", "batches: 1 1"), "num_microbatches"),
        (ONE_STAGE.replace("batches: 1", "batches: \u0661"), "num_microbatches"),
        (ONE_STAGE.replace("placement: 0", "placement: 00"), "placement"),
        (ONE_STAGE.replace("placement: 0", "placement: 0 |"), "placement"),
        (ONE_STAGE.replace("placement: 0", "placement:"), "placement"),
        (ONE_STAGE + "recomputed: 4\n", "recomputed"),
        (ONE_STAGE + "device 0: 0F0 0Q0\n", "line 4: '0Q0'"),
        ("", "missing"),
        (None, "is not a schedule"),
    ],
)
def test_only_the_notation_is_a_schedule(text: Any, message: str) -> None:
    refused(message, parse_schedule, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F99999999,0B99999999\n", "without gaps"),
        ("0F0,0B0,0F2,0B2\n", "without gaps"),
        ('"0F0\n', "the text is not CSV"),
        (b"0F0,0B0\n", "not CSV text"),
        (None, "not CSV text"),
    ],
)
def test_only_whole_orders_are_read_from_csv(text: Any, message: str) -> None:
    refused(message, from_csv, text)


def test_a_step_that_awaits_another_does_not_fit_the_csv() -> None:
    schedule = parse_schedule(ONE_STAGE + "device 0: 0F0 0B0>0F0\n")
    verify(schedule)
    refused("CSV format", to_csv, schedule)


@pytest.mark.parametrize("steps", ["1F0 0F0 0B0", "0F1 0F0 0B0", "0.1F0 0B0", "0F0-1 0B0"])
def test_actions_that_the_shape_lacks_are_not_simulated(steps: str) -> None:
    schedule = parse_schedule(ONE_STAGE + f"device 0: {steps}\n")
    refused(r"call verify\(schedule\)", simulate, schedule, UNIT)


@pytest.mark.parametrize("steps", ["0F0 0SEND_F0 0B0", "0F0 0RECV_F0 0B0", "0F0 0SEND_B0 0B0"])
def test_messages_to_stages_that_do_not_exist_are_not_simulated(steps: str) -> None:
    schedule = parse_schedule(ONE_STAGE + f"device 0: {steps}\n")
    refused(r"call verify\(schedule\)", simulate, schedule, UNIT, Links())


@pytest.mark.parametrize("devices", ["", "device 0: 0F0\ndevice 1: 0B0\n"])
def test_every_device_has_one_list(devices: str) -> None:
    schedule = parse_schedule(ONE_STAGE + devices)
    refused("lists . devices, its placement uses 1", simulate, schedule, UNIT)
    refused("lists . devices, its placement uses 1", verify, schedule)


def test_lists_are_tuples_of_steps() -> None:
    for devices in (list(CHAIN.devices), tuple(map(list, CHAIN.devices)), (("0F0",),), None):
        refused("a tuple of steps for each device", replace, CHAIN, devices=devices)


@pytest.mark.parametrize("value", [None, {"F": 1}, 1.0, "1f1b"])
def test_schedules_and_durations_are_of_their_types(value: Any) -> None:
    refused("is not a Schedule", verify, value)
    refused("is not a Schedule", simulate, value, UNIT)
    refused("durations=.*: pass Durations", simulate, CHAIN, value)
    refused("durations=.*: pass Durations", replace, PROBLEM, durations=value)


def test_split_backwards_need_the_times_of_both_parts() -> None:
    """Otherwise I and W would cost nothing, and any split schedule would win."""
    whole = Durations(F=1, B=2)
    assert simulate(CHAIN, whole).makespan_s == 7 * 3
    split = build("zb_h1", num_stages=4, num_microbatches=4)
    refused("does not give I and W", simulate, split, whole)
    refused("does not give I and W", replace, PROBLEM, durations=whole)
    refused("does not give I and W", optimal_schedule, CHAIN.shape, whole)
    counts = {"num_stages": 4, "num_microbatches": 4}
    refused("does not give I and W", build, "fast_forward", **counts, durations=whole)


def test_an_order_that_does_not_fit_is_refused_by_both_gains() -> None:
    memory = Memory(activation_bytes=10.0)
    for value in (29.0, math.nan, "30"):
        limits: dict[str, Any] = {"memory": memory, "max_memory_bytes": value}
        message = "the conventional order needs 30.* raise the cap"
        refused(message, reverse_first_k_gain, UNIT, num_layers=3, **limits)
        refused(message, multi_stream_gain, UNIT, num_layers=3, co_run=CoRun(), **limits)


def test_the_best_k_fits_the_cap_although_others_on_the_curve_are_faster() -> None:
    costs = Durations(F=1, I=1, W=1, G=(1, 4, 4, 4))
    memory = Memory(activation_bytes=1.0)
    free = reverse_first_k_gain(costs, num_layers=4, memory=memory)
    assert free.best_k
    tight = reverse_first_k_gain(
        costs, num_layers=4, memory=memory, max_memory_bytes=free.curve[0].peak_memory_bytes
    )
    chosen = tight.curve[tight.best_k or 0]
    assert chosen.k == tight.best_k
    assert chosen.iteration_s == tight.best_s
    assert chosen.peak_memory_bytes <= tight.curve[0].peak_memory_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_memory_bytes": math.nan}, "max_memory_bytes="),
        ({"max_memory_bytes": -1.0}, "max_memory_bytes="),
        ({"max_memory_bytes": "1GiB"}, "max_memory_bytes="),
        ({"generators": "1f1b"}, "generators="),
        ({"generators": ("1f1b", "zigzag")}, "zigzag"),
        ({"durations": Durations(F=(1, 2))}, "Durations.F has 2 entries for 4 stages"),
        ({"memory": Memory(weight_bytes=(1, 2))}, "Memory.weight_bytes has 2 entries"),
        ({"links": Links(message_bytes=(1, 2))}, "message_bytes has 2 entries"),
    ],
)
def test_a_search_problem_is_checked_when_made(fields: dict[str, Any], message: str) -> None:
    refused(message, replace, PROBLEM, **fields)


@pytest.mark.parametrize("name", ["num_moves", "num_starts", "num_restarts"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", None, True])
def test_a_search_takes_whole_counts(name: str, value: Any) -> None:
    refused(f"{name}={value!r}", search_schedule, PROBLEM, **{name: value})


@pytest.mark.parametrize("limit", [-1.0, math.nan, math.inf, "10", None])
def test_a_search_takes_a_finite_time(limit: Any) -> None:
    refused("exact_time_s=", search_schedule, PROBLEM, exact_time_s=limit)
    refused("seed=", search_schedule, PROBLEM, seed=limit)
    refused("time_limit_s=", optimal_schedule, CHAIN.shape, UNIT, time_limit_s=limit)


def test_a_search_without_local_moves_gives_the_best_candidate() -> None:
    plain = search_schedule(PROBLEM, num_moves=0)
    none = search_schedule(PROBLEM, num_starts=0)
    assert plain.best.makespan_s == none.best.makespan_s


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_bytes": [4.0]}, "1 entries for 4 devices"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"resolution": 0.5}, "resolution=0.5"),
    ],
)
def test_the_oracle_checks_its_limits(limits: dict[str, Any], message: str) -> None:
    refused(message, optimal_schedule, CHAIN.shape, UNIT, **limits)


@pytest.mark.parametrize("sizes", [(0, 4), (2.0, 2), (-1, 5)])
def test_blocks_are_grouped_by_whole_sizes(sizes: tuple[Any, ...]) -> None:
    for costs in (UNIT, Memory(), Links()):
        refused("sizes=", costs.grouped, sizes)
