"""Calls in which each rank passes its own shard of the batch, with ``local=True``.

In: the signature of a global call, and the program that splits its inputs. Out: the signature of
one rank's call; and the global call that ranks make together when each passes tensors of other
sizes, along the same dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from autopar.base.errors import InputError
from autopar.frontend.signature import Signature
from autopar.ir.mesh import Mesh
from autopar.lowering.types import InputProgram, RankProgram
from autopar.runtime.state.shards import check_splits, is_padded, local_input_shape


class LocalCall(NamedTuple):
    """The tensors that a rank passes, their signature, and that of the global call."""

    tensors: list[Tensor]
    local: Signature
    whole: Signature

    def with_masks(self) -> LocalCall:
        """The call for a program that applies all masks."""
        local, whole = (replace(s, full_masks=()) for s in (self.local, self.whole))
        return self._replace(local=local, whole=whole)


def local_signature(signature: Signature, program: RankProgram) -> Signature:
    """The signature of a call with one rank's shard of the batch."""
    shapes = tuple(local_input_shape(i, program) for i in program.inputs)
    return replace(signature, input_shapes=shapes)


def local_call(
    signature: Signature, program: RankProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> LocalCall:
    """One rank's part of a call like that of ``signature``, of the same sizes or of others.

    Raises InputError where it differs in more than sizes, where it has the shapes of the example's
    global batch, and where the program splits no input or pads what does not divide.
    """
    check_splits(program)
    own = local_signature(signature, program)
    local = own.with_shapes_of(args, kwargs)
    if local is own:
        return LocalCall(own.flatten(args, kwargs), own, signature)
    if local.input_shapes == signature.input_shapes:
        raise InputError(
            f"its shapes are those of the example's global batch, {signature.describe()}, of which "
            f"a rank's part is {own.describe()}"
        )
    for source in program.inputs:
        if is_padded(source, program):
            raise InputError(
                f"input {source.name!r} of the example, of shape {source.shape}, does not divide "
                "by the ranks, so that none has a shard of its own"
            )
    shapes = tuple(
        _whole_shape(shape, source, program.mesh)
        for shape, source in zip(local.input_shapes, program.inputs)
    )
    return LocalCall(local.flatten(args, kwargs), local, replace(signature, input_shapes=shapes))


def _whole_shape(shape: tuple[int, ...], source: InputProgram, mesh: Mesh) -> tuple[int, ...]:
    return tuple(size * source.num_shards(dim, mesh) for dim, size in enumerate(shape))
