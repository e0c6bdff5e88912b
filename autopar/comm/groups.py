"""Axis-named collectives over ``torch.distributed``: one process group per axes label.

In: a mesh, this process's rank and the labels that a program uses. Out: for each raw op of
`autopar.comm.ops` a plain function of a local tensor. A digit behind ``outer`` of a dimension is
laid out for the wire by ``disassemble`` and read back by ``assemble``; the plain split of dimension
0 is the wire's own layout and goes straight into the output.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.base.errors import DeviceError
from autopar.comm.coalesced import all_gather_single
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
)
from autopar.comm.transports.direct_exchange import DirectExchange, direct_exchange
from autopar.comm.transports.ports import sealed
from autopar.comm.transports.reduce_scatter import start_reduce_scatter
from autopar.comm.transports.shared_memory import DirectMessages, direct_messages
from autopar.ir.mesh import MICROBATCH, Mesh

LocalFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The process group over some axes that this rank is in, and its position there.

    ``direct`` makes all collectives on CPUs of one host.
    """

    process_group: Any
    size: int
    index: int
    label: str
    direct: DirectExchange | None


class TimedGroup:
    """Positions on the axis in time, and on device axes behind it; it never communicates."""

    process_group = direct = None

    def __init__(self, communicator: Communicator, label: str) -> None:
        axes = label.partition(",")[2]
        self._communicator = communicator
        self._devices = communicator.group(axes) if axes else None
        self._num_devices: int = self._devices.size if self._devices else 1
        self.size: int = communicator.num_microbatches * self._num_devices
        self.label = label

    @property
    def index(self) -> int:
        """That of the present micro-batch."""
        inside = self._devices.index if self._devices else 0
        return self._communicator.microbatch * self._num_devices + inside


AnyGroup = Group | TimedGroup


class Communicator:
    """This rank's groups of one mesh, of which a pipeline has one on each of its devices.

    Making it is collective: all ranks, the same labels and sets of devices. ``mesh`` and ``rank``
    are those of this rank's own device, ``pipeline_device`` of ``num_devices``. With
    ``reduces_late``, gradients have groups of their own: collectives of a group are done in their
    order, and those of the next step must not wait behind a step's last reductions.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        labels: Iterable[str],
        num_microbatches: int = 1,
        *,
        num_devices: int = 1,
        device_sets: Iterable[tuple[int, ...]] = (),
        reduces_late: bool = False,
    ) -> None:
        world = mesh.repeated(num_devices)
        if dist.get_world_size() != world.num_devices:
            raise DeviceError(
                f"the mesh {world} has {world.num_devices} ranks but the process group has "
                f"{dist.get_world_size()}; start as many processes as the plan has devices: "
                f"torchrun --nproc-per-node={world.num_devices} train.py"
            )
        self.mesh = mesh
        self.device = device
        self.world = world
        self.num_devices = num_devices
        self.pipeline_device, self.rank = divmod(dist.get_rank(), mesh.num_devices)
        made = device_mesh(world, device.type)
        self.device_mesh = made if num_devices == 1 else made[mesh.axis_names]
        self.num_microbatches = num_microbatches
        self.microbatch = 0
        self.reduces_late = reduces_late
        self._groups: dict[str, AnyGroup] = {}
        self._device_groups: dict[tuple[int, ...], Any] = {}
        self._directed: tuple[Any, Any] = (None, None)
        self.messages: DirectMessages | None = None
        for label in sorted(set(labels)):
            self.group(label)
        if num_devices > 1:
            for devices in sorted({tuple(range(num_devices)), *device_sets}):
                self._device_groups[devices] = self._make_device_group(devices)
            self._directed = _directed_groups(device.type)
            if device.type == "cpu":
                self.messages = _messages()

    def group(self, label: str) -> AnyGroup:
        """The group of a label; collective where it is new."""
        if label not in self._groups and label.split(",")[0] == MICROBATCH:
            self._groups[label] = TimedGroup(self, label)
        if label not in self._groups:
            axes = self.world.axes_of(label)
            if len(axes) == 1:
                process_group = device_mesh(self.world, self.device.type).get_group(axes[0])
            else:
                process_group = _joint_group(self.world.groups(axes), dist.get_rank())
            self._groups[label] = Group(
                process_group=process_group,
                size=self.world.size(axes),
                index=self.world.index(dist.get_rank(), axes),
                label=label,
                direct=_direct(process_group) if self.device.type == "cpu" else None,
            )
        return self._groups[label]

    def gradient_group(self, label: str) -> Any:
        """The process group for reductions of gradients; collective where it is new."""
        if not self.reduces_late:
            return self.group(label).process_group
        groups = self.world.groups(self.world.axes_of(label))
        return _new_group(groups, dist.get_rank(), "gradients")

    def _make_device_group(self, devices: tuple[int, ...]) -> Any:
        size = self.mesh.num_devices
        groups = tuple(tuple(d * size + rank for d in devices) for rank in range(size))
        return _joint_group(groups, dist.get_rank())

    def device_group(self, devices: tuple[int, ...]) -> Any:
        """The group of the ranks of this mesh position on some devices of the pipeline."""
        return self._device_groups[devices]

    def peer(self, device: int) -> int:
        """The rank of this mesh position on another device of the pipeline."""
        return device * self.mesh.num_devices + self.rank

    def link_to(self, device: int) -> Any:
        """The group for messages to another device; None is that of all processes."""
        return self._directed[device > self.pipeline_device]

    def link_from(self, device: int) -> Any:
        """The group for messages from another device."""
        return self._directed[self.pipeline_device > device]

    def bind(self, op: Any, label: str, *static: int) -> LocalFunction:
        """A raw op with its static arguments (after ``num``) as a function of a local tensor."""
        function = _MAKERS[op](self.group(label), *static)
        function.__name__ = f"{op.name().split('::')[1].split('.')[0]}_{label.replace(',', '_')}"
        function.__module__ = __name__
        return function

    def bind_in_place(self, label: str) -> LocalFunction:
        """``all_reduce`` of a tensor that nobody else reads: it may be overwritten."""
        group = self.group(label)
        assert isinstance(group, Group), "nothing is summed along the axis in time"
        function = _all_reduce_in_place(group)
        function.__name__ = f"all_reduce__{label.replace(',', '_')}"
        function.__module__ = __name__
        return function


class _Known:
    """Meshes and groups of the present default process group: made once, used by every program."""

    def __init__(self) -> None:
        self.world: Any = None
        self.meshes: dict[tuple[str, Mesh], DeviceMesh] = {}
        self.groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Any] = {}
        self.direct: dict[Any, DirectExchange | None] = {}
        self.directed: tuple[Any, Any] | None = None
        self.messages: list[DirectMessages | None] = []

    def of_this_world(self) -> _Known:
        if self.world is not dist.group.WORLD:
            self.__init__()  # type: ignore[misc]
            self.world = dist.group.WORLD
        return self


_KNOWN = _Known()


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """torch's mesh with our axis names. Collective the first time."""
    known = _KNOWN.of_this_world().meshes
    if (device_type, mesh) not in known:
        with sealed():
            known[device_type, mesh] = init_device_mesh(
                device_type, mesh.axis_sizes, mesh_dim_names=mesh.axis_names
            )
    return known[device_type, mesh]


