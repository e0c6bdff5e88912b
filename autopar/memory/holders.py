"""Values that several blocks hold: each counts once, until its last holder releases it."""

from __future__ import annotations

from collections import Counter

from autopar.cost_models.allocator import Category
from autopar.memory.value_gradients import Key


class Holders:
    """The values that are held, with the ``sizes`` of their memory, in a tally's ``live`` bytes."""

    def __init__(self, live: Counter[Category]) -> None:
        self.sizes: dict[Key, int] = {}
        self._live = live
        self._holders: dict[Key, set[object]] = {}

    def hold(self, key: Key, holder: object, size: int, category: Category) -> None:
        """Hold a value; ``size`` is that of new memory."""
        holders = self._holders.setdefault(key, set())
        if not holders:
            self.sizes[key] = size
            self._live[category] += size
        holders.add(holder)

    def release(self, key: Key, holder: object, category: Category) -> None:
        """Release a value, if this holder holds it."""
        holders = self._holders.get(key)
        if holders and holder in holders:
            holders.discard(holder)
            if not holders:
                self._live[category] -= self.sizes.pop(key)
