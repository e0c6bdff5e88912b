"""Point-to-point messages between the devices of a pipeline.

In: tensors and the device they go to. Out: on the rank of the same mesh position there, the same
tensors, whose shapes it knows. Between CPU processes of one host they go through memory that both
share (`autopar.comm.transports.shared_memory`), else over ``torch.distributed``. There, messages up
and down the pipeline travel in groups of their own, so that on NCCL, where the messages of a group
between two ranks are in one queue, a receive that waits never holds up a send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.comm.coalesced import start_sum
from autopar.comm.groups import Communicator
from autopar.lowering.types import TensorMeta
from autopar.runtime.machine.protocols import Received


class ProcessLinks:
    """`autopar.runtime.machine.protocols.Links` of one rank."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.messages = communicator.messages
        if self.messages is not None:
            self.messages.drop_unused()

    def send(self, device: int, values: Sequence[Tensor]) -> Callable[[], None]:
        communicator = self.communicator
        peer, group = communicator.peer(device), communicator.link_to(device)
        sent = [_on_wire(value.contiguous()) for value in values]
        if self.messages is not None:
            self.messages.send(peer, sent)
            return _nothing
        works = [dist.isend(tensor, peer, group=group) for tensor in sent]

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            sent.clear()

        return wait

    def receive(self, device: int, metas: Sequence[TensorMeta]) -> Callable[[], Received[Tensor]]:
        communicator = self.communicator
        peer, group = communicator.peer(device), communicator.link_from(device)
        tensors = [torch.empty(m.shape, dtype=m.dtype, device=communicator.device) for m in metas]
        if self.messages is not None:
            arrive = self.messages.receive(peer, tensors)
            return lambda: Received(tensors, arrive())
        works = [dist.irecv(_on_wire(tensor), peer, group=group) for tensor in tensors]

        def wait() -> Received[Tensor]:
            for work in works:
                if work is not None:
                    work.wait()
            return Received(tensors, time.perf_counter())

        return wait

    def start_sum(
        self, devices: tuple[int, ...], values: Sequence[Tensor]
    ) -> Callable[[], Sequence[Tensor]]:
        if len(devices) == 1:
            return lambda: values
        group = self.communicator.device_group(devices)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, value in enumerate(values):
            by_dtype.setdefault(value.dtype, []).append(place)
        started = [
            (places, start_sum([values[place] for place in places], group))
            for places in by_dtype.values()
        ]

        def wait() -> Sequence[Tensor]:
            sums = {place: x for places, end in started for place, x in zip(places, end())}
            return [sums[place] for place in range(len(sums))]

        return wait

    def share(self, devices: tuple[int, ...], value: Tensor | None, meta: TensorMeta) -> Tensor:
        communicator = self.communicator
        if communicator.num_devices == 1:
            assert value is not None
            return value
        first, own = devices[0], communicator.pipeline_device
        if own == first:
            assert value is not None
            shared = value.contiguous()
        elif self.messages is not None:
            return self.receive(first, [meta])().values[0]
        else:
            shared = torch.empty(meta.shape, dtype=meta.dtype, device=communicator.device)
        if self.messages is not None:
            for device in range(communicator.num_devices):
                if device != own:
                    self.send(device, [shared])
            return shared
        group = communicator.device_group(tuple(range(communicator.num_devices)))
        dist.broadcast(_on_wire(shared), communicator.peer(first), group=group)
        return shared


def _nothing() -> None:
    """Nothing is waited for: the message has been copied."""


def _on_wire(tensor: Tensor) -> Tensor:
    """Truth values and complex numbers as what every backend moves; the same memory."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
