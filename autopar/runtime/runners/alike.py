"""What the processes of a job must have alike: the model's state, its constants, and whole batches.

In: whole tensors, by name, in each process. Out: the same on all ranks, or an InputError on all of
them. It exists because each process runs the user's script: with a random seed or a shuffled loader
of its own, replicas would train different models without a word.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.errors import InputError
from autopar.comm.transports.c10d import backends
from autopar.lowering.types import RankProgram
from autopar.runtime.state.shards import needed_state
from autopar.runtime.step.begun_call import BegunCall

_log = logging.getLogger(__name__)
TRAINING, FORWARD = "training", "forward"
"""The kinds of program that a slot may have."""
_PORTION_BYTES = 256 << 20
_MAX_LISTED = 3

_SAME_BATCH = (
    ": under torchrun each rank passes the same global batch. Where each loads a part of its own, "
    "as with a DistributedSampler, pass local=True; where the loader shuffles, seed it alike: "
    "generator=torch.Generator().manual_seed(0)"
)

Description = tuple[tuple[int, ...], str, int]
"""Shape, dtype and the checksum of all bytes."""


def described(tensor: Tensor) -> Description:
    """Shape, dtype and checksum of a tensor, which ranks compare instead of its contents."""
    data = tensor.detach().reshape(-1)
    data = (torch.view_as_real(data) if data.is_complex() else data).reshape(-1)
    checksum = 0
    for portion in data.view(torch.uint8).split(_PORTION_BYTES):
        checksum = zlib.crc32(portion.cpu().numpy(), checksum)
    return tuple(tensor.shape), str(tensor.dtype), checksum


def differing(own: Mapping[str, Any], *, in_common: bool = False) -> dict[str, int]:
    """The entries that are not equal on all ranks, each with a rank that differs from rank 0.

    With ``in_common`` an entry that one of the two lacks does not count.
    """
    box: list[Any] = [dict(own)]
    dist.broadcast_object_list(box, src=0)
    first: dict[str, Any] = box[0]
    compared = first.keys() & own.keys() if in_common else first.keys() | own.keys()
    names = [name for name in {**first, **own} if name in compared]
    names = [name for name in names if first.get(name) != own.get(name)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return {name: rank for rank, listed in reversed(list(enumerate(found))) for name in listed}


def alike_state(
    program: RankProgram, state: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """The whole state that ``program`` reads, with rank 0's tensors where ranks differ. Collective.

    Raises InputError if constants or shapes differ: then ranks have different models.
    """
    needed = needed_state(program, state)
    constants = {f"the constant {name!r}": tensor for name, tensor in program.constants}
    found = differing(
        {name: described(tensor) for name, tensor in constants.items()}
        | {f"the shape of {n!r}": (tuple(t.shape), str(t.dtype)) for n, t in needed.items()}
    )
    if found:
        what, rank = next(iter(found.items()))
        raise InputError(
            f"{what} differs between ranks 0 and {rank}, so the processes would train different "
            "models; make the same one in each, after torch.manual_seed(0)"
        )
    differ = sorted(differing({name: described(tensor) for name, tensor in needed.items()}))
    if differ and dist.get_rank() == 0:
        _log.warning(
            "%d tensors of the model differ between ranks (%s); all ranks begin with those of "
            "rank 0. Call torch.manual_seed(0) before the model is made, to have them alike",
            len(differ),
            ", ".join(differ[:_MAX_LISTED]) + ", ..." * (len(differ) > _MAX_LISTED),
        )
    for name in differ:
        on_device = needed[name].to(device, copy=True).contiguous()
        dist.broadcast(on_device, src=0)
        needed[name] = on_device.to(needed[name].device)
    return needed


def check_alike(what: str, state: Any) -> None:
    """Raise InputError, on all ranks, if they pass whole tensors that differ to ``what``.

    Collective. ``DTensor``s are shards; in a pipeline ranks may pass their own stages' state alone.
    """
    found = differing(dict(_whole_tensors(state)), in_common=True)
    if found:
        name, rank = next(iter(found.items()))
        raise InputError(
            f"{name!r} differs between ranks 0 and {rank} in what {what} was given; load the same "
            "file on every rank"
        )


def _whole_tensors(state: Any, path: str = "") -> Iterator[tuple[str, Description]]:
    for key, value in state.items() if isinstance(state, Mapping) else ():
        name = f"{path}{key}"
        if isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
            yield name, described(value)
        yield from _whole_tensors(value, f"{name}.")


class AlikeBatches:
    """Checks that ranks pass the same whole batch, or each its own shard, of the same shapes.

    Shards are compared by their shapes in each call, as each rank chooses its program by its own
    shard alone. Whole batches are compared in the first call of their shapes, and of each program;
    later ones are not, which would cost a synchronization each, unless their masks choose the
    program.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begins = ""
        self._begun: set[str] = set()
        self._compared: set[tuple[str, int]] = set()

    def begin(self, call: BegunCall) -> bool:
        """Whether the masks of all ranks are full.

        Raises InputError, on all ranks, unless they pass batches of the same shapes, or shards.
        Collective: with ``in_each`` always, otherwise in the first call of these ``shapes``, for
        whole batches until `check` has found them alike.
        """
        shapes, local = call.shapes, call.local
        self._begins = shapes
        if not call.in_each and shapes in self._begun:
            return call.has_full_masks
        mark = zlib.crc32(f"{local} {shapes}".encode())
        device = "cpu" if "cpu" in backends() else self._device
        marks = torch.tensor(
            [mark, -mark, not call.has_full_masks], dtype=torch.int64, device=device
        )
        dist.all_reduce(marks, dist.ReduceOp.MAX)
        highest, lowest, has_others = marks.tolist()
        if highest != -lowest:
            self._refuse(shapes, local)
        if local:
            self._begun.add(shapes)
        return not has_others

    def _refuse(self, shapes: str, local: bool) -> None:
        found = differing({"local": local, "shapes": shapes})
        if "local" in found:
            raise InputError(
                f"ranks 0 and {found['local']} differ in local=: either all ranks pass their own "
                "shards, with local=True, or all pass the same global batch"
            )
        rank, own = found["shapes"], dist.get_rank()
        if local:
            raise InputError(
                f"with local=True ranks 0 and {rank} pass shards of different shapes, rank {own} "
                f"passes {shapes}: pad them to the same ones on all ranks, or pass the global "
                "batch, without local=True"
            )
        raise InputError(
            f"the batches of ranks 0 and {rank} differ in their shapes, rank {own} passes {shapes}"
            f"{_SAME_BATCH}"
        )

    def forget(self, kind: str, slot: int) -> None:
        """Compare again: the slot has another program."""
        self._compared.discard((kind, slot))

    def check(self, kind: str, slot: int, program: RankProgram, tensors: Sequence[Tensor]) -> None:
        """Raise InputError, on all ranks, where whole batches differ. Collective in the first call
        of a program."""
        if (kind, slot) in self._compared:
            self._begun.add(self._begins)
            return
        found = differing({repr(i.name): described(t) for i, t in zip(program.inputs, tensors)})
        if found:
            name, rank = next(iter(found.items()))
            raise InputError(f"the batches of ranks 0 and {rank} differ in {name}{_SAME_BATCH}")
        self._compared.add((kind, slot))
        self._begun.add(self._begins)
