"""The iteration space of an op: its named dimensions, and the layout of each operand over them.

Every op is a nest of loops over named dimensions. The layout of a tensor operand has one tuple of
dimension names per tensor dimension (several names where the tensor dimension is their product, as
after a flattening view). What a space implies once mesh axes are assigned to its dimensions is in
`autopar.rules.choice`.

A dimension whose size does not divide is padded with zeros (see autopar.ir.placement). A rule names
the dimensions where its op tolerates padding: outputs stay finite, and so do gradients where the
gradient of the output is zero. Whatever the op leaves in the padding is set to zero, in the value
and in the gradient, unless the rule states that zeros stay zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.base.errors import RuleError

Layout = tuple[tuple[str, ...], ...]
"""For each tensor dimension, the iteration dimensions whose product it is, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The iteration space of one op: named dimensions, and each operand's layout over them.

    ``sizes``: the size of each dimension. ``inputs`` and ``outputs``: the layout of each tensor
    operand and output. ``sums``: dimensions that an output without them sums over. ``whole``:
    dimensions that cannot be split. ``partial_inputs``: operands that enter the sum once.
    ``reduced``: dimensions over which the op reduces inside, so that outputs without them come out
    complete. ``plain``: dimensions that only take the contiguous split. ``padded``: dimensions that
    may be split into a number of parts that does not divide them; ``clean``: those of them where
    zeros in the padding stay zeros by themselves, in outputs and gradients. ``linear``: operands
    that may be partial sums, all of them together, so that the outputs are partial sums too.
    ``joint``: dimensions that stand for several others, in no layout themselves: a split of one
    splits all of these at once, evenly, and the op exchanges data inside. ``anchor``: whether a
    split of this op is worth carrying to its neighbours (products, attention); other ops only pass
    splits on (element-wise ops, views).
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
    joint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    anchor: bool = False

    def splittable(self) -> tuple[str, ...]:
        """Dimensions that may be split, in order: every output has them or reduces over them."""
        return tuple(
            name
            for name, size in self.sizes.items()
            if size > 1 and name not in self.whole and self._outputs_allow(name)
        )

    def members(self, name: str) -> tuple[str, ...]:
        """The dimensions of layouts that a split of ``name`` splits."""
        return self.joint.get(name, (name,))

    def _outputs_allow(self, name: str) -> bool:
        members = self.members(name)
        return all(
            name in self.sums
            or name in self.reduced
            or any(member in factors for member in members for factors in layout)
            for layout in self.outputs
        )


NO_SPACE = Space(sizes={}, inputs=(), outputs=())
"""The space of an op that cannot be split."""


class SpaceBuilder:
    """Builds a space dimension by dimension."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.kept_whole: set[str] = set()

    def dim(self, name: str, size: int) -> str:
        """Add a dimension that may be split; returns its name."""
        self.sizes[name] = size
        return name

    def dims(self, prefix: str, sizes: Sequence[int]) -> tuple[str, ...]:
        """Add one dimension per size; returns their names, ``prefix0``, ``prefix1``, ..."""
        return tuple(self.dim(f"{prefix}{i}", size) for i, size in enumerate(sizes))

    def whole(self, size: int, name: str | None = None) -> str:
        """Add a dimension that cannot be split; returns its name."""
        name = self.dim(f"w{len(self.kept_whole)}" if name is None else name, size)
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
        """The space of the dimensions added so far.

        ``inputs`` and ``outputs``: layouts from `layout`, one per tensor operand and output.
        ``clean`` dimensions need not be listed in ``padded``. ``options`` are further fields of
        `Space`.
        """
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
    """The layout of a tensor: one name per dimension, or a tuple of names for their product.

    Raises RuleError for anything else.
    """
    for dim in dims:
        factors = (dim,) if isinstance(dim, str) else dim
        if not isinstance(factors, tuple) or not all(isinstance(f, str) for f in factors):
            raise RuleError(
                f"layout{dims} has {dim!r}; each tensor dimension is the name of an iteration "
                "dimension, or a tuple of names whose product it is: builder.dim('k', size) makes "
                "one that may be split, builder.whole(size) one that may not"
            )
    return tuple((d,) if isinstance(d, str) else d for d in dims)
