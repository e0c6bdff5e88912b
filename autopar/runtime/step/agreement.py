"""The agreement of all ranks on whether a step's loss and gradients are finite.

In: this rank's gradients as they become complete, before they are reduced, and its term of the
loss. Out: the loss, and a verdict before any weight is updated. A rank sees only its own gradients:
those of sharded parameters and of other stages are elsewhere, and late reductions have not arrived.
So each rank sends its finding with its term of the loss, in the one sum that ends a step: a second
number, not a second message.

Infinite gradients, and those whose sum over the ranks may overflow, are doubtful: only then do the
ranks wait for the reductions and look at the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.base.torch_private import norm_each
from autopar.comm.groups import Communicator
from autopar.comm.ops import ALL_REDUCE
from autopar.lowering.types import RankProgram


class NonFinite(StrEnum):
    """The reaction to a training step whose loss or gradients are not finite."""

    RAISE = "raise"
    SKIP = "skip"
    IGNORE = "ignore"


def check_nonfinite(value: Any, *others: str) -> NonFinite:
    """Parse the option; raises InputError for any other value, which names ``others`` too."""
    known = [*map(str, NonFinite), *others]
    try:
        return NonFinite(value)
    except ValueError as error:
        raise InputError(
            f"nonfinite is {value!r}; it must be {', '.join(map(repr, known[:-1]))} or "
            f"{known[-1]!r}: what to do with a training step whose loss or gradients are not finite"
            + (did_you_mean(value, known) if isinstance(value, str) else "")
        ) from error


class Verdict(IntEnum):
    """The agreed state of a step; a doubtful one is decided by its reduced gradients."""

    FINITE = 0
    DOUBTFUL = 1
    NONFINITE = 2


class Agreement:
    """One rank's side of the agreement. Making it, `total_loss` and `are_finite` are collective."""

    def __init__(self, program: RankProgram, communicator: Communicator) -> None:
        assert program.loss is not None
        world = communicator.world
        self.device = communicator.device
        self.verdict = Verdict.FINITE
        self._meta = program.loss.meta
        self._num_ranks = world.num_devices
        self._is_alone = world.num_devices == 1 and self.device.type == "cpu"
        self._num_terms = world.num_devices * program.num_microbatches
        self._sum = communicator.bind_in_place(world.axes_label(range(world.num_axes)))
        # Along axes where the loss is replicated, the first rank sends it.
        mesh, summed = program.mesh, _summed_axes(program)
        others = [axis for axis in range(mesh.num_axes) if mesh.axis_names[axis] not in summed]
        self._counts = mesh.index(communicator.rank, others) == 0
        self._norms: dict[torch.dtype, list[Tensor]] = {}
        # A rank that is alone looks at all gradients at once, unless early updates or casts to
        # another dtype free them.
        moved = any(p.trainable and p.kernel is not None for p in program.parameters)
        self._at_once = self._is_alone and program.early is None and not moved
        self._waiting: dict[tuple[torch.dtype, torch.dtype], list[Tensor]] = {}

    def begin_step(self) -> None:
        """Reset, also after a step that was interrupted."""
        self._norms.clear()
        self._waiting.clear()

    def inspect(self, gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        """Examine complete gradients of this rank, each of which will be reduced in its dtype."""
        for gradient, dtype in zip(gradients, dtypes, strict=True):
            self._waiting.setdefault((gradient.dtype, dtype), []).append(gradient)
        if not self._at_once:
            self._inspect_waiting()

    def _inspect_waiting(self) -> None:
        for (own, dtype), found in self._waiting.items():
            norms = norm_each(found, torch.promote_types(own, torch.float32))
            self._norms.setdefault(dtype, []).extend(norms)
        self._waiting.clear()

    def inspect_sum(self, gradient: Tensor) -> None:
        """Examine a gradient that has been reduced: there is no doubt left about it."""
        largest = torch.linalg.vector_norm(gradient, ord=math.inf)
        is_wrong = (largest * 0).to(torch.float32)  # NaN unless it is finite
        self._norms.setdefault(torch.float32, []).append(is_wrong)

    def refuse(self) -> None:
        """Refuse the step on this rank, whatever its gradients are."""
        self._waiting.clear()
        self._norms[torch.float32] = [torch.full((), math.nan, device=self.device)]

    def total_loss(self, part: Tensor | None) -> Tensor:
        """Sum the loss over the ranks, and with it the verdict."""
        if self._is_alone and part is not None:
            shares = [largest.item() / limit for largest, limit in self._largest()]
            is_wrong = any(map(math.isnan, shares))
            self._judge(part.item(), math.nan if is_wrong else max(shares, default=0.0))
            return part.reshape(self._meta.shape)
        pair = self.summed(part)
        self.judge(pair)
        return pair[0].reshape(self._meta.shape)

    def summed(self, part: Tensor | None) -> Tensor:
        """The loss and the doubt about the step, summed over the ranks; on the device, unread."""
        pair = torch.zeros(2, dtype=self._meta.dtype, device=self.device)
        if part is not None and self._counts:
            pair[0] = part.reshape(())
        self._inspect_waiting()
        if self._norms:
            pair[1] = self._doubt()
        if self._num_ranks > 1:
            self._sum(pair)
        return pair

    def judge(self, pair: Tensor) -> None:
        """Take the verdict from what `summed` gave; the host waits for it."""
        self._judge(*pair.tolist())

    def _judge(self, loss: float, doubt: float) -> None:
        self.verdict = Verdict.DOUBTFUL if doubt >= 1 else Verdict.FINITE
        if math.isnan(doubt) or not math.isfinite(loss):
            self.verdict = Verdict.NONFINITE

    def _doubt(self) -> Tensor:
        """0, a positive number if a sum over the ranks may overflow, NaN if a gradient has one.

        No element exceeds the norm, and no sum, over micro-batches too, exceeds the total of all
        ranks' largest elements.
        """
        shares = [(largest / limit).double() for largest, limit in self._largest()]
        return torch.stack(shares).amax().floor()

    def _largest(self) -> list[tuple[Tensor, float]]:
        """By dtype of reductions, the largest norm, and what each term of a sum may be."""
        self._inspect_waiting()
        largest = [
            (torch.stack(norms).amax(), torch.finfo(dtype).max / self._num_terms)
            for dtype, norms in self._norms.items()
        ]
        self._norms.clear()
        return largest

    def are_finite(self, gradients: Iterable[Tensor]) -> bool:
        """Whether all ranks' reduced gradients are finite."""
        num_wrong = torch.zeros((), device=self.device)
        for gradient in gradients:
            num_wrong += ~gradient.isfinite().all()
        if self._num_ranks > 1:
            self._sum(num_wrong)
        return not num_wrong.item()


def _summed_axes(program: RankProgram) -> set[str]:
    """The mesh axes along which the loss is a partial sum."""
    assert program.loss is not None
    if program.loss.kernel is None:
        return set()
    graph = program.kernels[program.loss.kernel].forward.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert all(node.target is ALL_REDUCE for node in calls), graph
    return {name for node in calls for name in str(node.args[1]).split(",")}
