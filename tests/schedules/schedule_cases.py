"""Schedules and costs shared by the tests of this folder."""

from typing import Any

from hypothesis import strategies as st

from autopar.base.errors import ScheduleError
from autopar.schedules import Durations, Schedule, build

# (generator, stages a device): each once, with every way in which Chimera joins units
VARIANTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gpipe", 1, {}),
    ("1f1b", 1, {}),
    ("interleaved", 2, {}),
    ("zb_h1", 1, {}),
    ("zb_h2", 1, {}),
    ("zb_v", 2, {}),
    ("v_half", 2, {}),
    ("v_min", 2, {}),
    ("dualpipe", 1, {}),
    ("dualpipe", 1, {"overlap": True}),
    ("chimera", 1, {"concatenation": "direct"}),
    ("chimera", 1, {"concatenation": "forward_doubling"}),
    ("chimera", 1, {"concatenation": "backward_halving"}),
    ("chimera", 1, {"concatenation": "merged"}),
    ("gems", 1, {}),
    ("fast_forward", 2, {}),
    ("conventional", 1, {"reduces": True}),
    ("multi_stream", 1, {}),
    ("reverse_first_k", 1, {"k": 2}),
)

# compute on the main stream only: lists are the whole story
PLAIN = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe")


def variant(
    name: str, per_device: int, options: dict[str, Any], devices: int, batches: int
) -> Schedule | None:
    """The schedule, or None if the generator rejects its parameters."""
    try:
        return build(name, num_stages=per_device * devices, num_microbatches=batches, **options)
    except ScheduleError:
        return None


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] | None = None) -> Schedule:
    """Any generator's schedule on 2, 4 or 6 devices with 1 to 12 micro-batches.

    With ``names``, of these generators and on the main stream only.
    """
    choices = [
        item
        for item in VARIANTS
        if names is None or (item[0] in names and not item[2].get("overlap"))
    ]
    name, per_device, options = draw(st.sampled_from(choices))
    devices = draw(st.sampled_from((2, 4, 6)))
    batches = draw(st.integers(1, 12))
    built = variant(name, per_device, options, devices, batches)
    if built is None:
        built = variant(name, per_device, options, devices, 2 * devices)
    assert built is not None
    return built


@st.composite
def stage_durations(draw: st.DrawFn, num_stages: int) -> Durations:
    """Unequal stage times in whole seconds."""
    costs = st.lists(st.integers(1, 12), min_size=num_stages, max_size=num_stages)
    return Durations(F=draw(costs), I=draw(costs), W=draw(costs))
