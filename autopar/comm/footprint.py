"""Memory that collectives hold besides their operands and results, by the transport they use.

In: a collective and its sizes, and the traits of its transport
(`autopar.comm.transports.registry.traits_of`). Out: bytes. It exists so that the memory model asks
here and does not repeat what `autopar.comm.groups` and the transports allocate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.comm.coalesced import travels_alone
from autopar.comm.ops import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_MAX, ALL_TO_ALL, REDUCE_SCATTER
from autopar.comm.transports.base import Traits


def sum_bytes(size_bytes: int, num: int, traits: Traits) -> int:
    """Buffers of an all-reduce among ``num`` ranks, while it runs."""
    if size_bytes <= traits.gathered_bytes:
        return num * size_bytes
    return min(-(-size_bytes // num), traits.chunk_bytes)


def workspace_bytes(
    op: Any, num: int, digits: Sequence[Any], sent_bytes: int, made_bytes: int, traits: Traits
) -> int:
    """Buffers of one collective of `autopar.comm.ops` among ``num`` ranks, with its ``digits``.

    Shards that are not contiguous are copied into order before they are sent, and back.
    """
    if op in (ALL_REDUCE, ALL_REDUCE_MAX):
        return sum_bytes(sent_bytes, num, traits)
    if op is ALL_GATHER:
        return 0 if _is_outermost(digits) else made_bytes
    if op not in (REDUCE_SCATTER, ALL_TO_ALL):
        return 0
    rearranged_bytes = 0 if _is_outermost(digits[-2:]) else sent_bytes
    if op is REDUCE_SCATTER:
        received_bytes = (
            sent_bytes if traits.receives_whole else min(made_bytes, traits.chunk_bytes)
        )
        return rearranged_bytes + received_bytes
    return rearranged_bytes + (0 if _is_outermost(digits[:2]) else made_bytes)


def _is_outermost(digit: Sequence[Any]) -> bool:
    dim, outer = digit
    return bool(dim == 0 and outer == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """A reduce-scatter in flight: whole gradients as operands, shards of their sums as results.

    ``joined_bytes`` is the buffer that its operands are copied into, none where one travels alone.
    """

    sent_bytes: int
    received_bytes: int
    shard_bytes: int
    joined_bytes: int
    traits: Traits

    @property
    def in_flight_bytes(self) -> int:
        """Operands and receive buffers, until it is waited for."""
        return self.sent_bytes + self.received_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes into which it receives before it adds, while it runs."""
        return min(self.shard_bytes, self.traits.chunk_bytes)

    @property
    def deferred_bytes(self) -> int:
        """Bytes of the results that are allocated only when it is waited for."""
        return self.shard_bytes if self.traits.receives_whole else 0


def scatters(sizes: Iterable[tuple[int, int]], traits: Traits) -> list[Scatter]:
    """The reduce-scatters of gradients that are reduced together.

    ``sizes`` are the bytes of each whole gradient and of its shard. Small ones travel as one.
    """
    joined: list[tuple[int, int]] = []
    alone: list[tuple[int, int]] = []
    for whole_bytes, shard_bytes in sizes:
        group = alone if travels_alone(whole_bytes, is_sum=False) else joined
        group.append((whole_bytes, shard_bytes))
    groups = [joined, *([size] for size in alone)] if joined else [[size] for size in alone]
    return [_scatter(group, traits) for group in groups]


def _scatter(sizes: Sequence[tuple[int, int]], traits: Traits) -> Scatter:
    sent_bytes = sum(whole_bytes for whole_bytes, _ in sizes)
    return Scatter(
        sent_bytes=sent_bytes,
        received_bytes=sent_bytes if traits.receives_whole else 0,
        shard_bytes=sum(shard_bytes for _, shard_bytes in sizes),
        joined_bytes=sent_bytes if len(sizes) > 1 else 0,
        traits=traits,
    )
