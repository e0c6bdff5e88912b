"""All transports, in order of preference, and the choice of one for a group of ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from autopar.comm.transports.base import CollectiveTransport, Messages, Traits
from autopar.comm.transports.c10d import (
    C10dCollectives,
    C10dMessages,
    GlooCollectives,
    GlooMessages,
)
from autopar.comm.transports.shared_memory import SharedMemoryMessages
from autopar.comm.transports.sockets import SocketCollectives

COLLECTIVES: tuple[type[CollectiveTransport], ...] = (
    SocketCollectives,
    GlooCollectives,
    C10dCollectives,
)
MESSAGES: tuple[type[Messages], ...] = (SharedMemoryMessages, GlooMessages, C10dMessages)


def open_collectives(
    process_group: Any, device_kind: str, *, must_overlap: bool = False
) -> CollectiveTransport:
    """The collectives of a group, by the first transport that all its ranks can use.

    With ``must_overlap``, by one whose collectives run while their caller computes. Collective.
    """
    num_ranks = dist.get_world_size(process_group)
    for kind in COLLECTIVES:
        if kind.serves(device_kind, num_ranks) and (kind.traits.overlaps or not must_overlap):
            opened = kind.open(process_group)
            if opened is not None:
                return opened
    raise AssertionError(f"no transport serves {num_ranks} ranks on {device_kind}")


def open_messages(process_group: Any, device_kind: str) -> Messages:
    """The messages between the ranks of a group, as `open_collectives` chooses. Collective."""
    num_ranks = dist.get_world_size(process_group)
    for kind in MESSAGES:
        if kind.serves(device_kind, num_ranks):
            opened = kind.open(process_group)
            if opened is not None:
                return opened
    raise AssertionError(f"no transport carries messages of {num_ranks} ranks on {device_kind}")


def traits_of(device_kind: str, num_ranks: int) -> Traits:
    """How collectives of so many ranks run, by the first transport that serves them.

    For devices that need not be here; a group whose ranks cannot open it uses the next transport.
    """
    return next(kind.traits for kind in COLLECTIVES if kind.serves(device_kind, num_ranks))


def holds_sent(device_kind: str, num_ranks: int) -> bool:
    """Whether messages among so many ranks hold what they send, by the transport that serves them
    first, as `traits_of`."""
    return next(kind.holds_sent for kind in MESSAGES if kind.serves(device_kind, num_ranks))
