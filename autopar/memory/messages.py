"""Memory of the messages between pipeline stages: receives are posted ahead, sends held back.

As `autopar.runtime.step.exchange` does: on each link the buffer of one receive more than the
schedule has come to exists, and what a device sends, unless the transport copies it at once, stays
until a later message of its receiver shows that it has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autopar.comm.transports.registry import holds_sent
from autopar.cost_models.allocator import Category, allocator_of
from autopar.cost_models.hardware import DeviceSpec
from autopar.lowering.route import NUM_AHEAD, Route, peer_of
from autopar.lowering.types import Pipeline
from autopar.schedules.action import Action, Kind


class Messages:
    """The messages of one device during a step, counted in a tally's ``live`` bytes."""

    def __init__(
        self, pipeline: Pipeline, route: Route, live: Counter[Category], device: DeviceSpec
    ) -> None:
        self._shape = pipeline.shape
        self._boundaries = pipeline.boundaries
        self._arrived = route.arrived
        self._live = live
        self._allocator = allocator_of(device)
        self._holds_sent = holds_sent(device.kind, pipeline.num_devices)
        self._incoming = {
            peer: [(action, size) for action in actions if (size := self._size(action))]
            for peer, actions in route.incoming.items()
        }
        self._place = {
            action: place
            for actions in self._incoming.values()
            for place, (action, _) in enumerate(actions)
        }
        self._num_posted = dict.fromkeys(self._incoming, 0)
        self._sent: dict[Action, Callable[[], None]] = {}
        for peer in self._incoming:
            self._post(peer, NUM_AHEAD)

    def post(self, action: Action) -> None:
        """Post a receive of the schedule, and the next one of its link."""
        if action in self._place:
            self._post(peer_of(action, self._shape), self._place[action] + 1 + NUM_AHEAD)

    def take(self, action: Action) -> bool:
        """Take a message out of its buffer, if the device receives it; returns whether it does."""
        if action not in self._place:
            return False
        self._live[Category.COMMUNICATION] -= self._size(action)
        for sent in self._arrived.get(action, ()):
            self._sent.pop(sent, _nothing)()
        return True

    def send(self, action: Action, release: Callable[[], None]) -> None:
        """Send values, which ``release`` releases when they are copied or have arrived."""
        if self._holds_sent:
            self._sent[action] = release
        else:
            release()

    def finish(self) -> None:
        """Everything that was sent has arrived."""
        for release in self._sent.values():
            release()
        self._sent.clear()

    def _post(self, peer: int, num: int) -> None:
        incoming = self._incoming[peer]
        for _, size in incoming[self._num_posted[peer] : num]:
            self._live[Category.COMMUNICATION] += size
            self._num_posted[peer] += 1

    def _size(self, action: Action) -> int:
        if action.kind is Kind.RECV_F:
            metas = self._boundaries[action.stage - 1].metas
        else:
            metas = self._boundaries[action.stage].gradient_metas
        return sum(self._allocator.rounded(meta.size_bytes) for meta in metas)


def _nothing() -> None:
    pass