def _joint_group(groups: tuple[tuple[int, ...], ...], rank: int) -> Any:
    """This rank's group among ``groups``; all ranks make all of them, in the same order."""
    if len(groups) == 1 and groups[0] == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    return _new_group(groups, rank, "all")


def _new_group(groups: tuple[tuple[int, ...], ...], rank: int, purpose: str) -> Any:
    """As `_joint_group`, never that of all processes; one for each purpose."""
    known = _KNOWN.of_this_world().groups
    if (purpose, groups) not in known:
        assert all(list(group) == sorted(group) for group in groups), groups
        own = None
        with sealed():
            for group in groups:
                made = dist.new_group(list(group))
                own = made if rank in group else own
        known[purpose, groups] = own
    return known[purpose, groups]


def _direct(process_group: Any) -> DirectExchange | None:
    known = _KNOWN.of_this_world().direct
    if process_group not in known:
        known[process_group] = direct_exchange(process_group)
    return known[process_group]


def _messages() -> DirectMessages | None:
    known = _KNOWN.of_this_world().messages
    if not known:
        known.append(direct_messages(dist.group.WORLD))
    return known[0]


def _directed_groups(device_type: str) -> tuple[Any, Any]:
    """Groups of all processes for messages down and up a pipeline; gloo needs none of its own."""
    if device_type == "cpu":
        return None, None
    known = _KNOWN.of_this_world()
    if known.directed is None:
        known.directed = (dist.new_group(), dist.new_group())
    return known.directed


@dataclass(slots=True)
class _Membership:
    """Whether the process group was joined here, and how many runners use it."""

    joined_here: bool = False
    num_users: int = 0


_MEMBERSHIP = _Membership()


def initialize(device: torch.device, timeout: datetime.timedelta) -> None:
    """Join the process group that ``torchrun`` describes, unless the user has done it."""
    if not dist.is_initialized():
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            timeout=timeout,
            device_id=device if is_cuda else None,
        )
        _MEMBERSHIP.joined_here = True


