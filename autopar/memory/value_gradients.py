"""Memory of the gradients of values between blocks, which accumulate and may share buffers."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.allocator import Allocator, Category
from autopar.memory.kernel import InputGradient
from autopar.memory.tally import Tally

Key = tuple[int, int]
"""A micro-batch and a value."""


@dataclass(slots=True)
class Buffer:
    """Memory that gradients are views of: each keeps all of it alive."""

    size_bytes: int
    num_holders: int = 0


@dataclass(frozen=True, slots=True)
class _Gradient:
    """The gradient of a value so far: a buffer, or a view of a part of it."""

    buffer: Buffer
    is_contiguous: bool = True


class ValueGradients:
    """The gradients that are alive, counted in a tally."""

    def __init__(self, tally: Tally, allocator: Allocator) -> None:
        self._tally = tally
        self._allocator = allocator
        self._found: dict[Key, _Gradient] = {}

    def take(self, key: Key, size_bytes: int) -> Buffer:
        """The gradient of a block's output, as the block's I reads it.

        Zeros are allocated now; a view that is not contiguous is copied.
        """
        found = self._found.pop(key, None)
        if found is not None and found.is_contiguous:
            return found.buffer
        copy = self._keep(Buffer(self._allocator.rounded(size_bytes)))
        if found is not None:
            self.drop(found.buffer)
        return copy

    def accumulate(self, key: Key, made: InputGradient, buffer: Buffer, where: str) -> None:
        """Accumulate a gradient: the first contribution is kept as it is, a sum is new memory."""
        known, new = self._found.get(key), _Gradient(self._keep(buffer), made.is_contiguous)
        if known is not None:
            total = _Gradient(self._keep(Buffer(made.size_bytes)))
            self._tally.check(where, 0)
            self.drop(known.buffer)
            self.drop(new.buffer)
            new = total
        self._found[key] = new

    def receive(self, key: Key, size_bytes: int) -> None:
        """A gradient that another stage has sent."""
        self._found[key] = _Gradient(self._keep(Buffer(self._allocator.rounded(size_bytes))))

    def send(self, key: Key) -> Buffer | None:
        """The gradient of a value that leaves the device, which the caller drops."""
        found = self._found.pop(key, None)
        return None if found is None else found.buffer

    def release(self, key: Key) -> None:
        """Release the gradient of a value, if it has one."""
        found = self._found.pop(key, None)
        if found is not None:
            self.drop(found.buffer)

    def drop(self, buffer: Buffer) -> None:
        """One holder fewer; the last one releases the memory."""
        buffer.num_holders -= 1
        if not buffer.num_holders:
            self._tally.live[Category.ACTIVATIONS] -= buffer.size_bytes

    def _keep(self, buffer: Buffer) -> Buffer:
        if not buffer.num_holders:
            self._tally.live[Category.ACTIVATIONS] += buffer.size_bytes
        buffer.num_holders += 1
        return buffer
