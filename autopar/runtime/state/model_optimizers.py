"""The optimizers of an array: one per model, over its rows of the stacked parameters.

torch's optimizers have no hyper-parameters per row, and reimplementing their formulas with vectors
would agree with them up to rounding at best, and need an update for each release. A row of a
stacked parameter is a contiguous view, so each model's own optimizer, made by the user's function,
updates it in place with the kernel that it would use alone: bit-identical, whatever its class,
groups, hyper-parameters and scheduler are. It costs one update per model instead of one for all,
which is little more than a kernel where `autopar.runtime.state.fused_steps` applies.

If the models are split over devices, stand-ins replace a model's parameters on other devices, as
they do for other pipeline stages; its groups and its scheduler advance alike everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.comm.groups import Communicator
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R, S, State
from autopar.lowering.types import ParameterProgram
from autopar.runtime.state.dtensors import DTensorConverter
from autopar.runtime.state.model_options import ArrayOptions, ModelOptions, RowRef
from autopar.runtime.state.optimizers import is_like_parameter, make_optimizer, update
from autopar.runtime.state.shards import local_part


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The state of one model's training besides its tensors: ``optimizer`` in torch's own format,
    by the indices of its trained parameters; ``num_steps`` counts its updates."""

    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    num_steps: int


class ModelOptimizers:
    """One rank's rows of the parameters, and one optimizer per model over them."""

    def __init__(
        self,
        options: ArrayOptions,
        programs: Mapping[str, ParameterProgram],
        parameters: Mapping[str, nn.Parameter],
        communicator: Communicator,
    ) -> None:
        self.options = options
        self.programs = programs
        self.parameters = parameters
        self.communicator = communicator
        self._is_stacked = _stacked_names(options)
        self.models_of = {
            name: _local_rows(programs[name], communicator, self._is_stacked[name])
            for name in programs
            if name in self._is_stacked
        }
        self.rows: list[dict[int, nn.Parameter]] = []
        self._sources: list[dict[int, tuple[str, int]]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.group_places: list[list[list[int]]] = []
        for model, own in enumerate(options.models):
            self._sources.append(self._places_here(own))
            rows = self._rows(own, self._sources[model])
            self.rows.append(rows)
            optimizer = _make_own(own, rows, programs, communicator.mesh)
            self.optimizers.append(optimizer)
            self.group_places.append(_places(own, self.programs))
            make = own.lr_scheduler
            self.schedulers.append(None if make is None else make(optimizer))

    def _places_here(self, own: ModelOptions) -> dict[int, tuple[str, int]]:
        """The tensor and its row on this rank of the model's trained parameters that are here, by
        their index among all of its own."""
        rows = {place: (ref.name, self.local_row(ref)) for place, ref in enumerate(own.trained)}
        return {place: (name, row) for place, (name, row) in rows.items() if row is not None}

    def _rows(
        self, own: ModelOptions, sources: Mapping[int, tuple[str, int]]
    ) -> dict[int, nn.Parameter]:
        """The model's trained parameters on this rank, by their index among all of its own."""
        found = {}
        for place, (name, local) in sources.items():
            data = self.parameters[name].detach()
            is_row = own.trained[place].row is not None
            found[place] = nn.Parameter(data[local] if is_row else data)
        return found

    def local_row(self, ref: RowRef) -> int | None:
        """The position of a row on this rank, None if elsewhere; unstacked tensors are row 0."""
        if ref.row is None:
            return 0
        rows = self.models_of[ref.name]
        return rows.index(ref.row) if ref.row in rows else None

    def set_gradients(self, factors: Mapping[int, Tensor | None]) -> None:
        """Set the gradients of these models' rows, scaled by the factors of those clipped."""
        parts = {name: self._by_row(name) for name in self.models_of}
        for model, factor in factors.items():
            without = self.options.models[model].without_gradient
            for place, row in self.rows[model].items():
                name, local = self._sources[model][place]
                has_gradient = parts[name] and place not in without
                gradient = parts[name][local] if has_gradient else None
                if gradient is not None and factor is not None:
                    gradient = gradient * factor
                row.grad = gradient

    def _by_row(self, name: str) -> Sequence[Tensor]:
        """The gradients of a parameter's rows on this rank; none if it has no gradient."""
        whole = self.parameters[name].grad
        if whole is None:
            return ()
        return whole.unbind() if self._is_stacked[name] else (whole,)

    def step(self, model: int, loss: float) -> None:
        """Update one model, and its scheduler."""
        update(self.optimizers[model])
        scheduler = self.schedulers[model]
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        elif scheduler is not None:
            scheduler.step()
        for row in self.rows[model].values():
            row.grad = None

    # --- state -----------------------------------------------------------------------------

    def states(self, num_steps: Sequence[int], dtensors: DTensorConverter) -> list[ModelState]:
        """The state of each model with whole tensors, on every rank. Collective."""
        own_scalars: dict[tuple[int, int, str], Any] = {}
        own_tensors: dict[tuple[int, int, str], torch.dtype] = {}
        for model, rows in enumerate(self.rows):
            for place, row in rows.items():
                for key, value in self.optimizers[model].state.get(row, {}).items():
                    if is_like_parameter(value, row):
                        own_tensors[model, place, key] = value.dtype
                    else:  # a tensor on another rank's GPU would arrive on that one
                        own_scalars[model, place, key] = (
                            value.cpu() if isinstance(value, Tensor) else value
                        )
        gathered = self.communicator.from_all_ranks((own_scalars, own_tensors))
        scalars = {k: v for found, _ in reversed(gathered) for k, v in found.items()}
        tensors = {k: v for _, found in reversed(gathered) for k, v in found.items()}
        wholes: dict[tuple[str, str], Tensor] = {}
        for (model, place, key), dtype in sorted(tensors.items()):
            name = self.options.models[model].trained[place].name
            if (name, key) not in wholes:
                wholes[name, key] = self._whole(name, key, dtype, dtensors)
        states: list[dict[int, dict[str, Any]]] = [{} for _ in self.rows]
        for (model, place, key), value in scalars.items():
            states[model].setdefault(place, {})[key] = value
        for model, place, key in tensors:
            ref = self.options.models[model].trained[place]
            whole = wholes[ref.name, key]
            part = whole if ref.row is None else whole[ref.row]
            states[model].setdefault(place, {})[key] = part.clone()
        return [self._state(model, states[model], num_steps[model]) for model in range(len(states))]

    def _whole(self, name: str, key: str, dtype: torch.dtype, dtensors: DTensorConverter) -> Tensor:
        """One kind of state for all rows of a parameter; zeros for models without it."""
        local = torch.zeros_like(self.parameters[name].detach(), dtype=dtype)
        for model, rows in enumerate(self.rows):
            for place, row in rows.items():
                ref = self.options.models[model].trained[place]
                value = self.optimizers[model].state.get(row, {}).get(key)
                if ref.name == name and is_like_parameter(value, row):
                    (local if ref.row is None else local[self.local_row(ref)]).copy_(value)
        program = self.programs[name]
        return dtensors.whole(local, program.stored, program.shape)

    def _state(self, model: int, state: dict[int, dict[str, Any]], num_steps: int) -> ModelState:
        optimizer = self.optimizers[model]
        groups = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": list(places)}
            for g, places in zip(optimizer.param_groups, self.group_places[model])
        ]
        scheduler = self.schedulers[model]
        return ModelState(
            optimizer={"state": state, "param_groups": groups},
            scheduler=None if scheduler is None else scheduler.state_dict(),
            num_steps=num_steps,
        )

    def load(self, states: Sequence[ModelState]) -> None:
        """Continue from what `states` returned, on any devices."""
        mesh, rank = self.communicator.mesh, self.communicator.rank
        for model, given in enumerate(states):
            optimizer = self.optimizers[model]
            for group, saved in zip(optimizer.param_groups, given.optimizer["param_groups"]):
                group.update((k, v) for k, v in saved.items() if k != "params")
            for place, row in self.rows[model].items():
                ref = self.options.models[model].trained[place]
                program = _program_of_row(self.programs[ref.name], ref)
                optimizer.state.pop(row, None)
                for key, value in given.optimizer["state"].get(place, {}).items():
                    if isinstance(value, Tensor) and tuple(value.shape) == program.shape != ():
                        value = local_part(value, program.stored, mesh, rank)
                    if isinstance(value, Tensor):
                        value = value.to(_device_of(key, row, optimizer), copy=True)
                    optimizer.state[row][key] = value
            if self.schedulers[model] is not None and given.scheduler is not None:
                self.schedulers[model].load_state_dict(given.scheduler)


