"""Untrusted plans: rejected quickly with the place of the mistake, or run like eager PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.base.documents import MAX_BYTES
from autopar.base.errors import ClusterError, PlanError, ScheduleError
from autopar.cost_models import Cluster
from autopar.ir.choice import parse_choice
from autopar.ir.placement import parse_placement
from autopar.plans.binding import strategy_of
from autopar.plans.document import Plan
from autopar.schedules import build, format_schedule, parse_schedule, verify
from tests.effort import EXHAUSTIVE
from tests.plan_fuzz import KINDS, make_case, tally

NUM_PLANS = 100_000 if EXHAUSTIVE else 1000
SHARE_RUN = 0.2 if NUM_PLANS <= 2000 else 1.0


@pytest.mark.timeout(max(300, NUM_PLANS // 10))
def test_changed_plans_are_refused_by_our_own_errors_or_train_as_eager() -> None:
    counts, firsts = tally(0, NUM_PLANS, share_run=SHARE_RUN)
    assert {bad: firsts[bad] for bad in counts if bad.startswith("BAD")} == {}
    for outcome in (
        "refused loading, PlanError with place",
        "refused strategy, PlanError with place",
        "accepted, same decisions",
        "accepted, runs as eager",
    ):
        assert counts[outcome] > 0, counts


def edited(change: Callable[[Any], None], kind: str = "two axes") -> str:
    document = json.loads(make_case().plans[kind].to_json())
    change(document)
    return json.dumps(document)


def put(*keys: str | int, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def without_backward(document: Any) -> None:
    """A pipeline that computes the loss but no gradient."""
    lines = document["schedule"]["actions"]
    for number, line in enumerate(lines):
        key, _, text = line.partition(": ")
        if key.startswith("device"):
            lines[number] = f"{key}: " + " ".join(w for w in text.split() if "F" in w)


PLACES: list[tuple[str, Callable[[Any], None], str]] = [
    (
        "two axes",
        put("schema_version", value=4),
        r"at \$\.schema_version: .*4; this version of autopar reads",
    ),
    ("two axes", put("graph", "num_ops", value="x"), r"at \$\.graph\.num_ops: Expected `int`"),
    ("two axes", put("ops", "linear_1", value=3), r"at \$\.ops\.linear_1: Expected `str`"),
    ("two axes", put("ops", "linear_1", value="h/0 -"), r"at \$\.ops\.linear_1: .*at least 1"),
    ("two axes", put("ops", "linear_1", value="m"), r"\$\.ops\.linear_1: .*1 words .* 2 axes"),
    ("two axes", put("ops", "linear_x", value="- -"), r"\$\.ops: .*'linear_x'.*you mean 'linear_"),
    (
        "two axes",
        put("parameters", "embed.weight", value="S0/0 R"),
        r'at \$\.parameters\["embed\.weight"\]: placement \'S0/0\'',
    ),
    (
        "two axes",
        put("parameters", "embed.weight", value="S7 R"),
        r'at \$\.parameters\["embed\.weight"\]: split on dimension 7',
    ),
    ("two axes", put("inputs", "ids", value="P R"), r"at \$\.inputs\.ids: .*stored as P R"),
    ("two axes", put("mesh", "axis_sizes", 1, value=0), r"at \$\.mesh\.axis_sizes\[1\]: .*not 0"),
    ("two axes", put("mesh", "axis_sizes", 1, value=-2), r"at \$\.mesh\.axis_sizes\[1\]: .*-2"),
    ("two axes", put("mesh", "axis_sizes", 0, value=10**9), r"axis_sizes\[0\]: .*not 1000000000"),
    (
        "two axes",
        put("mesh", "axis_sizes", value=[2, 4]),
        r"axis_sizes: .* are 8 devices; .* has 4",
    ),
    ("two axes", put("mesh", "axis_names", value=["x"]), r"at \$\.mesh: .*one size per axis"),
    (
        "two axes",
        put("mesh", "axis_names", 0, value="microbatch"),
        r"axis_names\[0\]: 'microbatch'",
    ),
    ("two axes", put("mesh", "axis_names", 0, value="a\x1bb"), r"axis_names\[0\]: .*control char"),
    (
        "two axes",
        put("graph", "fingerprint", value="\ud800"),
        r"\$\.graph\.fingerprint: .*surrogate",
    ),
    ("two axes", put("search", "gap", value=10**400), r"at \$\.search\.gap: a whole number of"),
    ("two axes", put("prediction", "step_time_s", value=0), r"at \$\.prediction\.step_time_s"),
    ("two axes", put("schedule", "num_devices", value=2), r"at \$\.schedule\.num_devices: 2 pipe"),
    ("two axes", put("schedule", "num_microbatches", value=3), r"num_microbatches: a batch of 8 c"),
    (
        "two axes",
        put("schedule", "num_microbatches", value=0),
        r"\.num_microbatches: it must be "
        "from 1",
    ),
    (
        "two axes",
        put("schedule", "num_microbatches", value=2**40),
        r"num_microbatches: .*from 1 to",
    ),
    (
        "two axes",
        put("kernels", value=[{"blocks": ["layer"], "compiled": ["F"]}]),
        r"\$\.kernels\[0\]\.blocks: 'layer' is no block",
    ),
    (
        "two axes",
        put("kernels", value=[{"blocks": ["embed"], "compiled": ["B"]}]),
        r"\$\.kernels\[0\]\.compiled\[0\]: Invalid enum value",
    ),
    (
        "two axes",
        put("kernels", value=[{"blocks": ["a", "a"], "compiled": []}]),
        r"\$\.kernels\[0\]\.blocks: block 'a' is listed twice",
    ),
    (
        "two axes",
        put("kernels", value=[{"blocks": ["a"], "compiled": [], "eager_s": {"F": -1}}]),
        r"\$\.kernels\[0\]\.eager_s\.F: it cannot be negative",
    ),
    ("pipeline", put("schedule", "first_blocks", 1, value="embed"), r"\$\.schedule\.first_blocks:"),
    ("pipeline", put("schedule", "actions", 4, value="device 1: 0F0"), r"schedule\.actions\[4\]: "),
    (
        "pipeline",
        put("schedule", "actions", 4, value="device 1: ?"),
        r"schedule\.actions\[4\]: .*5",
    ),
    ("pipeline", put("schedule", "actions", 1, value="a: b\nc: d"), r"actions\[1\]: .*one line"),
    (
        "pipeline",
        put("schedule", "actions", 1, value="num_microbatches: 999999999"),
        "micro-batches",
    ),
    ("pipeline", put("schedule", "name", value="gpipe"), r"at \$\.schedule\.name: it is 'gpipe'"),
    ("pipeline", without_backward, r"at \$\.schedule\.actions.*missing"),
    *(
        ("interleaved", put("recomputation", 0, field, value=value), rf"recomputation\[0\]\.{says}")
        for field, value, says in (
            ("blocks", [], "blocks: .*at least one block"),
            ("blocks", ["layers.0", "layers.0"], "blocks: .*'layers.0' is listed twice"),
            ("blocks", ["layers.x"], "blocks: 'layers.x' is no block of the graph"),
            ("kept", ["\ud800"], r"kept\[0\]: .*surrogate"),
            ("kept_bytes", -1, "kept_bytes: it cannot be negative"),
            ("default_bytes", -1, "default_bytes: it cannot be negative"),
            ("default_bytes", 10**400, "default_bytes: a whole number of"),
            ("time_s", -1e-9, "time_s: it cannot be negative"),
        )
    ),
    ("pipeline", put("cluster", "levels", 0, "size", value=-1), r"at \$\.cluster\.levels\[0\]: "),
]


def place_id(value: object) -> str | None:
    """Parametrised functions would be named by address, which differs between processes."""
    return value[:40] if isinstance(value, str) else None


@pytest.mark.parametrize(("kind", "change", "message"), PLACES, ids=place_id)
def test_what_is_wrong_is_named_with_its_place(
    kind: str, change: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        strategy_of(Plan.from_json(edited(change, kind)), make_case().captured)


def changed_text(old: str, new: str) -> str:
    text = make_case().plans["two axes"].to_json()
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed_text('"gap": 0.0', '"gap": NaN'), "no number NaN"),
        (lambda: changed_text('"gap": 0.0', '"gap": -Infinity'), "no number -Infinity"),
        (lambda: changed_text('"gap": 0.0', '"gap": 1e999'), r"\$\.search\.gap: .*not finite"),
        (lambda: changed_text('"gap": 0.0', f'"gap": {"9" * 9000}'), "not JSON"),
        (lambda: changed_text('"mesh": {', '"mesh": 1, "mesh": {'), r"at \$: key 'mesh' is giv"),
        (lambda: changed_text('"inputs": {', '"inputs": {"ids": "R R", '), "'ids' is given twice"),
        (lambda: changed_text('"gap": 0.0', '"gap": ' + "[" * 900_000), "levels deep"),
        (lambda: changed_text('"gap": 0.0', '"gap": ' + "[" * 40 + "]" * 40), "levels deep"),
        (lambda: changed_text('"gap": 0.0', '"gap": [' + "0," * 2_000_000), "more than 1,000,000"),
        (lambda: "{" + " " * (MAX_BYTES + 1), "the limit is"),
        (lambda: "{" * 1000, "not JSON"),
        (lambda: b"{\xff}", "byte 1 is not valid UTF-8"),
        (lambda: "{\ud800", "not JSON"),
        (lambda: b"", "not JSON"),
        (lambda: "\0", "cannot read"),
        (lambda: 3, "pass JSON text, its UTF-8 bytes, or the path"),
    ],
    ids=range(16),
)  # fmt: skip
@pytest.mark.timeout(20)
def test_text_that_no_plan_has_is_refused_at_once(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as refused:
        Plan.from_json(make())
    assert len(str(refused.value)) < 5000


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "huge", "missing"])
@pytest.mark.timeout(20)
def test_what_is_no_plans_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "plan.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    says = {"huge": "has 1,099,511,627,776 bytes", "missing": "No such file"}
    for read, error in ((Plan.from_json, PlanError), (Cluster.from_json, ClusterError)):
        with pytest.raises(error, match=says.get(kind, "not a regular file")):
            read(path)


@pytest.mark.timeout(20)
def test_a_schedule_of_any_size_is_refused_before_work_is_done_by_it() -> None:
    """The rules' work grows with the shape: a huge shape in a short text is rejected."""
    text = format_schedule(build("gpipe", num_stages=2, num_microbatches=2))
    many = parse_schedule(text.replace("num_microbatches: 2", "num_microbatches: 999999999"))
    with pytest.raises(ScheduleError, match="1999999998 backward passes alone"):
        verify(many)
    stages = " ".join(map(str, range(300_000)))

    def change(document: Any) -> None:
        document["schedule"]["actions"][2] = f"placement: {stages}"
        document["schedule"].update(num_stages=300_000, first_blocks=["x"] * 300_000)

    with pytest.raises(PlanError, match=r"\$\.schedule\.num_stages: it must be from 1 to 4,096"):
        Plan.from_json(edited(change, "pipeline"))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_whole_plan_is_accepted_as_text_bytes_and_file(tmp_path: Path, kind: str) -> None:
    plan = make_case().plans[kind]
    path = tmp_path / "plan.json"
    text = plan.to_json(path)
    for source in (text, "\ufeff" + text, text.encode(), text.encode("utf-8-sig"), path, str(path)):
        assert Plan.from_json(source) == plan


@pytest.mark.parametrize(
    "text", ["S0/0", "S0/", "S", "S-1", "S٣", "S0/²", "S0\n", " R", "", "S1/" + "9" * 5000, "Q"]
)
def test_a_placement_is_a_state_or_a_digit_of_a_dimension(text: str) -> None:
    with pytest.raises(PlanError, match="is not R, P, V, S<dim>"):
        parse_placement(text)


@pytest.mark.parametrize("text", ["m/0", "m/", "m/²", "m/٣", "m/-1", "0", "m/" + "9" * 5000, "+"])
def test_a_choice_is_a_dimension_or_a_digit_of_it(text: str) -> None:
    with pytest.raises(PlanError, match="is neither '-' nor 'dim' nor 'dim/base'"):
        parse_choice(text)
