"""Updates of an array: each model's own, and none for a model whose step is not finite.

In: the gradients of all models, stacked. Out: updated rows. One number per model is summed over the
ranks, the square of its gradients' norm; it says whether the model's step is finite, and clips its
gradients. If a model's step is not finite, ``nonfinite="raise"`` updates no model, and ``"skip"``
all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autopar.comm.groups import Communicator
from autopar.lowering.types import ParameterProgram
from autopar.runtime.state.model_optimizers import ModelOptimizers
from autopar.runtime.state.shards import holder
from autopar.runtime.step.agreement import NonFinite
from autopar.runtime.step.clipping import EPSILON
from autopar.runtime.step.reductions import Gradients
from autopar.runtime.step.updates import Updates


class ModelUpdates(Updates):
    """The updates of one rank of an array; ``updated`` says which models took the last step."""

    def __init__(
        self,
        optimizers: ModelOptimizers,
        trained: Mapping[int, nn.Parameter],
        names: Mapping[int, str],
        communicator: Communicator,
        programs: Sequence[ParameterProgram],
        nonfinite: NonFinite,
    ) -> None:
        super().__init__(
            None, None, trained, names,
            clipper=None, agreement=None, nonfinite=nonfinite, is_late=False,
        )  # fmt: skip
        self.optimizers = optimizers
        self.models = optimizers.options.models
        self.updated = [False] * len(self.models)
        self.norms: Tensor | None = None
        mesh, world, rank = communicator.mesh, communicator.world, communicator.rank
        self._device = communicator.device
        self._models_of = self._models_of_rows()
        self._counted = {p.name for p in programs if holder(p.stored, mesh, rank) == rank}
        self._sum = communicator.bind_in_place(world.axes_label(range(world.num_axes)))
        self._num_ranks = world.num_devices
        is_double = any(p.dtype.to_real() is torch.float64 for p in programs)
        self._dtype = torch.float64 if is_double else torch.float32

    def end_models(self, gradients: Gradients[Tensor], losses: Tensor) -> bool:
        """Wait for all gradients, and update every model whose step is finite.

        False if no model was updated; the same on all ranks.
        """
        for arrived in gradients.arrivals():
            self._keep(arrived)
        num = len(self.models)
        self.norms = self._norms()
        numbers = losses.tolist()
        takes = [True] * num
        if self.nonfinite is not NonFinite.IGNORE:
            pairs = zip(self.norms.tolist(), numbers)
            takes = [math.isfinite(norm) and math.isfinite(loss) for norm, loss in pairs]
        if self.is_void or (self.nonfinite is NonFinite.RAISE and not all(takes)):
            takes = [False] * num
        updated = [model for model, takes_it in enumerate(takes) if takes_it]
        self.optimizers.set_gradients({model: self._factor(model) for model in updated})
        for model in updated:
            self.optimizers.step(model, numbers[model])
        self.updated = takes
        return any(takes)

    def _norms(self) -> Tensor:
        """The 2-norm of each model's gradients; NaN for all if a rank's step is void."""
        num = len(self.models)
        squares = torch.zeros(num + 1, dtype=self._dtype, device=self._device)
        norms, models = [], []
        for name, gradient in self.gradients().items():
            if name not in self._counted:
                continue
            precise = torch.promote_types(gradient.dtype, torch.float32)
            own = self._models_of[name]
            rows = gradient.reshape(len(own), -1)
            norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=precise).to(self._dtype))
            models.append(own)
        if norms:
            squares.index_add_(0, torch.cat(models), torch.cat(norms).square_())
        if self.is_void:
            squares.fill_(torch.nan)
        if self._num_ranks > 1:
            self._sum(squares)
        return squares[:num].sqrt().double().cpu()

    def _models_of_rows(self) -> dict[str, Tensor]:
        """The models of a parameter's rows on this rank, or the one model that has all of it.

        Padding rows have the number of models.
        """
        found = {
            (ref.name, ref.row): model
            for model, own in enumerate(self.models)
            for ref in own.trained
        }
        rows: dict[str, list[int | None]] = {
            name: [*own] or [None] for name, own in self.optimizers.models_of.items()
        }
        return {
            name: torch.tensor([found.get((name, row), len(self.models)) for row in own],
                               device=self._device)
            for name, own in rows.items()
        }  # fmt: skip

    def _factor(self, model: int) -> Tensor | None:
        limit = self.models[model].max_grad_norm
        if limit is None or self.norms is None:
            return None
        norm = self.norms[model].to(self._dtype)
        return (limit / (norm + EPSILON)).clamp(max=1.0).to(self._device)
