"""Stages of a pipeline: the blocks at which they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.base.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The name of each stage's first block, in order; see `autopar.ir.blocks`."""

    first_blocks: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        return len(self.first_blocks)

    def of(self, names: Sequence[str]) -> dict[str, int]:
        """The stage of each of the blocks with these names, which a stage can begin at.

        Raises PlanError where there are no such blocks in this order.
        """
        starts = []
        for name in self.first_blocks:
            if name not in names:
                known = ", ".join(repr(n) for n in names)
                raise PlanError(f"no block is called {name!r}; a stage can begin at {known}")
            starts.append(names.index(name))
        if starts != sorted(set(starts)) or not starts or starts[0] != 0:
            raise PlanError(
                f"stages begin at {list(self.first_blocks)}: each must begin behind the one before "
                f"it, and the first one at {names[0]!r}"
            )
        return {
            name: sum(start <= place for start in starts) - 1 for place, name in enumerate(names)
        }
