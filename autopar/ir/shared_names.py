"""The names of modules and parameters that a model shares, looked up by any of them.

In: the groups of names that a graph has, and a name. Out: the name that is kept, and the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.block_names import lies_in


class SharedNames:
    """Shared modules and parameters: ``groups`` has the names of each, the kept one first.

    `autopar.frontend.names` makes the groups; graphs and plans keep them as ``shared``.
    """

    def __init__(self, groups: Sequence[tuple[str, ...]]) -> None:
        self.groups = groups
        self._kept = {name: names[0] for names in self.groups for name in names[1:]}

    def kept(self, name: str) -> str:
        """The name that is kept of a module or parameter: that of ``b.norm`` is ``a.norm`` if ``b``
        is ``a``."""
        return list(self._kept_around(name))[-1]

    def _kept_around(self, name: str) -> Iterator[str]:
        """The names that are kept of the modules around, from the outermost, then of it itself."""
        found = ""
        for part in name.split("."):
            found = f"{found}.{part}" if found else part
            found = self._kept.get(found, found)
            yield found

    def others(self, name: str) -> list[str]:
        """The other names of a module or parameter, the one that is kept first."""
        kept = self.kept(name)
        found = [kept]
        for first, *others in self.groups:
            if lies_in(kept, first):
                found += [other + kept[len(first) :] for other in others]
        return [other for other in dict.fromkeys(found) if other != name]

    def every(self, name: str) -> list[str]:
        """A name and all others of the same module or parameter."""
        return [name, *self.others(name)] if self.groups else [name]

    def is_in(self, path: str, name: str) -> bool:
        """Whether ``path`` leads to or through the module ``name``, by any of its names."""
        return not name or self.kept(name) in self._kept_around(path)

    def owners(self, parameter: str) -> set[str]:
        """The modules that have a parameter, each by the name that is kept of it."""
        names = (parameter, *self.others(parameter))
        return {self.kept(name.rpartition(".")[0]) for name in names}

    def known(self) -> set[str]:
        """All names that are listed."""
        return {name for names in self.groups for name in names}
