"""Axis-named collectives on this rank: one group of ranks per axes label.

In: a mesh, this process's rank and the labels that a program uses. Out: for each raw op of
`autopar.comm.ops` a plain function of a local tensor. Shards are laid out contiguously for the wire
by ``disassemble`` and read back by ``assemble``; a contiguous split of dimension 0 already has the
layout of the wire, so it is received straight into the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.base.errors import DeviceError
from autopar.comm.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_MAX,
    ALL_TO_ALL,
    AXIS_INDEX,
    MASK,
    REDUCE_SCATTER,
    SHARD,
    UNSHARD,
    assemble,
    digit_slice,
    disassemble,
    is_overwritable,
)
from autopar.comm.timed import TimedCollectives, Waits
from autopar.comm.transports.alone import AloneCollectives
from autopar.comm.transports.base import CollectiveTransport, Messages, Reduction
from autopar.comm.transports.ports import sealed
from autopar.comm.transports.registry import open_collectives, open_messages
from autopar.ir.mesh import MICROBATCH, Mesh

LocalFunction = Callable[[Tensor], Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks along some axes of the mesh, this rank's position there, and their collectives."""

    size: int
    index: int
    label: str
    collectives: TimedCollectives


class TimedGroup:
    """Positions on the micro-batch axis and any device axes after it; it never communicates."""

    def __init__(self, communicator: Communicator, label: str) -> None:
        axes = label.partition(",")[2]
        self._communicator = communicator
        self._devices = communicator.group(axes) if axes else None
        self._num_devices: int = self._devices.size if self._devices else 1
        self.label = label

    @property
    def size(self) -> int:
        """The positions, of the program that runs now."""
        return self._communicator.num_microbatches * self._num_devices

    @property
    def index(self) -> int:
        """Position of the current micro-batch."""
        inside = self._devices.index if self._devices else 0
        return self._communicator.microbatch * self._num_devices + inside


AnyGroup = Group | TimedGroup


