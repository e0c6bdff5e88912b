"""Messages between the devices of a pipeline.

In: tensors and the device they go to. Out: on the rank of the same mesh position there, the same
tensors, whose shapes it knows. They travel by the transport that
`autopar.comm.transports.registry` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autopar.comm.coalesced import start_sum
from autopar.comm.groups import Communicator
from autopar.comm.transports.base import Messages
from autopar.lowering.types import TensorMeta
from autopar.runtime.machine.protocols import Received


class ProcessLinks:
    """`autopar.runtime.machine.protocols.Links` of one rank."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    @property
    def _messages(self) -> Messages:
        assert self.communicator.messages is not None, "there is one device"
        return self.communicator.messages

    def send(self, device: int, values: Sequence[Tensor]) -> Callable[[], None]:
        return self._messages.send(device, [value.contiguous() for value in values])

    def receive(self, device: int, metas: Sequence[TensorMeta]) -> Callable[[], Received[Tensor]]:
        tensors = [self._empty(meta) for meta in metas]
        arrive = self._messages.receive(device, tensors)
        return lambda: Received(tensors, arrive())

    def _empty(self, meta: TensorMeta) -> Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self.communicator.device)

    def start_sum(
        self, devices: tuple[int, ...], values: Sequence[Tensor]
    ) -> Callable[[], Sequence[Tensor]]:
        if len(devices) == 1:
            return lambda: values
        collectives = self.communicator.over_devices(devices)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, value in enumerate(values):
            by_dtype.setdefault(value.dtype, []).append(place)
        started = [
            (places, start_sum([values[place] for place in places], collectives))
            for places in by_dtype.values()
        ]

        def wait() -> Sequence[Tensor]:
            sums = {place: x for places, end in started for place, x in zip(places, end())}
            return [sums[place] for place in range(len(sums))]

        return wait

    def share(self, devices: tuple[int, ...], value: Tensor | None, meta: TensorMeta) -> Tensor:
        communicator, first = self.communicator, devices[0]
        if communicator.num_devices == 1:
            assert value is not None
            return value
        shared = self._empty(meta)
        if communicator.pipeline_device == first:
            assert value is not None
            shared = value.contiguous()
        self._messages.broadcast(shared, first)
        return shared
