"""The values that the blocks of a training step keep for the backward pass or recompute in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecomputation:
    """The values of the forward pass that a block keeps; it recomputes the others that it needs.

    ``kept``: their names in the block's traced graph (`autopar.lowering.joint`). Besides them it
    keeps operands, and values that cannot be recomputed. Per micro-batch: ``kept_bytes`` of the
    values that it saves, instead of ``default_bytes`` without recomputation, and ``time_s`` spent
    on recomputing.
    """

    kept: tuple[str, ...]
    kept_bytes: int
    default_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The blocks that recompute, by name; the others keep all that they need."""

    blocks: Mapping[str, BlockRecomputation] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.blocks)

    @property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """The kept values of each block that recomputes."""
        return {name: block.kept for name, block in self.blocks.items()}

    def time_s(self, block: str) -> float:
        """Seconds per micro-batch that a block spends on recomputing."""
        found = self.blocks.get(block)
        return 0.0 if found is None else found.time_s


NOTHING = Recomputation()
