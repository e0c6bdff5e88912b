"""``build``: schedules by name.

In: a name, the numbers of stages and micro-batches, and the generator's own options. Out: a
``Schedule`` that ``verify`` accepts.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from autopar.base.errors import ScheduleError
from autopar.base.spelling import did_you_mean
from autopar.schedules.generators.chimera import chimera
from autopar.schedules.generators.conventional import conventional
from autopar.schedules.generators.dualpipe import dualpipe
from autopar.schedules.generators.fast_forward import fast_forward
from autopar.schedules.generators.gems import gems
from autopar.schedules.generators.gpipe import gpipe
from autopar.schedules.generators.interleaved import interleaved
from autopar.schedules.generators.multi_stream import multi_stream
from autopar.schedules.generators.one_forward_one_backward import one_forward_one_backward
from autopar.schedules.generators.reverse_first_k import reverse_first_k
from autopar.schedules.generators.v_half import v_half
from autopar.schedules.generators.v_min import v_min
from autopar.schedules.generators.zb_h1 import zb_h1
from autopar.schedules.generators.zb_h2 import zb_h2
from autopar.schedules.generators.zb_v import zb_v
from autopar.schedules.schedule import Schedule

Generator = Callable[..., Schedule]
ONE_STAGE: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "gems": gems,
}
"""Pipelines with one stage per pipeline rank."""
TWO_STAGES: dict[str, Generator] = {"zb_v": zb_v, "v_half": v_half, "v_min": v_min}
"""Pipelines with two stages per pipeline rank."""
ANY_STAGES: dict[str, Generator] = {"interleaved": interleaved, "fast_forward": fast_forward}
"""Pipelines with any number of stages per pipeline rank."""
PIPELINES = {**ONE_STAGE, **TWO_STAGES, **ANY_STAGES}
GENERATORS: dict[str, Generator] = {
    **PIPELINES,
    "conventional": conventional,
    "multi_stream": multi_stream,
    "reverse_first_k": reverse_first_k,
}
_COUNTS = {"num_stages", "num_microbatches"}


def build(name: str, *, num_stages: int, num_microbatches: int, **options: Any) -> Schedule:
    """The named schedule. ``num_stages`` counts the model's stages, on all devices together.

    The options are those of the generator of that name: ``num_devices`` (interleaved,
    fast_forward), ``num_pipelines``, ``concatenation`` and ``max_activations`` (chimera),
    ``overlap`` (dualpipe), ``group_size`` and ``in_flight`` (fast_forward), ``k``
    (reverse_first_k), ``reduces`` (conventional, reverse_first_k), ``placement`` and
    ``region_size`` (multi_stream), and ``durations`` and ``links`` where these determine the order.
    For more micro-batches than stages chimera concatenates its units by ``concatenation="direct"``
    by default; at B = 2F ``"merged"`` is faster. Options that are not the defaults are part of the
    schedule's name: "chimera, 2 pairs, merged".

    Raises ScheduleError for an unknown name or option, an option of the wrong type, or if the
    schedule does not exist for these numbers.
    """
    generator = generator_of(name)
    known = dict(inspect.signature(generator).parameters)
    given = {"num_stages": num_stages, "num_microbatches": num_microbatches, **options}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ScheduleError(
            f"{name} takes the options {sorted(set(known) - _COUNTS)}, not {unknown}"
        )
    for option, value in given.items():
        if not _fits(value, known[option].annotation):
            raise ScheduleError(
                f"{name}: {option}={value!r} has the wrong type; it must be "
                f"{_type_name(known[option].annotation)}"
            )
    required = [key for key, item in known.items() if item.default is item.empty]
    for option in required:
        if option not in given:
            raise ScheduleError(f"{name} needs the option {option}=..., which was not given")
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"num_stages={num_stages}, num_microbatches={num_microbatches}: at least 1 of each"
        )
    return replace(generator(**given), name=described(name, options))


def described(name: str, options: Mapping[str, Any]) -> str:
    """The name of a schedule with the options that are not the defaults."""
    texts = {
        "num_pipelines": lambda count: f"{count // 2} pairs" if count > 2 else "",
        "concatenation": lambda way: "" if way == "direct" else str(way).replace("_", " "),
        "max_activations": lambda cap: f"at most {cap} activations" if cap is not None else "",
        "overlap": lambda overlaps: "overlapped" if overlaps else "",
        "group_size": lambda size: f"groups of {size}" if size > 1 else "",
        "in_flight": lambda cap: f"{cap} in flight" if cap is not None else "",
    }
    found = [text(options[key]) for key, text in texts.items() if key in options]
    return ", ".join([name, *filter(None, found)])


def generator_of(name: object, *, beside: tuple[str, ...] = ()) -> Callable[..., Schedule]:
    """The generator of that name; raises ScheduleError with a suggestion.

    ``beside``: further names that the caller takes.
    """
    found = GENERATORS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ScheduleError(
            f"no schedule is called {name!r}; use one of {sorted((*GENERATORS, *beside))}"
            + did_you_mean(str(name), (*GENERATORS, *beside))
        )
    return found


def _fits(value: Any, wanted: Any) -> bool:
    """Whether the value has the declared type; a bool is not an int."""
    if isinstance(wanted, UnionType):
        return any(_fits(value, part) for part in get_args(wanted))
    kind = get_origin(wanted) or wanted
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def _type_name(wanted: Any) -> str:
    parts = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    names = {int: "a whole number", str: "text", bool: "True or False", NoneType: "None"}
    return " or ".join(names.get(part, getattr(part, "__name__", str(part))) for part in parts)
