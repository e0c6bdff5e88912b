"""A bounded cache of programs, each in a slot of the runtime, for evaluation and training alike.

In: keys of calls. Out: what was made for a key, made anew if it is not kept; a new one replaces the
least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ProgramCache(Generic[T]):
    """At most ``limit`` entries, in slots numbered from ``first_slot`` on."""

    def __init__(self, limit: int, first_slot: int = 0) -> None:
        self._limit = limit
        self._first_slot = first_slot
        self._known: OrderedDict[Hashable, tuple[int, T]] = OrderedDict()  # last used is last

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    @property
    def keys(self) -> Collection[Any]:
        return self._known.keys()

    @property
    def is_full(self) -> bool:
        return len(self._known) >= self._limit

    def __getitem__(self, key: Hashable) -> T:
        """The entry of a key, from now on the most recently used."""
        self._known.move_to_end(key)
        return self._known[key][1]

    def add(self, key: Hashable, make: Callable[[int], T]) -> None:
        """Add what ``make(slot)`` returns. If it raises, all entries stay."""
        if not self.is_full:
            slot = self._first_slot + len(self._known)
            self._known[key] = slot, make(slot)
            return
        oldest = next(iter(self._known))
        slot = self._known[oldest][0]
        made = make(slot)
        del self._known[oldest]
        self._known[key] = slot, made
