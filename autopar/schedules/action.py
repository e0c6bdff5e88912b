"""The unit of every schedule: an action, and its text form.

In: text such as ``2F0``. Out: an ``Action``, a small hashable tuple. Tests, errors, profiler
labels, reports, saved plans and the runtime all use this one notation.

The text is ``{stage}[.{replica}]{kind}[{micro-batch}[-{last micro-batch}]]``:

- ``2F0`` stage 2, forward, micro-batch 0 (replica 0 is omitted)
- ``2.1B5``    replica 1 of stage 2, full backward, micro-batch 5
- ``0F4-5``    one forward over micro-batches 4 and 5 (Chimera's doubled forward)
- ``3G``       reduction of stage 3's gradients, over all micro-batches
"""

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from autopar.base.errors import ScheduleError


class Kind(StrEnum):
    """The kinds of action; F, I, W, B and sends are named as in torch.distributed.pipelining."""

    F = "F"  # forward
    I = "I"  # noqa: E741  gradient of the inputs
    W = "W"  # gradient of the weights
    B = "B"  # I and W in one
    R = "R"  # recomputation of the activations that F released
    G = "G"  # reduction of a stage's gradients over its replicas and data-parallel ranks
    U = "U"  # update of a stage's weights
    O = "O"  # noqa: E741  offload of an activation to the host
    L = "L"  # load of it from the host
    SEND_F = "SEND_F"  # this stage's output to the next stage
    RECV_F = "RECV_F"  # this stage's input from the previous stage
    SEND_B = "SEND_B"  # gradient of this stage's input to the previous stage
    RECV_B = "RECV_B"  # gradient of this stage's output from the next stage

    @property
    def per_stage(self) -> bool:
        """Whether the kind acts on a stage as a whole, not on a micro-batch."""
        return self in (Kind.G, Kind.U)


COMPUTE_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.R)
SEND_KINDS = (Kind.SEND_F, Kind.SEND_B)
RECV_KINDS = (Kind.RECV_F, Kind.RECV_B)

_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_TEXT = re.compile(
    rf"(?P<stage>{_NUMBER})(?:\.(?P<replica>(?!0){_NUMBER}))?(?P<kind>{_KINDS})"
    rf"(?:(?P<first>{_NUMBER})(?:-(?P<last>{_NUMBER}))?)?"
)


class Action(NamedTuple):
    """One action: hashable, ordered, equal by value; ``str`` and ``parse_action`` are inverses.

    ``microbatch`` is the first of ``span`` consecutive micro-batches, or None for G and U, which
    act on the stage as a whole. ``replica`` distinguishes the copies of a stage (Chimera's
    pipelines).
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    span: int = 1
    replica: int = 0

    def __str__(self) -> str:
        replica = f".{self.replica}" if self.replica else ""
        batch = "" if self.microbatch is None else str(self.microbatch)
        if self.microbatch is not None and self.span > 1:
            batch += f"-{self.microbatch + self.span - 1}"
        return f"{self.stage}{replica}{self.kind.value}{batch}"

    def __repr__(self) -> str:
        return f"Action({str(self)!r})"

    @property
    def microbatches(self) -> range:
        """The micro-batches that the action covers; empty for G and U."""
        if self.microbatch is None:
            return range(0)
        return range(self.microbatch, self.microbatch + self.span)


def parse_action(text: str) -> Action:
    """Parse the text of an Action, ``2F0``. Raises ScheduleError for anything else."""
    if not isinstance(text, str):
        raise ScheduleError(f"{text!r} is not an action: write it as text, for example '2F0'")
    return _parse(text)


@lru_cache(maxsize=1 << 16)
def _parse(text: str) -> Action:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is not an action: write it as stage, kind, micro-batch, for example "
            f"'2F0', '2.1B5' (replica 1), '0F4-5' (micro-batches 4 and 5) or '3G'; the kinds are "
            f"{', '.join(kind.value for kind in Kind)}"
        )
    kind = Kind(match["kind"])
    first = None if match["first"] is None else int(match["first"])
    span = 1 if match["last"] is None else int(match["last"]) - int(match["first"]) + 1
    if (first is None) != kind.per_stage:
        need = "takes no micro-batch" if kind.per_stage else "needs a micro-batch"
        raise ScheduleError(f"{text!r}: kind {kind.value} {need}")
    if match["last"] is not None and span < 2:
        raise ScheduleError(
            f"{text!r}: a range of micro-batches must grow; write a single one as '0F4'"
        )
    return Action(int(match["stage"]), kind, first, span, int(match["replica"] or 0))
