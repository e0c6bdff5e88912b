"""The fields of a plan that are predicted: the numbers of a step, and its memory over time."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

from autopar.base.documents import path_of, shown
from autopar.plans.refusals import refused

_WHOLE = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?(e-?[0-9]{1,2})?")


Units = Literal["float64", "float32", "tensor_float32", "float16", "bfloat16", "float8"]
"""The units of a device for matrix products, by their field in `autopar.cost_models.PeakFlops`."""


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cost model's prediction of one training step on one device.

    Prices. ``sources`` counts the ops by the source of their price, ``num_noisy`` those priced from
    a noisy measurement. ``unpriced`` maps the operators that no cost model covers, priced by their
    memory traffic, to the reason. ``analytical_factor`` is the factor by which analytical prices
    may be off in either direction: the median, weighted by time, of the stated errors of the op
    families (None if every op is measured). ``communication_source`` is the weakest source among
    the plan's collectives and the messages between its stages (none without communication),
    ``update_source`` that of the updates (none without training); ``communication_is_noisy`` says
    that the measurement of a collective used is noisy. Copies of inputs are priced analytically.

    Times. ``communication_s`` is exposed communication, ``hidden_s`` overlapped communication,
    ``copies_s`` casts and copies that redistributions make on the device itself (see
    `autopar.pricing.step_time`). A pipeline's step is simulated: its other times are those of
    ``pipeline_rank``, the one that computes most, and ``bubble_share`` is the idle fraction of all
    devices.

    Memory is counted over the lowered graphs, with ``num_optimizer_states`` state tensors per
    parameter. ``resident_bytes`` (on CPUs) is the growth of the process: the tensors, memory that
    the allocator retains, and libraries.

    Utilisation. ``model_flops`` are defined in `autopar.pricing.utilisation`;
    ``model_flops_utilisation`` is their rate as a fraction of all devices' peak, which is that of
    the units that each product runs on: ``flops_shares``. ``tokens_per_s`` is None without token
    ids.
    """

    step_time_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    update_s: float
    sources: dict[str, int]
    communication_source: str
    unpriced: dict[str, str]
    memory_bytes: dict[str, int]
    memory_peak_at: str
    hidden_s: float = 0.0
    copies_s: float = 0.0
    pipeline_rank: int = 0
    bubble_share: float = 0.0
    resident_bytes: int | None = None
    model_flops: int = 0
    model_flops_utilisation: float = 0.0
    flops_shares: dict[Units, float] = {}
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    analytical_factor: float | None = None
    num_noisy: int = 0
    communication_is_noisy: bool = False
    update_source: str = "analytical"
    num_optimizer_states: int = 2


class CurvePoint(NamedTuple):
    """The bytes of each category from ``start_s`` on, at a place such as ``I`` and a block."""

    start_s: float
    size_bytes: tuple[int, ...]
    place: str


class MemoryCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory of a device over a step, on the pipeline rank that needs most; see
    `autopar.plans.memory_curve`.

    Each of the ``points`` is a text, so that it is one line of JSON: the seconds since the start of
    the step (of a pipeline's, those of computation), the bytes of each of the ``categories``, and
    the place. The step ends at ``end_s``. ``num_left_out`` equal micro-batches are one point, the
    fullest of them; of a pipeline they are left out.
    """

    categories: tuple[str, ...]
    points: tuple[str, ...]
    end_s: float
    num_left_out: int = 0

    def read(self) -> tuple[CurvePoint, ...]:
        """The points in order; raises PlanError with the JSON path of one that is none."""
        found: list[CurvePoint] = []
        for position, text in enumerate(self.points):
            start, *sizes = text.split(" ", len(self.categories) + 1)
            place = sizes.pop() if len(sizes) > len(self.categories) else ""
            earlier_s = found[-1].start_s if found else 0.0
            is_read = _DECIMAL.fullmatch(start) and all(map(_WHOLE.fullmatch, sizes)) and place
            if not is_read or not earlier_s <= float(start) <= self.end_s:
                raise refused(
                    f"{shown(text)} is no moment; write seconds that ascend, the bytes of the "
                    f"{len(self.categories)} categories, and the place",
                    path_of(("memory_curve", "points", position)),
                )
            found.append(CurvePoint(float(start), tuple(map(int, sizes)), place))
        return tuple(found)
