"""``build``: one name for every generator of schedules.

Comes in: a name, the number of stages and micro-batches, and the generator's own options. Goes out:
a ``Schedule`` that ``verify`` accepts.
"""

import inspect
from collections.abc import Callable
from typing import Any

from autopar.errors import ScheduleError
from autopar.schedules.chimera import chimera
from autopar.schedules.conventional import conventional
from autopar.schedules.dualpipe import dualpipe
from autopar.schedules.fast_forward import fast_forward
from autopar.schedules.gpipe import gpipe
from autopar.schedules.interleaved import interleaved
from autopar.schedules.multi_stream import multi_stream
from autopar.schedules.one_forward_one_backward import one_forward_one_backward
from autopar.schedules.reverse_first_k import reverse_first_k
from autopar.schedules.schedule import Schedule
from autopar.schedules.v_half import v_half
from autopar.schedules.v_min import v_min
from autopar.schedules.zb_h1 import zb_h1
from autopar.schedules.zb_h2 import zb_h2
from autopar.schedules.zb_v import zb_v

GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe": dualpipe,
    "chimera": chimera,
    "fast_forward": fast_forward,
    "conventional": conventional,
    "multi_stream": multi_stream,
    "reverse_first_k": reverse_first_k,
}


def build(name: str, *, num_stages: int, num_microbatches: int, **options: Any) -> Schedule:
    """The named schedule. ``num_stages`` counts model stages, all devices' together.

    Raises ScheduleError on an unknown name or option, or where the schedule does not exist for
    these numbers.
    """
    generator = GENERATORS.get(name) if isinstance(name, str) else None
    if generator is None:
        raise ScheduleError(f"no schedule is called {name!r}: use one of {sorted(GENERATORS)}")
    known = set(inspect.signature(generator).parameters) - {"num_stages", "num_microbatches"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ScheduleError(f"{name} takes the options {sorted(known)}, not {unknown}")
    if type(num_stages) is not int or type(num_microbatches) is not int:
        raise ScheduleError(
            f"num_stages={num_stages!r}, num_microbatches={num_microbatches!r}: whole numbers"
        )
    required = [
        p.name
        for p in inspect.signature(generator).parameters.values()
        if p.default is p.empty and p.name in known and p.name not in options
    ]
    if required:
        raise ScheduleError(f"{name} needs the option {required[0]}=..., which was not given")
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"num_stages={num_stages}, num_microbatches={num_microbatches}: at least 1 of each"
        )
    return generator(num_stages=num_stages, num_microbatches=num_microbatches, **options)
