"""Tensor lifetimes of one training step, on which movement is planned, verified and simulated.

A step is a sequence of operations, numbered from 0. Each reads and writes tensors, which must be on
the device while it runs; in between they may be on the host. Activations, gradients, parameters and
optimizer states differ in nothing but the positions of their uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add

from autopar.base.errors import MovementError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One tensor: its size, and the operations that use it, in ascending order.

    ``writes`` are those of the ``uses`` that change its contents. A tensor that is not
    ``persistent`` is created by its first use and released after its last; a persistent one exists
    before the step and after it, in the same place. One that is not ``movable`` stays where it is.
    """

    name: str
    category: str
    size_bytes: int
    uses: tuple[int, ...]
    writes: tuple[int, ...]
    persistent: bool = False
    movable: bool = True

    def __post_init__(self) -> None:
        if not self.name or any(c.isspace() for c in self.name):
            raise MovementError(f"tensor name {self.name!r}: a name is one word without spaces")
        if self.size_bytes < 0:
            raise MovementError(f"tensor {self.name}: size_bytes={self.size_bytes} is negative")
        for field in ("uses", "writes"):
            positions = getattr(self, field)
            if positions != tuple(sorted(set(positions))):
                raise MovementError(
                    f"tensor {self.name}: {field}={positions} must ascend, each position once"
                )
        if not self.uses or not set(self.writes) <= set(self.uses):
            raise MovementError(
                f"tensor {self.name}: writes={self.writes} must be among uses={self.uses}, of "
                "which there must be one"
            )
        if not self.persistent and self.uses[0] not in self.writes:
            raise MovementError(
                f"tensor {self.name}: its first use, operation {self.uses[0]}, does not write it; "
                "pass persistent=True if it exists before the step"
            )

    @property
    def first(self) -> int:
        return self.uses[0]

    @property
    def last(self) -> int:
        return self.uses[-1]


@dataclass(frozen=True, kw_only=True)
class StepLifetimes:
    """All tensors of one training step on one device.

    ``ops`` are the names of the operations in order. ``workspace_bytes`` is what each needs while
    it runs, besides the tensors that it uses; it is never moved.
    """

    ops: tuple[str, ...]
    tensors: tuple[Lifetime, ...]
    workspace_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.workspace_bytes) != len(self.ops):
            raise MovementError(
                f"workspace_bytes has {len(self.workspace_bytes)} entries for {len(self.ops)} "
                "operations: give one each"
            )
        seen = set[str]()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise MovementError(f"tensor {tensor.name} is listed twice: names are unique")
            seen.add(tensor.name)
            if tensor.first < 0 or tensor.last >= len(self.ops):
                raise MovementError(
                    f"tensor {tensor.name}: uses={tensor.uses} must be in 0..{len(self.ops) - 1}"
                )

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The position of each tensor by name."""
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

    @cached_property
    def used_by(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each operation uses."""
        found: list[list[int]] = [[] for _ in self.ops]
        for index, tensor in enumerate(self.tensors):
            for op in tensor.uses:
                found[op].append(index)
        return tuple(map(tuple, found))

    def live_bytes(self) -> tuple[int, ...]:
        """Bytes on the device while each operation runs, if nothing moves."""
        change = [0] * (self.num_ops + 1)
        for tensor in self.tensors:
            start, stop = (
                (0, self.num_ops) if tensor.persistent else (tensor.first, tensor.last + 1)
            )
            change[start] += tensor.size_bytes
            change[stop] -= tensor.size_bytes
        return tuple(map(add, accumulate(change[:-1]), self.workspace_bytes))

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device if nothing moves."""
        return max(self.live_bytes(), default=0)


def step_of(
    num_ops: int, tensors: Sequence[Lifetime], workspace_bytes: Sequence[int] | None = None
) -> StepLifetimes:
    """A step whose operations are named after their numbers."""
    return StepLifetimes(
        ops=tuple(map(str, range(num_ops))),
        tensors=tuple(tensors),
        workspace_bytes=tuple(workspace_bytes or [0] * num_ops),
    )
