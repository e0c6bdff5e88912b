"""Messages between the stages of a pipeline: receives are posted early, sends never wait.

In: a device's route and its links. Out: for each receive the values, when they are needed. On each
link the receives are posted in the order of the sends, one ahead of the schedule, so that a message
finds its buffer. Only a stage that needs a message waits for it, not the schedule's send or receive
action. A sent value is released when a later message from its receiver shows that it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from autopar.lowering.route import NUM_AHEAD, Route, peer_of
from autopar.lowering.types import Pipeline, TensorMeta
from autopar.runtime.machine.protocols import Links, Received
from autopar.schedules.action import Action, Kind

T = TypeVar("T")


class Exchange(Generic[T]):
    """The messages of one step on one device."""

    def __init__(self, pipeline: Pipeline, route: Route, links: Links[T]) -> None:
        self.pipeline = pipeline
        self.route = route
        self.links = links
        self._incoming = {
            peer: [a for a in actions if self.metas(a)] for peer, actions in route.incoming.items()
        }
        self._place = {a: i for actions in self._incoming.values() for i, a in enumerate(actions)}
        self._num_posted = dict.fromkeys(self._incoming, 0)
        self._posted: dict[Action, Callable[[], Received[T]]] = {}
        self._sent: dict[Action, Callable[[], None]] = {}
        for peer in self._incoming:
            self._post(peer, NUM_AHEAD)

    def values(self, action: Action) -> tuple[int, ...]:
        """The values in a message, or whose gradients are in it; no message is sent without any."""
        lower = action.stage - (action.kind in (Kind.RECV_F, Kind.SEND_B))
        boundary = self.pipeline.boundaries[lower]
        return boundary.values if _is_forward(action) else boundary.gradients

    def metas(self, action: Action) -> tuple[TensorMeta, ...]:
        lower = action.stage - (action.kind in (Kind.RECV_F, Kind.SEND_B))
        boundary = self.pipeline.boundaries[lower]
        return boundary.metas if _is_forward(action) else boundary.gradient_metas

    def send(self, action: Action, values: Sequence[T]) -> None:
        """Begin to send the values that `values` names."""
        if values:
            peer = peer_of(action, self.pipeline.shape)
            self._sent[action] = self.links.send(peer, values)

    def post(self, action: Action) -> None:
        """Post the receive of a message, and the next ones of its link."""
        if self.metas(action):
            self._post(peer_of(action, self.pipeline.shape), self._place[action] + 1 + NUM_AHEAD)

    def expects(self, action: Action) -> bool:
        """Whether this device receives such a message."""
        return action in self._place

    def take(self, action: Action) -> Received[T]:
        """Wait for a message whose receive was posted."""
        received = self._posted.pop(action)()
        for sent in self.route.arrived.get(action, ()):
            if sent in self._sent:
                self._sent.pop(sent)()
        return received

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for wait in self._sent.values():
            wait()
        self._sent.clear()

    def _post(self, peer: int, num: int) -> None:
        """Post those of the first ``num`` receives of a link that are not posted yet."""
        incoming = self._incoming[peer]
        while self._num_posted[peer] < min(num, len(incoming)):
            action = incoming[self._num_posted[peer]]
            self._posted[action] = self.links.receive(peer, self.metas(action))
            self._num_posted[peer] += 1


def _is_forward(action: Action) -> bool:
    return action.kind in (Kind.SEND_F, Kind.RECV_F)
