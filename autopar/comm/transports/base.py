"""The protocol of a transport: what carries collectives and messages between the ranks of a group.

A transport implements `CollectiveTransport`, `Messages` or both, and
`autopar.comm.transports.registry` lists it in order of preference. Bound collectives, the links of
a pipeline, the memory model and the measurements of collectives speak to these protocols only.

All ranks of a group call the same methods in the same order, with contiguous tensors of the same
shapes and dtypes. A method that cannot complete because another rank is gone raises a RuntimeError:
`PeerGone`, or ``torch.distributed``'s own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

Wait = Callable[[], None]
"""Blocks until an operation has ended; until then its tensors must neither change nor be freed."""


class PeerGone(RuntimeError):
    """Another process of the group ended, or closed its connection, during an operation."""

    @classmethod
    def because(cls, rank: int, why: object) -> PeerGone:
        return cls(f"rank {rank} of the group sends and receives no more: {why}")


class Reduction(StrEnum):
    """How the elements of all ranks are combined."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a transport runs collectives, as far as callers and the memory model must know.

    ``overlaps``: a collective started as ``overlapped`` runs while its caller computes; otherwise
    the calling thread carries it out, and it is over when the call returns. ``receives_whole``: a
    reduce-scatter receives as many bytes as it sends, into memory of its own, and makes the shard
    when it is waited for; otherwise the shard is all that it receives into, and a chunk of up to
    ``chunk_bytes``, from which it is added to the shard. ``gathered_bytes``: sums of up to so many
    bytes are made by each rank, of the operands of all.
    """

    overlaps: bool
    receives_whole: bool
    chunk_bytes: int = 0
    gathered_bytes: int = 0


class Collectives(Protocol):
    """Collectives of one group of ranks. ``overlapped`` is a request: see `Traits.overlaps`."""

    def all_reduce(
        self, x: Tensor, reduction: Reduction = Reduction.SUM, *, overlapped: bool = False
    ) -> Wait:
        """Combine all ranks' ``x`` in place."""
        ...

    def all_gather(self, whole: Tensor, own: Tensor, *, overlapped: bool = False) -> Wait:
        """Concatenate the ranks' ``own`` into ``whole``, in rank order."""
        ...

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send shard j of ``sent`` to rank j, where it becomes the shard of this rank's number."""
        ...

    def reduce_scatter(self, whole: Tensor, *, overlapped: bool = False) -> Callable[[], Tensor]:
        """Sum all ranks' ``whole`` (1-d, equal shards); the returned call gives this rank's."""
        ...


class CollectiveTransport(Collectives, Protocol):
    """A transport that carries the collectives of one group of ranks."""

    traits: ClassVar[Traits]

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        """Whether groups of this size on devices of this kind are meant to use it.

        The memory model asks this for devices that are not here.
        """
        ...

    @classmethod
    def open(cls, process_group: Any) -> Self | None:
        """Open it for the ranks of a group; None on all of them if any rank cannot. Collective."""
        ...

    def close(self) -> None: ...


class Messages(Protocol):
    """Point-to-point messages between the ranks of a group, which are numbered as in the group.

    From one rank to another, messages are received in the order in which they were sent.
    ``holds_sent``: tensors are held until the wait is over, and not copied before ``send`` returns.
    """

    holds_sent: ClassVar[bool]

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        """Whether groups of this size on devices of this kind are meant to use it."""
        ...

    @classmethod
    def open(cls, process_group: Any) -> Self | None:
        """Open it for the ranks of a group; None on all of them if any rank cannot. Collective."""
        ...

    def send(self, rank: int, tensors: Sequence[Tensor]) -> Wait:
        """Begin to send one message; its tensors may be changed once the wait is over."""
        ...

    def receive(self, rank: int, into: Sequence[Tensor]) -> Callable[[], float]:
        """Begin to receive that rank's next message into ``into``.

        The returned call waits for it and says when it had arrived (``time.perf_counter``).
        """
        ...

    def broadcast(self, x: Tensor, root: int) -> None:
        """Copy rank ``root``'s ``x`` into that of every other rank. Collective."""
        ...

    def drop_unused(self) -> None:
        """Release buffers that no message occupies: the next ones have other sizes."""
        ...

    def close(self) -> None: ...


def done() -> None:
    """A `Wait` for what has already ended."""
