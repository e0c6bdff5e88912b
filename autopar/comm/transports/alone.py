"""The collectives of a rank that is alone: nothing is sent, and no process group is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from autopar.comm.transports.base import Reduction, Traits, Wait, done


class AloneCollectives:
    """`CollectiveTransport` of one rank without a process group; ``open`` has no group to take."""

    traits: ClassVar[Traits] = Traits(overlaps=False, receives_whole=False)

    @classmethod
    def serves(cls, device_kind: str, num_ranks: int) -> bool:
        return num_ranks == 1

    @classmethod
    def open(cls, process_group: None) -> AloneCollectives:
        return cls()

    def all_reduce(
        self, x: Tensor, reduction: Reduction = Reduction.SUM, *, overlapped: bool = False
    ) -> Wait:
        return done

    def all_gather(self, whole: Tensor, own: Tensor, *, overlapped: bool = False) -> Wait:
        whole.copy_(own)
        return done

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        received.copy_(sent)

    def reduce_scatter(self, whole: Tensor, *, overlapped: bool = False) -> Callable[[], Tensor]:
        return lambda: whole

    def close(self) -> None: ...
