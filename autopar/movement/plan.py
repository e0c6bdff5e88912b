"""Movement plans: after which operation a tensor leaves the device, and before which it is back.

It stands beside a schedule as the order of a step's transfers between device and host. The rules
that `verify` and `simulate` share:

* a transfer starts after operation ``after`` has ended (``START``: with the step);
* the transfers of one way run in the order of the list, each way on a stream of its own;
* a load also waits for all offloads listed before it: its memory may be theirs;
* operation ``before`` waits for the transfer, an offload's because it needs the memory;
* the step ends when all transfers have.

A tensor whose host copy is up to date is dropped instead of copied again. Plans are text, one
transfer a line, and JSON; both are read back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from autopar.base.documents import DocumentError, convert, load, text_of
from autopar.base.errors import MovementError

START = -1
"""In place of an operation: the start of the step."""
SCHEMA_VERSION = 1


class Way(StrEnum):
    """The direction of a transfer and the name of its stream, or a drop, which copies nothing."""

    TO_HOST = "to_host"
    FROM_HOST = "from_host"
    DROP = "drop"  # the host's copy is up to date


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer: it starts after operation ``after`` and has ended before ``before``."""

    tensor: str
    way: Way
    after: int
    before: int | None = None

    def __post_init__(self) -> None:
        if not self.tensor or any(c.isspace() for c in self.tensor):
            raise MovementError(f"tensor name {self.tensor!r}: a name is one word without spaces")
        if self.after < START:
            raise MovementError(f"{self}: 'after' is an operation, or {START} for the start")
        if self.before is not None and self.before <= self.after:
            raise MovementError(f"{self}: 'before' must be later than 'after'")
        if self.way is Way.FROM_HOST and self.before is None:
            raise MovementError(f"{self}: a load names the operation that it must precede")
        if self.way is Way.DROP and self.before is not None:
            raise MovementError(f"{self}: a drop takes no time, so leave 'before' out")

    def __str__(self) -> str:
        after = "start" if self.after == START else self.after
        before = "" if self.before is None else f" before {self.before}"
        return f"{self.way} {self.tensor} after {after}{before}"


_LINE = re.compile(
    r"(?P<way>to_host|from_host|drop) (?P<tensor>\S+) after (?P<after>start|0|[1-9][0-9]{0,8})"
    r"(?: before (?P<before>0|[1-9][0-9]{0,8}))?"
)


def parse_transfer(text: str) -> Transfer:
    """Parse the text of a Transfer, ``to_host relu after 3 before 5``. Raises MovementError."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise MovementError(
            f"{text!r} is not a transfer: write 'to_host relu after 3 before 5', "
            "'from_host relu after 7 before 9' or 'drop weight after 2'"
        )
    return Transfer(
        tensor=match["tensor"],
        way=Way(match["way"]),
        after=START if match["after"] == "start" else int(match["after"]),
        before=None if match["before"] is None else int(match["before"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MovementPlan:
    """The transfers of a step of ``num_ops`` operations, in order of issue.

    ``starts_on_host`` are the persistent tensors that are on the host when a step starts, and so
    when it ends.
    """

    num_ops: int
    starts_on_host: tuple[str, ...]
    transfers: tuple[Transfer, ...]

    def moved_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes copied in a step, both ways together."""
        return sum(sizes[t.tensor] for t in self.transfers if t.way is not Way.DROP)

    def __str__(self) -> str:
        return format_plan(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON, also written to ``path`` if given."""
        fields = msgspec.to_builtins(MovementFields.of(self))
        text = json.dumps({"schema_version": SCHEMA_VERSION, **fields}, indent=1) + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    @staticmethod
    def from_json(source: object) -> MovementPlan:
        """Read JSON text, bytes or a file. Raises MovementError with the path of a bad value."""
        try:
            document = convert(load(text_of(source)), _Document)
        except DocumentError as error:
            raise MovementError(f"not a movement plan: {error}") from error
        if document.schema_version != SCHEMA_VERSION:
            raise MovementError(
                f"movement plan of schema version {document.schema_version}: this release reads "
                f"version {SCHEMA_VERSION}; plan again"
            )
        return document.plan()


class MovementFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields of a movement plan in JSON, its transfers as text."""

    num_ops: int
    starts_on_host: tuple[str, ...]
    transfers: tuple[str, ...]

    @staticmethod
    def of(plan: MovementPlan) -> MovementFields:
        return MovementFields(
            num_ops=plan.num_ops,
            starts_on_host=plan.starts_on_host,
            transfers=tuple(map(str, plan.transfers)),
        )

    def plan(self) -> MovementPlan:
        """The plan; raises MovementError for text that is no transfer."""
        return MovementPlan(
            num_ops=self.num_ops,
            starts_on_host=self.starts_on_host,
            transfers=tuple(map(parse_transfer, self.transfers)),
        )


class _Document(MovementFields, forbid_unknown_fields=True, frozen=True, kw_only=True):
    schema_version: int


def format_plan(plan: MovementPlan) -> str:
    """The plan's text: two header lines, then one line per transfer."""
    lines = [f"num_ops: {plan.num_ops}", " ".join(["starts_on_host:", *plan.starts_on_host])]
    return "\n".join([*lines, *map(str, plan.transfers)]) + "\n"


def parse_plan(text: str) -> MovementPlan:
    """Parse the text of ``format_plan``. Raises MovementError naming the line."""
    lines = text.splitlines()
    counts = re.fullmatch(r"num_ops: (0|[1-9][0-9]{0,8})", lines[0]) if lines else None
    if counts is None:
        raise MovementError("line 1 of a movement plan is 'num_ops: 12'")
    key, *on_host = lines[1].split(" ") if len(lines) > 1 else [""]
    if key != "starts_on_host:":
        raise MovementError("line 2 of a movement plan is 'starts_on_host: weight bias'")
    transfers = []
    for number, line in enumerate(lines[2:], start=3):
        try:
            transfers.append(parse_transfer(line))
        except MovementError as error:
            raise MovementError(f"line {number}: {error}") from error
    return MovementPlan(
        num_ops=int(counts[1]), starts_on_host=tuple(on_host), transfers=tuple(transfers)
    )