class Communicator:
    """This rank's groups over the mesh of its pipeline rank.

    Construction is collective: all ranks pass the same labels and device sets. ``num_microbatches``
    and ``microbatch`` are of the program that runs now, set by whoever runs it. ``mesh`` and
    ``rank`` are those within this pipeline rank, which is ``pipeline_device`` of ``num_devices``.
    With ``reduces_late``, gradients have groups of their own: a group executes its collectives in
    order, and those of the next step must not queue behind the last reductions of this one.
    ``waits`` notes the waits in all of its collectives. ``world_rank`` is this rank's number among
    all ``num_ranks`` of the job.

    The only rank of a mesh is alone in a process without a process group (``is_alone``): there is
    nothing to communicate, and `device_mesh` is None.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        labels: Iterable[str],
        *,
        num_devices: int = 1,
        device_sets: Iterable[tuple[int, ...]] = (),
        reduces_late: bool = False,
    ) -> None:
        world = mesh.repeated(num_devices)
        self.is_alone = world.num_devices == 1 and not dist.is_initialized()
        self.num_ranks = 1 if self.is_alone else dist.get_world_size()
        self.world_rank = 0 if self.is_alone else dist.get_rank()
        if self.num_ranks != world.num_devices:
            raise DeviceError(
                f"the mesh {world} has {world.num_devices} ranks but the process group has "
                f"{self.num_ranks}; start as many processes as the plan has devices: "
                f"torchrun --nproc-per-node={world.num_devices} train.py"
            )
        self.mesh = mesh
        self.device = device
        self.world = world
        self.num_devices = num_devices
        self.pipeline_device, self.rank = divmod(self.world_rank, mesh.num_devices)
        self.device_mesh: DeviceMesh | None = None
        if not self.is_alone:
            made = device_mesh(world, device.type)
            self.device_mesh = made if num_devices == 1 else made[mesh.axis_names]
        self.num_microbatches = 1
        self.microbatch = 0
        self.reduces_late = reduces_late
        self.waits = Waits()
        self._groups: dict[str, AnyGroup] = {}
        self._over_devices: dict[tuple[int, ...], TimedCollectives] = {}
        self.messages: Messages | None = None
        for label in sorted(set(labels)):
            self.group(label)
        if num_devices > 1:
            every = tuple(range(num_devices))
            for devices in sorted({every, *device_sets}):
                group = self._device_group(devices)
                self._over_devices[devices] = self._timed(group, must_overlap=True)
            self.messages = _messages(self._device_group(every), device.type)

    def group(self, label: str) -> AnyGroup:
        """The group of a label; the first call for a label is collective."""
        if label not in self._groups and label.split(",")[0] == MICROBATCH:
            self._groups[label] = TimedGroup(self, label)
        if label not in self._groups:
            axes = self.world.axes_of(label)
            self._groups[label] = Group(
                size=self.world.size(axes),
                index=self.world.index(self.world_rank, axes),
                label=label,
                collectives=self._opened(axes),
            )
        return self._groups[label]

    def _opened(self, axes: tuple[int, ...]) -> TimedCollectives:
        if self.is_alone:
            return TimedCollectives(AloneCollectives(), self.waits)
        if len(axes) == 1:
            return self._timed(device_mesh(self.world, self.device.type).get_group(axes[0]))
        return self._timed(_joint_group(self.world.groups(axes), self.world_rank))

    def from_all_ranks(self, own: T) -> list[T]:
        """The objects of all ranks of the job, by rank. Collective."""
        if self.is_alone:
            return [own]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, own)
        return found

    def _timed(self, process_group: Any, *, must_overlap: bool = False) -> TimedCollectives:
        opened = _collectives(process_group, self.device.type, must_overlap=must_overlap)
        return TimedCollectives(opened, self.waits)

    def collectives(self, label: str) -> TimedCollectives:
        """The collectives over the axes of a label; collective where they are new."""
        group = self.group(label)
        assert isinstance(group, Group), "nothing is communicated along the micro-batch axis"
        return group.collectives

    def gradient_collectives(self, label: str) -> TimedCollectives:
        """The collectives for reductions of gradients; collective where they are new."""
        usual = self.collectives(label)
        if not self.reduces_late or not usual.transport.traits.overlaps:
            return usual
        groups = self.world.groups(self.world.axes_of(label))
        process_group = _new_group(groups, self.world_rank, "gradients")
        return self._timed(process_group, must_overlap=True)

    def _device_group(self, devices: tuple[int, ...]) -> Any:
        """The process group of this mesh position on some devices of the pipeline."""
        size = self.mesh.num_devices
        groups = tuple(tuple(d * size + rank for d in devices) for rank in range(size))
        return _joint_group(groups, self.world_rank)

    def over_devices(self, devices: tuple[int, ...]) -> TimedCollectives:
        """The collectives between the ranks of this mesh position on some pipeline devices."""
        return self._over_devices[devices]

    def bind(self, op: Any, label: str, *static: int) -> LocalFunction:
        """A raw op with its static arguments (after ``num``) as a function of a local tensor."""
        function = _MAKERS[op](self.group(label), *static)
        function.__name__ = f"{op.name().split('::')[1].split('.')[0]}_{label.replace(',', '_')}"
        function.__module__ = __name__
        return function

    def bind_in_place(self, label: str) -> LocalFunction:
        """``all_reduce`` of a tensor that has no other reader and may be overwritten."""
        group = self.group(label)
        assert isinstance(group, Group), "the micro-batch axis has no all-reduce"
        function = _all_reduce_in_place(group)
        function.__name__ = f"all_reduce__{label.replace(',', '_')}"
        function.__module__ = __name__
        return function


class _Known:
    """Meshes and groups of the current default process group, shared by all programs."""

    def __init__(self) -> None:
        self.world: Any = None
        self.meshes: dict[tuple[str, Mesh], DeviceMesh] = {}
        self.groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Any] = {}
        self.collectives: dict[tuple[Any, str, bool], CollectiveTransport] = {}
        self.messages: dict[tuple[Any, str], Messages] = {}

    def of_this_world(self) -> _Known:
        if self.world is not dist.group.WORLD:
            self.__init__()  # type: ignore[misc]
            self.world = dist.group.WORLD
        return self


_KNOWN = _Known()


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """torch's `DeviceMesh` with our axis names; the first call for a mesh is collective."""
    known = _KNOWN.of_this_world().meshes
    if (device_type, mesh) not in known:
        with sealed(dist.get_backend_config()):
            known[device_type, mesh] = init_device_mesh(
                device_type, mesh.axis_sizes, mesh_dim_names=mesh.axis_names
            )
    return known[device_type, mesh]


def _joint_group(groups: tuple[tuple[int, ...], ...], rank: int) -> Any:
    """This rank's group among ``groups``; all ranks create all of them, in the same order."""
    if len(groups) == 1 and groups[0] == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    return _new_group(groups, rank, "all")


def _new_group(groups: tuple[tuple[int, ...], ...], rank: int, purpose: str) -> Any:
    """Like `_joint_group`, but always a new group, one per purpose."""
    known = _KNOWN.of_this_world().groups
    if (purpose, groups) not in known:
        assert all(list(group) == sorted(group) for group in groups), groups
        own = None
        with sealed(dist.get_backend_config()):
            for group in groups:
                made = dist.new_group(list(group))
                own = made if rank in group else own
        known[purpose, groups] = own
    return known[purpose, groups]


def _collectives(
    process_group: Any, device_type: str, *, must_overlap: bool = False
) -> CollectiveTransport:
    known, key = _KNOWN.of_this_world().collectives, (process_group, device_type, must_overlap)
    if key not in known:
        known[key] = open_collectives(process_group, device_type, must_overlap=must_overlap)
    return known[key]


def release_message_buffers() -> None:
    """Release the buffers of earlier programs' messages.

    The other ranks' share of them goes when they have said so: call it again after they all have.
    """
    for messages in _KNOWN.of_this_world().messages.values():
        messages.drop_unused()


