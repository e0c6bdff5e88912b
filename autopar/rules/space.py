"""The iteration space of an op: its named dimensions, and how each operand lies over them.

Every op is a nest of named dimensions; a tensor operand is a layout over them, one tuple of
dimension names per tensor dimension (several names where a tensor dimension is their product, as
after a flattening view). What follows from a space, once mesh axes are assigned to its dimensions,
is in `autopar.rules.choice`.

A dimension whose size does not divide is padded with zeros (see autopar.ir.placement). A rule names
the dimensions where its op bears that: its outputs stay finite, and so do its gradients where the
gradient of the output is zero. What the op then leaves behind the end is zeroed, in the value and
in the gradient, unless the rule says that zeros stay zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.base.errors import RuleError

Layout = tuple[tuple[str, ...], ...]
"""Per tensor dimension, the iteration dimensions whose product it is (outermost first)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The iteration space of one op: named dimensions, and each operand's layout over them.

    ``sizes``: size of each dimension. ``sums``: dimensions that an output without them sums
    over. ``whole``: dimensions that cannot be split. ``partial_inputs``: operands that enter the
    sum once. ``reduced``: dimensions over which the op reduces inside, so that outputs without
    them come out complete. ``plain``: dimensions that take the contiguous split only. ``padded``:
    dimensions that may be split into parts that do not divide them; ``clean``: those of them where
    zeros behind the end stay zeros by themselves, in outputs and gradients. ``linear``: operands
    that may be partial sums, all of them together, the outputs then being partial sums too.
    ``anchor``: whether a split of this op is worth carrying to its neighbours (products,
    attention), or the op only goes along (element-wise ops, views).
    """

    sizes: Mapping[str, int]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    sums: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    partial_inputs: frozenset[int] = frozenset()
    reduced: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    padded: frozenset[str] = frozenset()
    clean: frozenset[str] = frozenset()
    linear: frozenset[int] = frozenset()
    anchor: bool = False

    def splittable(self) -> tuple[str, ...]:
        """Dimensions that may be split, in order: every output must have them or sum over them."""
        return tuple(
            name
            for name, size in self.sizes.items()
            if size > 1 and name not in self.whole and self._outputs_allow(name)
        )

    def _outputs_allow(self, name: str) -> bool:
        return all(
            name in self.sums or name in self.reduced or any(name in factors for factors in layout)
            for layout in self.outputs
        )


NO_SPACE = Space(sizes={}, inputs=(), outputs=())
"""That of an op that cannot be split."""


class SpaceBuilder:
    """Names the dimensions of a space one by one."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.kept_whole: set[str] = set()

    def dim(self, name: str, size: int) -> str:
        """A dimension that may be split."""
        self.sizes[name] = size
        return name

    def dims(self, prefix: str, sizes: Sequence[int]) -> tuple[str, ...]:
        """One dimension per size: ``prefix0 prefix1 ...``."""
        return tuple(self.dim(f"{prefix}{i}", size) for i, size in enumerate(sizes))

    def whole(self, size: int) -> str:
        """A dimension that cannot be split."""
        name = self.dim(f"w{len(self.kept_whole)}", size)
        self.kept_whole.add(name)
        return name

    def build(
        self,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        *,
        padded: Iterable[str] = (),
        clean: Iterable[str] = (),
        **options: Any,
    ) -> Space:
        """A space of the dimensions named so far; ``clean`` ones need not be in ``padded``."""
        return Space(
            sizes=self.sizes,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            whole=frozenset(self.kept_whole),
            padded=frozenset(padded) | frozenset(clean),
            clean=frozenset(clean),
            **options,
        )


def layout(*dims: str | tuple[str, ...]) -> Layout:
    """A layout from names; a tuple is a product of names."""
    for dim in dims:
        factors = (dim,) if isinstance(dim, str) else dim
        if not isinstance(factors, tuple) or not all(isinstance(f, str) for f in factors):
            raise RuleError(
                f"layout{dims} has {dim!r}; each tensor dimension is the name of an iteration "
                "dimension, or a tuple of names whose product it is: builder.dim('k', size) makes "
                "one that may be split, builder.whole(size) one that may not"
            )
    return tuple((d,) if isinstance(d, str) else d for d in dims)
