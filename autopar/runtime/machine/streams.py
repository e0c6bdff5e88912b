"""The two compute streams of an accelerator, as a training step uses them, and that of updates.

In: issues (`autopar.lowering.streams`) in the order of the host. Out: within one, its stream is the
current one, behind the events that it waits for; its end is recorded if something waits for it. The
main stream is the one that is current when a step runs. Memory belongs to the stream on which it
was allocated: what an issue uses of the other stream is recorded, so that the allocator does not
hand it out before this use has ended. Gradients of early updates are held instead, until the main
stream has waited for their update: the host runs ahead, and would allocate all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.accelerators import module_of
from autopar.lowering.streams import Issue
from autopar.schedules.schedule import Resource


class Streams:
    """The side stream of one device, and the events of the running step."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = module_of(device)
        self._device = device
        self._side: Any = self._module.Stream(device)
        self._events: dict[int, Any] = {}
        self._user: Any = None

    @contextlib.contextmanager
    def on(self, issue: Issue) -> Iterator[None]:
        main = self._module.current_stream(self._device)
        stream = self._side if issue.stream is Resource.SIDE else main
        with self._module.stream(stream):
            for number in issue.waits:
                stream.wait_event(self._events[number])
            self._user = stream if issue.uses else None
            try:
                yield
            finally:
                self._user = None
            if issue.records:
                known = self._events.get(issue.number)
                self._events[issue.number] = stream.record_event(known)

    def note(self, *tensors: Tensor) -> None:
        """Note that the issue uses these tensors, which the other stream may have made."""
        if self._user is not None:
            for tensor in tensors:
                tensor.record_stream(self._user)


class UpdateStream:
    """The stream of one device on which parameters are updated within the backward pass.

    The main stream waits for an update before it issues the next, so at most one overlaps with the
    backward pass, and the gradients of at most one are held for it. ``module`` is torch's of the
    device's kind, such as `torch.cuda`.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._module: Any = module or module_of(device)
        self._device = device
        self._stream: Any = self._module.Stream(device)
        self._end: Any = None
        self._held: Sequence[Any] | None = None

    @contextlib.contextmanager
    def on(self, gradients: Sequence[Any]) -> Iterator[None]:
        """Within, this stream is the current one, behind the one that was."""
        self.join()
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            try:
                yield
            finally:
                self._end = self._stream.record_event(self._end)
                self._held = gradients

    def join(self) -> None:
        """Let the current stream wait for the last update, and release its gradients."""
        if self._held is not None:
            self._module.current_stream(self._device).wait_event(self._end)
            self._held = None