def _messages(process_group: Any, device_type: str) -> Messages:
    """The messages of a group; the buffers of earlier programs' messages are released."""
    known, key = _KNOWN.of_this_world().messages, (process_group, device_type)
    release_message_buffers()
    if key not in known:
        known[key] = open_messages(process_group, device_type)
    return known[key]


def _reduced(x: Tensor, group: Group, reduction: Reduction = Reduction.SUM) -> Tensor:
    """Reduce in place over the group."""
    group.collectives.all_reduce(x, reduction)()
    return x


def _all_reduce(group: Group, reduction: Reduction = Reduction.SUM) -> LocalFunction:
    def all_reduce(x: Tensor) -> Tensor:
        if x.dtype is torch.bool:  # the sum of booleans is a logical or; as bytes it would count
            copy = x.to(torch.uint8, memory_format=torch.contiguous_format)
            return _reduced(copy, group, Reduction.MAX).to(torch.bool)
        return _reduced(x.clone(memory_format=torch.contiguous_format), group, reduction)

    return all_reduce


def _all_reduce_in_place(group: Group) -> LocalFunction:
    copying = _all_reduce(group)

    def all_reduce(x: Tensor) -> Tensor:
        if is_overwritable(x):
            return _reduced(x, group)
        return copying(x)

    return all_reduce


def _all_reduce_max(group: Group) -> LocalFunction:
    return _all_reduce(group, Reduction.MAX)


def _wire(x: Tensor) -> Tensor:
    """Booleans are sent as bytes, which every backend supports."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x


def _all_gather(group: Group, dim: int, outer: int) -> LocalFunction:
    num = group.size

    def gather(whole: Tensor, own: Tensor) -> None:
        group.collectives.all_gather(_wire(whole), _wire(own))()

    def all_gather(x: Tensor) -> Tensor:
        if dim == 0 and outer == 1:
            whole = x.new_empty((num * x.shape[0], *x.shape[1:]))
            gather(whole, x.contiguous())
            return whole
        parts = x.new_empty((num, *x.shape))
        gather(parts, x.contiguous().unsqueeze(0))
        return assemble(parts, dim, outer)

    return all_gather


def _reduce_scatter(group: Group, dim: int, outer: int) -> LocalFunction:
    num = group.size

    def reduce_scatter(x: Tensor) -> Tensor:
        if x.dtype is torch.bool:
            return reduce_scatter(x.to(torch.int32)).to(torch.bool)
        parts = disassemble(x, num, dim, outer)
        return group.collectives.reduce_scatter(parts.view(-1))().view(parts.shape[1:])

    return reduce_scatter


def _all_to_all(
    group: Group, src_dim: int, src_outer: int, dst_dim: int, dst_outer: int
) -> LocalFunction:
    num = group.size

    def all_to_all(x: Tensor) -> Tensor:
        sent = disassemble(x, num, dst_dim, dst_outer)
        received = torch.empty_like(sent)
        group.collectives.all_to_all(_wire(received), _wire(sent))
        return assemble(received, src_dim, src_outer)

    return all_to_all


def _shard(group: AnyGroup, dim: int, outer: int) -> LocalFunction:
    if dim == 0 and outer == 1:

        def shard_rows(x: Tensor) -> Tensor:
            size = x.shape[0] // group.size
            return x.narrow(0, group.index * size, size)

        return shard_rows

    def shard(x: Tensor) -> Tensor:
        return digit_slice(x, group.size, group.index, dim, outer).contiguous()

    return shard


def _unshard(group: AnyGroup, dim: int, outer: int) -> LocalFunction:
    def unshard(x: Tensor) -> Tensor:
        shape, num = x.shape, group.size
        inner = shape[dim] // outer
        split = (*shape[:dim], outer, num, inner, *shape[dim + 1 :])
        whole = x.new_zeros(split)
        whole.select(dim + 1, group.index).copy_(
            x.reshape((*shape[:dim], outer, inner, *shape[dim + 1 :]))
        )
        return whole.view((*shape[:dim], shape[dim] * num, *shape[dim + 1 :]))

    return unshard


def _mask(group: AnyGroup) -> LocalFunction:
    def mask(x: Tensor) -> Tensor:
        if group.index == 0:
            return x.contiguous()
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    return mask


def _axis_index(group: AnyGroup) -> LocalFunction:
    made: dict[tuple[torch.device, int], Tensor] = {}

    def axis_index(like: Tensor) -> Tensor:
        key = (like.device, group.index)
        if key not in made:
            made[key] = torch.tensor(group.index, device=like.device)
        return made[key]

    return axis_index


_MAKERS: dict[Any, Callable[..., LocalFunction]] = {
    ALL_REDUCE: _all_reduce,
    ALL_REDUCE_MAX: _all_reduce_max,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
    SHARD: _shard,
    UNSHARD: _unshard,
    MASK: _mask,
    AXIS_INDEX: _axis_index,
}
