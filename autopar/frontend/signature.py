"""The signature of a captured call: its arguments, the graph's inputs, and its outputs.

In: the arguments of a call. Out: the tensors that a program reads, or an error that says where the
call differs from the one that was captured; and keys that tell calls apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.base.torch_private import pytree


class Arguments(NamedTuple):
    """Example inputs with positional and keyword arguments: ``Arguments((x,), {"y": y})``."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _type_and_fix(given: object) -> str:
    """The type of what is no tensor, and how to make one of it."""
    kind = type(given).__name__
    if given is None:
        return kind
    return f"{kind}: write torch.{'from_numpy' if kind == 'ndarray' else 'tensor'}(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How the arguments of a call become the graph's inputs, and its outputs the model's own.

    ``leaves`` has one entry per flattened argument: the position among the graph's tensor inputs,
    or the constant that was captured. ``input_names`` are the tensor inputs' names as users know
    them. ``full_masks`` are the names of those that must be full, as the graph was captured without
    them; see `autopar.frontend.full_masks`.
    """

    in_spec: Any
    leaves: tuple[Any, ...]
    input_names: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[torch.dtype, ...]
    out_spec: Any
    out_leaves: tuple[Any, ...]
    full_masks: tuple[str, ...] = ()

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensor inputs of a call; raises InputError where it differs from the example.

        Keywords may be in any order.
        """
        return self._tensors(*self._flat(args, kwargs), args, kwargs)

    def flatten_any_shapes(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Signature, list[Tensor]]:
        """`with_shapes_of` a call, and what `flatten` of it gives."""
        leaves, spec = self._flat(args, kwargs)
        called = self._with_shapes_of(leaves, spec)
        return called, called._tensors(leaves, spec, args, kwargs)

    def _tensors(
        self, leaves: list[Any], spec: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """As `flatten`, of a call whose leaves and structure are known."""
        if spec != self.in_spec:
            raise InputError(
                "inputs do not match the example inputs: they must have the same structure "
                f"(the same positional and keyword arguments). Expected {self.describe()}; got "
                f"{len(args)} positional and keywords {sorted(kwargs)}{self.hint(args, kwargs)}"
            )
        tensors: list[Tensor] = []
        for leaf, expected in zip(leaves, self.leaves):
            if isinstance(expected, InputSlot):
                tensors.append(self._check(leaf, expected.position))
            elif not _is_same_constant(leaf, expected):
                raise InputError(
                    f"argument {leaf!r} differs from the value {expected!r} the model was "
                    "captured with; compile again for another value"
                )
        return tensors

    def has_structure_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has as many positional arguments and the same keywords."""
        return bool(self._flat(args, kwargs)[1] == self.in_spec)

    def with_shapes_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
        """The signature of a call like the example with tensors of other sizes.

        Where the call differs in more than sizes, `flatten` of the result refuses it.
        """
        return self._with_shapes_of(*self._flat(args, kwargs))

    def _with_shapes_of(self, leaves: list[Any], spec: Any) -> Signature:
        if spec != self.in_spec:
            return self
        shapes = list(self.input_shapes)
        for leaf, expected in zip(leaves, self.leaves):
            if isinstance(expected, InputSlot) and isinstance(leaf, Tensor) and not leaf.is_nested:
                own = shapes[expected.position]
                if len(own) == leaf.dim() and leaf.numel() > 0:
                    shapes[expected.position] = tuple(leaf.shape)
        return (
            self
            if tuple(shapes) == self.input_shapes
            else replace(self, input_shapes=tuple(shapes))
        )

    def _flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """The leaves and the structure of a call, its keywords in the example's order."""
        if kwargs:
            own = pytree.tree_unflatten(self.leaves, self.in_spec)[1]
            if kwargs.keys() == own.keys():
                kwargs = {name: kwargs[name] for name in own}
        return pytree.tree_flatten((tuple(args), dict(kwargs)))

    def hint(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The likely mistake in a call of another structure, as the end of an error's message.

        Looks for a batch passed as one argument, an unknown keyword, and what is no tensor, in this
        order; empty if it finds none.
        """
        own_args, own_kwargs = pytree.tree_unflatten(self.leaves, self.in_spec)
        if len(args) == 1 and not kwargs:
            batch = args[0]
            parts = batch if isinstance(batch, tuple | list) else ()
            are_tensors = all(isinstance(part, Tensor) for part in parts)
            if are_tensors and len(parts) == len(own_args) > 0 and not own_kwargs:
                return ". A batch's parts are arguments of their own: write (*batch)"
            if isinstance(batch, Mapping) and batch.keys() == own_kwargs.keys() and not own_args:
                return ". A batch's parts are keywords of their own: write (**batch)"
        unknown = next((name for name in kwargs if name not in own_kwargs), None)
        if unknown is not None:
            hint = did_you_mean(unknown, own_kwargs)
            if not own_kwargs:
                hint = "; pass the arguments by position, as the example does"
            return f". The example has no keyword {unknown!r}{hint}"
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(args, own_args))]
        pairs += [(name, value, own_kwargs[name]) for name, value in kwargs.items()]
        for name, given, own in pairs:
            if isinstance(own, InputSlot) and not isinstance(given, Tensor):
                return f". Argument {name!r} must be a tensor, got {_type_and_fix(given)}"
        return ""

    def _check(self, leaf: Any, position: int) -> Tensor:
        name, shape = self.input_names[position], self.input_shapes[position]
        dtype = self.input_dtypes[position]
        if not isinstance(leaf, Tensor):
            raise InputError(f"input {name!r} must be a tensor, got {_type_and_fix(leaf)}")
        if leaf.is_nested or leaf.layout is not torch.strided or leaf.device.type == "meta":
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise InputError(
                f"input {name!r} is a {kind} tensor on {leaf.device}; pass a dense one with data, "
                "such as x.to_dense()"
            )
        if leaf.dtype != dtype:
            raise InputError(
                f"input {name!r} has dtype {leaf.dtype}; the model was compiled for {dtype}. "
                f"Convert it: .to({dtype}), or compile again with example_inputs of that dtype"
            )
        if tuple(leaf.shape) != shape:
            raise InputError(
                f"input {name!r} has shape {tuple(leaf.shape)}; the model was compiled for "
                f"{shape}. Pad or drop the batch, or compile again with example_inputs of the new "
                "shape"
            )
        return leaf

    def key(self) -> CallKey:
        """The `call_key` of the example, which every call that `flatten` accepts has too."""
        return call_key(*self.example())

    def example(self) -> Arguments:
        """A call like the example, with tensors that hold no data."""
        pairs = zip(self.input_shapes, self.input_dtypes)
        return self.call_of([torch.empty(s, dtype=d, device="meta") for s, d in pairs])

    def call_of(self, tensors: Sequence[Tensor]) -> Arguments:
        """The call with these tensor inputs; the inverse of `flatten`."""
        return Arguments(*pytree.tree_unflatten(_filled(self.leaves, tensors), self.in_spec))

    def output_of(self, tensors: Sequence[Tensor]) -> Any:
        """The model's own output, of its tensors in order."""
        return pytree.tree_unflatten(_filled(self.out_leaves, tensors), self.out_spec)

    @property
    def returns_one_tensor(self) -> bool:
        return sum(isinstance(leaf, InputSlot) for leaf in self.out_leaves) == 1

    def describe(self) -> str:
        return ", ".join(
            f"{n}: {tuple(s)} {d}" + (", all ones" if n in self.full_masks else "")
            for n, s, d in zip(self.input_names, self.input_shapes, self.input_dtypes)
        )


def _is_same_constant(leaf: Any, expected: Any) -> bool:
    try:
        return not isinstance(leaf, Tensor) and bool(leaf == expected)
    except (TypeError, ValueError):  # arrays have no truth value
        return False


@dataclass(frozen=True, slots=True)
class InputSlot:
    position: int


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    return [tensors[x.position] if isinstance(x, InputSlot) else x for x in leaves]


def signature_of_tensors(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> Signature:
    """The signature of a call with positional tensors only, whose output is one tensor."""
    return Signature(
        in_spec=pytree.tree_structure((tuple(names), {})),
        leaves=tuple(InputSlot(place) for place in range(len(names))),
        input_names=tuple(names),
        input_shapes=tuple(shapes),
        input_dtypes=tuple(dtypes),
        out_spec=pytree.tree_structure(0),
        out_leaves=(InputSlot(0),),
    )


CallKey = tuple[Any, tuple[Any, ...]]
"""The structure of a call and what a program depends on of each argument."""


def call_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallKey:
    """A key of calls that one program can run: structure, shapes, dtypes, plain values.

    It does not depend on the order of keywords.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else _constant_key(leaf)
        for leaf in leaves
    )


def _constant_key(leaf: Any) -> Any:
    """A key that tells apart ``True``, ``1`` and ``1.0``, which compare as equal."""
    return type(leaf), leaf
