"""The meshes that a plan may be searched on: the user's, or every factorisation of the devices.

A size of None leaves an axis to the search. In a pipeline each pipeline rank has such a mesh over
an equal share of the cluster's devices. A mesh of more than `MAX_WHOLE_AXES` axes, on which an op
has too many choices, is searched with adjacent axes merged: what splits a merged axis splits each
axis in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from autopar.base.errors import InputError
from autopar.cost_models import Cluster
from autopar.cost_models.hardware import is_count
from autopar.ir.mesh import MICROBATCH, PIPELINE, Mesh

MAX_AXES = 2
MAX_WHOLE_AXES = 3
AXIS_NAMES = ("x", "y", "z", "u", "v", "w")
MeshSizes: TypeAlias = Mapping[str, int | None]
"""Axis names and sizes, outermost first."""


def check_mesh(mesh: object) -> None:
    """Raise InputError unless ``mesh`` is None or maps at least one axis name to a size or None."""
    if mesh is None:
        return
    is_valid = (
        isinstance(mesh, Mapping)
        and mesh
        and all(isinstance(name, str) and name.isidentifier() for name in mesh)
        and not {MICROBATCH, PIPELINE} & mesh.keys()
        and all(size is None or is_count(size) for size in mesh.values())
    )
    if not is_valid:
        raise InputError(
            f"mesh is {mesh!r}; give axis names and sizes of at least 1, such as "
            f"mesh={{'dp': 2, 'tp': 4}}, or None for a size to be searched ({MICROBATCH!r} and "
            f"{PIPELINE!r} are reserved; use num_microbatches and num_stages)"
        )


def is_open(mesh: MeshSizes | None) -> bool:
    """Whether a size is left to the search."""
    return mesh is None or None in mesh.values()


def known_size(mesh: MeshSizes) -> int:
    """The product of the sizes that are given."""
    return math.prod(size for size in mesh.values() if size is not None)


def pipeline_device_counts(cluster: Cluster, mesh: MeshSizes | None) -> list[int]:
    """Numbers of pipeline ranks (1 means no pipeline) that leave each of them such a mesh."""
    total = cluster.num_devices
    counts = [n for n in range(1, total + 1) if total % n == 0]
    if mesh is None:
        return counts
    size = known_size(mesh)
    return [n for n in counts if (total // n % size == 0 if is_open(mesh) else total // n == size)]


def candidate_meshes(
    cluster: Cluster,
    mesh: MeshSizes | None,
    num_pipeline_devices: int = 1,
    *,
    kept_axes: Collection[str] = (),
) -> tuple[Mesh, ...]:
    """The user's mesh with its open sizes filled in, or every factorisation of the devices.

    Factorisations are ordered and have up to `MAX_AXES` factors. Later axes vary fastest, so they
    use the faster links. With many axes those but ``kept_axes`` are merged (see the module's
    docstring). Raises InputError if the sizes do not multiply to the number of devices.
    """
    check_mesh(mesh)
    total = cluster.num_devices // num_pipeline_devices
    if mesh is None:
        return tuple(
            Mesh(AXIS_NAMES[: len(sizes)], sizes)
            for count in range(1, MAX_AXES + 1)
            for sizes in _factorisations(total, count)
            if count == 1 or min(sizes) > 1
        )
    left, rest = divmod(total, known_size(mesh))
    num_open = sum(size is None for size in mesh.values())
    if rest or (left != 1 and not num_open):
        shared = f"the cluster {total}"
        if num_pipeline_devices > 1:
            shared = f"each of {num_pipeline_devices} pipeline ranks {total}"
        raise InputError(
            f"mesh {dict(mesh)} has {known_size(mesh)} devices, {shared}; the sizes must multiply "
            "to the number of devices, or leave some out as None"
        )
    found = []
    for filled in _factorisations(left, num_open):
        sizes = iter(filled)
        found.append(
            Mesh(tuple(mesh), tuple(next(sizes) if s is None else s for s in mesh.values()))
        )
    return tuple(dict.fromkeys(merged for each in found for merged in _merged(each, kept_axes)))


def _merged(mesh: Mesh, kept_axes: Collection[str]) -> Iterator[Mesh]:
    """The meshes with adjacent axes merged, of up to `MAX_AXES` axes or as few as can be."""
    if mesh.num_axes <= MAX_WHOLE_AXES:
        yield mesh
        return
    names = mesh.axis_names
    borders = range(1, mesh.num_axes)
    fixed = {b for b in borders if names[b - 1] in kept_axes or names[b] in kept_axes}
    free = [border for border in borders if border not in fixed]
    for count in range(max(0, MAX_AXES - 1 - len(fixed)) + 1):
        for chosen in itertools.combinations(free, count):
            ends = [0, *sorted(fixed.union(chosen)), mesh.num_axes]
            parts = list(itertools.pairwise(ends))
            yield Mesh(
                _joined([names[a:b] for a, b in parts]),
                tuple(math.prod(mesh.axis_sizes[a:b]) for a, b in parts),
            )


def _joined(parts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of merged axes: those of the axes in each, with more underscores where taken."""
    found = [part[0] if len(part) == 1 else "" for part in parts]
    for place, part in enumerate(parts):
        name = "_".join(part)
        while len(part) > 1 and name in found:
            name += "_"
        found[place] = name
    return tuple(found)


def _factorisations(total: int, count: int) -> list[tuple[int, ...]]:
    """Ordered factorisations into ``count`` factors, factors of 1 included."""
    if count == 0:
        return [()] if total == 1 else []
    if count == 1:
        return [(total,)]
    return [
        (first, *rest)
        for first in range(1, total + 1)
        if total % first == 0
        for rest in _factorisations(total // first, count - 1)
    ]