def check_models(options: ArrayOptions, programs: Sequence[ParameterProgram], mesh: Mesh) -> None:
    """Raise the error of a model whose optimizer or scheduler is wrong, by making both."""
    by_name = {program.name: program for program in programs}
    for own in options.models:
        optimizer = _make_own(own, {}, by_name, mesh)
        if own.lr_scheduler is not None:
            own.lr_scheduler(optimizer)


def _make_own(
    own: ModelOptions,
    rows: Mapping[int, nn.Parameter],
    programs: Mapping[str, ParameterProgram],
    mesh: Mesh,
) -> torch.optim.Optimizer:
    """A model's optimizer over its ``rows`` that are here, by their index."""
    of_rows = [
        replace(_program_of_row(programs[ref.name], ref), name=str(place))
        for place, ref in enumerate(own.trained)
    ]
    named = {str(place): row for place, row in rows.items()}
    return make_optimizer(own.optimizer, named, of_rows, mesh, may_be_elsewhere=True)


def _device_of(key: str, row: Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """Where torch's optimizers hold a piece of a parameter's state: step counts on the CPU, unless
    a kernel on the GPU reads them."""
    groups = (g for g in optimizer.param_groups if any(p is row for p in g["params"]))
    group = next(groups, {})
    if key == "step" and not group.get("fused") and not group.get("capturable"):
        return torch.device("cpu")
    return row.device


def _places(own: ModelOptions, programs: Mapping[str, ParameterProgram]) -> list[list[int]]:
    """The indices of a model's parameters in each group of its optimizer."""
    every = [
        nn.Parameter(torch.empty(_program_of_row(programs[r.name], r).shape, device="meta"))
        for r in own.trained
    ]
    numbers = {id(p): place for place, p in enumerate(every)}
    groups = own.optimizer(every).param_groups
    return [[numbers[id(p)] for p in group["params"]] for group in groups]


def _stacked_names(options: ArrayOptions) -> dict[str, bool]:
    """Whether each trained tensor is stacked."""
    return {ref.name: ref.row is not None for own in options.models for ref in own.trained}


def _local_rows(
    program: ParameterProgram, communicator: Communicator, is_stacked: bool
) -> list[int]:
    """The rows of a stacked parameter on this rank, in order; -1 for padding."""
    if not is_stacked:
        return []
    ones = (1,) * (len(program.shape) - 1)
    numbers = torch.arange(1, program.shape[0] + 1).view(-1, *ones).expand(program.shape)
    part = local_part(numbers, program.stored, communicator.mesh, communicator.rank)
    while part.dim() > 1:
        part = part[:, 0]
    return [int(number) - 1 for number in part]


def _program_of_row(program: ParameterProgram, ref: RowRef) -> ParameterProgram:
    """A model's parameter as its own program would have it."""
    if ref.row is None:
        return program
    return replace(program, shape=program.shape[1:], stored=_of_row(program.stored))


def _of_row(stored: Placements) -> Placements:
    return tuple(
        p if p.state is not State.SHARD else R if p.dim == 0 else S(p.dim - 1, p.outer)
        for p in stored
    )