def use_process_group() -> None:
    """Count one more user of the process group."""
    _MEMBERSHIP.num_users += 1


def release_process_group() -> None:
    """Leave the process group with its last user, if `initialize` joined it."""
    _MEMBERSHIP.num_users -= 1
    if _MEMBERSHIP.num_users == 0 and _MEMBERSHIP.joined_here and dist.is_initialized():
        dist.destroy_process_group()
        _MEMBERSHIP.joined_here = False


def _summed(x: Tensor, group: Group) -> Tensor:
    """Sum in place over the group."""
    if group.direct is not None:
        group.direct.all_reduce(x)
    else:
        dist.all_reduce(x, group=group.process_group)
    return x


def _all_reduce(group: Group) -> LocalFunction:
    def all_reduce(x: Tensor) -> Tensor:
        if x.dtype is torch.bool:  # a sum of truth values is "any"; as bytes it would be 2
            return _maximum(_as_bytes(x), group).to(torch.bool)
        return _summed(x.clone(memory_format=torch.contiguous_format), group)

    return all_reduce


def _all_reduce_in_place(group: Group) -> LocalFunction:
    copying = _all_reduce(group)

    def all_reduce(x: Tensor) -> Tensor:
        if x.is_contiguous() and x.dtype is not torch.bool:
            return _summed(x, group)
        return copying(x)

    return all_reduce


def _maximum(x: Tensor, group: Group) -> Tensor:
    if group.direct is not None:
        group.direct.all_reduce(x, _larger)
    else:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group.process_group)
    return x


def _as_bytes(x: Tensor) -> Tensor:
    return x.to(torch.uint8, memory_format=torch.contiguous_format)


def _larger(x: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(x, other, out=x)


def _all_reduce_max(group: Group) -> LocalFunction:
    def all_reduce_max(x: Tensor) -> Tensor:
        if x.dtype is torch.bool:
            return _maximum(_as_bytes(x), group).to(torch.bool)
        return _maximum(x.clone(memory_format=torch.contiguous_format), group)

    return all_reduce_max


def _wire(x: Tensor) -> Tensor:
    """Truth values travel as bytes, which every backend moves."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x


def _all_gather(group: Group, dim: int, outer: int) -> LocalFunction:
    num = group.size

    def gather(whole: Tensor, own: Tensor) -> None:
        if group.direct is not None:
            group.direct.all_gather(whole, own)
        else:
            all_gather_single(whole, own, group=group.process_group)

    def all_gather(x: Tensor) -> Tensor:
        if dim == 0 and outer == 1:
            whole = x.new_empty((num * x.shape[0], *x.shape[1:]))
            gather(_wire(whole), _wire(x.contiguous()))
            return whole
        parts = x.new_empty((num, *x.shape))
        gather(_wire(parts), _wire(x.contiguous()).unsqueeze(0))
        return assemble(parts, dim, outer)

    return all_gather


def _reduce_scatter(group: Group, dim: int, outer: int) -> LocalFunction:
    num = group.size

    def reduce_scatter(x: Tensor) -> Tensor:
        if x.dtype is torch.bool:
            return reduce_scatter(x.to(torch.int32)).to(torch.bool)
        parts = disassemble(x, num, dim, outer)
        if group.direct is not None:
            own_part = group.direct.reduce_scatter(parts.view(-1))
        else:
            own_part = start_reduce_scatter(parts.view(-1), group.process_group, num)()
        return own_part.view(parts.shape[1:])

    return reduce_scatter


def _all_to_all(
    group: Group, src_dim: int, src_outer: int, dst_dim: int, dst_outer: int
) -> LocalFunction:
    num = group.size

    def all_to_all(x: Tensor) -> Tensor:
        sent = disassemble(x, num, dst_dim, dst_outer)
        received = torch.empty_like(sent)
        if group.direct is not None:
            group.direct.all_to_all(_wire(received), _wire(sent))
        else:
            dist.all_to_all_single(_wire(received), _wire(sent), group=group.process_group)
        return assemble(received, src_dim, src_outer)

    return all_to_all


def _shard(group: AnyGroup, dim: int, outer: int) -> LocalFunction:
    num = group.size
    if dim == 0 and outer == 1:

        def shard_rows(x: Tensor) -> Tensor:
            size = x.shape[0] // num
            return x.narrow(0, group.index * size, size)

        return shard_rows

    def shard(x: Tensor) -> Tensor:
        return digit_slice(x, num, group.index, dim, outer).contiguous()

    return shard


def _unshard(group: AnyGroup, dim: int, outer: int) -> LocalFunction:
    num = group.size

    def unshard(x: Tensor) -> Tensor:
        shape = x.shape
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
