"""The device mesh: named axes over a flat list of ranks.

Ranks are laid out row-major: the last axis varies fastest, so neighbours along the last axis are
neighbours in rank, and on real machines neighbours on the fastest link. ``axis`` always means a
mesh axis here, ``dim`` a tensor dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.base.errors import DeviceError

MICROBATCH = "microbatch"
"""The micro-batch axis, an axis in time: the same devices compute its positions in sequence."""
PIPELINE = "pipeline"
"""The axis of pipeline ranks, outermost; each pipeline rank has a mesh of its own."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, outermost first: ``Mesh(("dp", "tp"), (2, 4))`` has 8 ranks."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.axis_sizes):
            raise DeviceError(
                f"a mesh needs one size per axis: names {self.axis_names}, sizes {self.axis_sizes}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise DeviceError(f"mesh axis names must differ: {self.axis_names}")
        for name, size in zip(self.axis_names, self.axis_sizes):
            if not name.isidentifier():
                raise DeviceError(f"mesh axis name {name!r} must be an identifier, such as 'dp'")
            if size < 1:
                raise DeviceError(f"mesh axis {name!r} has size {size}; it must be at least 1")

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes)

    @property
    def num_axes(self) -> int:
        return len(self.axis_sizes)

    @property
    def devices(self) -> Mesh:
        """The mesh without the micro-batch axis."""
        if MICROBATCH not in self.axis_names:
            return self
        assert self.axis_names[0] == MICROBATCH
        return Mesh(self.axis_names[1:], self.axis_sizes[1:])

    @property
    def num_microbatches(self) -> int:
        return self.axis_sizes[0] if MICROBATCH in self.axis_names else 1

    def repeated(self, num_devices: int) -> Mesh:
        """This mesh once per pipeline rank, along axis `PIPELINE`."""
        if num_devices == 1:
            return self
        return Mesh((PIPELINE, *self.axis_names), (num_devices, *self.axis_sizes))

    def is_sequential(self, axis: int) -> bool:
        """Whether the axis is that of micro-batches."""
        return self.axis_names[axis] == MICROBATCH

    def size(self, axes: Sequence[int]) -> int:
        """Number of ranks in a group over ``axes`` (positions)."""
        return math.prod(self.axis_sizes[a] for a in axes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of ``rank`` along each axis."""
        coordinate = []
        for size in reversed(self.axis_sizes):
            coordinate.append(rank % size)
            rank //= size
        return tuple(reversed(coordinate))

    def index(self, rank: int, axes: Sequence[int]) -> int:
        """Position of ``rank`` inside its group over ``axes``, the first axis slowest."""
        coordinate = self.coordinate(rank)
        index = 0
        for axis in axes:
            index = index * self.axis_sizes[axis] + coordinate[axis]
        return index

    def groups(self, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only along ``axes``, each in the order of `index`."""
        return _groups(self, tuple(axes))

    def axes_label(self, axes: Sequence[int]) -> str:
        """The axes as text, such as ``dp`` or ``dp,tp``: how a collective names its group."""
        return ",".join(self.axis_names[a] for a in axes)

    def axes_of(self, label: str) -> tuple[int, ...]:
        """Positions of the axes named in a label made by `axes_label`."""
        return tuple(self.axis_names.index(name) for name in label.split(","))

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.axis_sizes))


@lru_cache(maxsize=4096)
def _groups(mesh: Mesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.num_devices):
        coordinate = mesh.coordinate(rank)
        key = tuple(c for a, c in enumerate(coordinate) if a not in axes)
        groups.setdefault(key, []).append(rank)
    return tuple(
        tuple(sorted(group, key=lambda r: mesh.index(r, axes))) for group in groups.values()
    )
