"""Shards of a whole value, one for each rank, and the whole from its shards.

In: a whole tensor, its placements and the mesh. Out: the shard that a rank holds; or, from the
shards of all ranks, the whole. Nothing is communicated: the caller has all tensors. And the state
that ranks take their shards of, in portions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autopar.base.errors import InputError
from autopar.comm.ops import assemble, digit_slice, pad_end
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Placements, State, local_shape, paddings
from autopar.lowering.types import InputProgram, RankProgram

_PORTION_BYTES = 256 << 20


def scatter(whole: Tensor, placements: Placements, mesh: Mesh) -> list[Tensor]:
    """All ranks' shards of a whole value (R and S only)."""
    return [local_part(whole, placements, mesh, rank).clone() for rank in range(mesh.num_devices)]


def local_part(whole: Tensor, placements: Placements, mesh: Mesh, rank: int) -> Tensor:
    """The shard of a whole value that ``rank`` holds (R and S only), contiguous; may be a view.

    A shard that extends beyond the whole is padded with zeros.
    """
    part, coordinate = whole, mesh.coordinate(rank)
    for dim, padding in paddings(placements, whole.shape, mesh).items():
        part = pad_end(part, dim, padding)
    splits = [(p, a) for a, p in enumerate(placements) if p.state is State.SHARD]
    cut: dict[int, int] = {}
    # Outermost splits first: most are views then, and no copy is larger than the shard.
    for placement, axis in sorted(splits, key=lambda s: s[0].outer):
        dim, num = placement.dim, mesh.axis_sizes[axis]
        outer = placement.outer // cut.setdefault(dim, 1)
        part = digit_slice(part, num, coordinate[axis], dim, outer)
        cut[dim] *= num
    return part.contiguous()


def microbatch_of(tensor: Tensor, source: InputProgram, num: int, index: int) -> Tensor:
    """Micro-batch ``index`` of an input, or of one rank's shard of it."""
    cut = source.microbatch
    return tensor if cut is None else digit_slice(tensor, num, index, cut.dim, cut.outer)


def local_input_shape(source: InputProgram, program: RankProgram) -> tuple[int, ...]:
    """The shape of one rank's shard of an input, with all micro-batches."""
    part = list(local_shape(source.part(program.num_microbatches), source.placements, program.mesh))
    if source.microbatch is not None:
        part[source.microbatch.dim] *= program.num_microbatches
    return tuple(part)


def gather(
    shards: Sequence[Tensor], placements: Placements, shape: Sequence[int], mesh: Mesh
) -> Tensor:
    """The whole value, of ``shape``, from one shard per rank (R, S and P)."""
    current = {mesh.coordinate(r): shard for r, shard in enumerate(shards)}
    splits = [(p, a) for a, p in enumerate(placements) if p.state is State.SHARD]
    order = [a for _, a in sorted(splits, key=lambda s: s[0].outer)]
    order += [a for a, p in enumerate(placements) if p.state is not State.SHARD]
    for axis in order:
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for coordinate in sorted(current):
            key = (*coordinate[:axis], 0, *coordinate[axis + 1 :])
            groups.setdefault(key, []).append(current[coordinate])
        current = {key: _join(parts, placements[axis]) for key, parts in groups.items()}
    (whole,) = current.values()
    return without_padding(whole, shape)


def without_padding(padded: Tensor, shape: Sequence[int]) -> Tensor:
    """The leading part of ``shape``, a view."""
    for dim, size in enumerate(shape):
        padded = padded.narrow(dim, 0, min(size, padded.shape[dim]))
    return padded


def _join(parts: list[Tensor], placement: Placement) -> Tensor:
    if placement.state is State.SHARD:
        return assemble(torch.stack(parts), placement.dim, placement.outer)
    return reduced(parts) if placement.state is State.PARTIAL else parts[0]


def reduced(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the shards in their own dtype."""
    stacked = torch.stack(list(parts))
    if stacked.is_complex():  # torch cannot add up complex32
        return torch.view_as_complex(torch.view_as_real(stacked).sum(0))
    return stacked.sum(0).to(parts[0].dtype)


def holder(placements: Placements, mesh: Mesh, rank: int) -> int:
    """The first rank that holds the same shard as ``rank``."""
    coordinate = mesh.coordinate(rank)
    first = 0
    for axis, placement in enumerate(placements):
        kept = coordinate[axis] if placement.state is State.SHARD else 0
        first = first * mesh.axis_sizes[axis] + kept
    return first


def is_split(placements: Placements, mesh: Mesh) -> bool:
    """Whether any rank holds less than the whole."""
    return any(p.state is State.SHARD and size > 1 for p, size in zip(placements, mesh.axis_sizes))


def is_padded(source: InputProgram, program: RankProgram) -> bool:
    """Whether an input does not divide into its shards."""
    shape = source.part(program.num_microbatches)
    return any(paddings(source.placements, shape, program.mesh).values())


def check_splits(program: RankProgram) -> None:
    """Raise InputError unless ranks hold parts of an input."""
    if not any(is_split(i.placements, program.mesh) for i in program.inputs):
        raise InputError(
            "local=True, but the plan splits no input: every rank reads the whole batch. Pass the "
            "global batch without local=True"
        )


def check_local_inputs(program: RankProgram, tensors: Iterable[Tensor]) -> None:
    """Raise InputError unless each tensor is a shard of an input, and one input is split."""
    check_splits(program)
    for program_input, tensor in zip(program.inputs, tensors):
        shape = local_input_shape(program_input, program)
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"input {program_input.name!r} has shape {tuple(tensor.shape)}; with local=True "
                f"each rank passes its own part, of shape {shape}, of the global "
                f"{program_input.shape}"
            )


def needed_state(program: RankProgram, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state that a program reads: parameters, and buffers that are no constants."""
    constants = dict(program.constants)
    names = [p.name for p in program.parameters]
    names += [b.name for b in program.buffers if b.name not in constants]
    return {name: state[name].detach() for name in names}


def portions(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Split the state into portions, which bounds the shared memory in use."""
    portion: dict[str, Tensor] = {}
    size_bytes = 0
    for name, tensor in state.items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if portion and size_bytes + tensor_bytes > _PORTION_BYTES:
            yield portion
            portion, size_bytes = {}, 0
        portion[name] = tensor.cpu()
        size_bytes += tensor_bytes
    if portion:
        yield portion
