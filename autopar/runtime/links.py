"""Point-to-point messages between the devices of a pipeline, over ``torch.distributed``.

In: tensors and the device they go to. Out: on the rank of the same mesh position there, the same
tensors, whose shapes it knows. Messages up and down the pipeline travel in groups of their own,
so that on NCCL, where the messages of a group between two ranks are in one queue, a receive that
waits never holds up a send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.lowering.differentiate import TensorMeta
from autopar.runtime.communicator import Communicator


class ProcessLinks:
    """`autopar.runtime.machine.Links` of one rank."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def send(self, device: int, values: Sequence[Tensor]) -> Callable[[], None]:
        communicator = self.communicator
        peer, group = communicator.peer(device), communicator.link_to(device)
        sent = [_on_wire(value.contiguous()) for value in values]
        works = [dist.isend(tensor, peer, group=group) for tensor in sent]

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            sent.clear()

        return wait

    def receive(self, device: int, metas: Sequence[TensorMeta]) -> Callable[[], Sequence[Tensor]]:
        communicator = self.communicator
        peer, group = communicator.peer(device), communicator.link_from(device)
        tensors = [torch.empty(m.shape, dtype=m.dtype, device=communicator.device) for m in metas]
        works = [dist.irecv(_on_wire(tensor), peer, group=group) for tensor in tensors]

        def wait() -> Sequence[Tensor]:
            for work in works:
                if work is not None:
                    work.wait()
            return tensors

        return wait

    def sum_over(self, devices: tuple[int, ...], values: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(devices) == 1:
            return values
        group = self.communicator.device_group(devices)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, value in enumerate(values):
            by_dtype.setdefault(value.dtype, []).append(place)
        sums = list(values)
        started = []
        for places in by_dtype.values():
            flat = torch.cat([values[place].reshape(-1) for place in places])
            started.append((places, flat, dist.all_reduce(flat, group=group, async_op=True)))
        for places, flat, work in started:
            work.wait()
            pieces = flat.split([values[place].numel() for place in places])
            for place, piece in zip(places, pieces):
                sums[place] = piece.view(values[place].shape)
        return sums

    def share(self, devices: tuple[int, ...], value: Tensor | None, meta: TensorMeta) -> Tensor:
        communicator = self.communicator
        if communicator.num_devices == 1:
            assert value is not None
            return value
        first = devices[0]
        if communicator.pipeline_device == first:
            assert value is not None
            shared = value.contiguous()
        else:
            shared = torch.empty(meta.shape, dtype=meta.dtype, device=communicator.device)
        group = communicator.device_group(tuple(range(communicator.num_devices)))
        dist.broadcast(_on_wire(shared), communicator.peer(first), group=group)
        return shared


def _on_wire(tensor: Tensor) -> Tensor:
    """Truth values and complex numbers as what every backend moves; the same memory."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
