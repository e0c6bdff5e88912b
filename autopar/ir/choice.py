"""Choices: how the mesh splits one op, as values and as text.

Their placements, and all those of an op, are in `autopar.rules.choice`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.base.errors import PlanError

EXPERTS, ROWS_AND_EXPERTS = "experts", "rows_and_experts"
"""The names of the dimension of experts, and of rows and experts split together, whose splits
reports call expert parallelism."""


@dataclass(frozen=True, slots=True)
class Split:
    """The dimension that one mesh axis splits.

    ``base``: the product of the factors in front of the digit that is split; 1 splits contiguously.
    """

    dim: str
    base: int = 1

    def __str__(self) -> str:
        return self.dim + (f"/{self.base}" if self.base != 1 else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """How each mesh axis splits one op; None computes redundantly along that axis.

    ``splits`` has one entry per mesh axis. ``str(choice)`` is its text, such as ``"n - k/3"``: the
    dimension of each axis, ``/base`` where it is not 1, and ``-`` for None.
    """

    splits: tuple[Split | None, ...]

    def __str__(self) -> str:
        return " ".join("-" if s is None else str(s) for s in self.splits)

    def axes_of(self, dim: str) -> tuple[int, ...]:
        """The mesh axes that split ``dim``, in ascending order."""
        return tuple(a for a, s in enumerate(self.splits) if s is not None and s.dim == dim)

    @property
    def is_redundant(self) -> bool:
        """Whether no axis splits the op."""
        return all(split is None for split in self.splits)


_BASE = re.compile(r"[1-9][0-9]{0,17}")


def parse_choice(text: str) -> Choice:
    """The choice whose ``str`` is ``text``. Raises PlanError for any other text."""
    splits: list[Split | None] = []
    for word in text.split():
        dim, slash, base = word.partition("/")
        if word == "-":
            splits.append(None)
        elif not dim.isidentifier() or (slash and not _BASE.fullmatch(base)):
            raise PlanError(
                f"choice {text!r}: {word!r} is neither '-' nor 'dim' nor 'dim/base', where base is "
                "at least 1"
            )
        else:
            splits.append(Split(dim, int(base or 1)))
    return Choice(tuple(splits))
