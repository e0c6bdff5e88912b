"""The state of one rank's optimizer as a state dict by parameter names, out and in.

In: the optimizer, this rank's shards of the parameters, and state dicts of any mesh. Out: state
dicts whose tensors are DTensors like their parameters, or this rank's shards; the optimizer with
the state of one. A state dict that does not fit is refused before anything changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.comm.groups import Communicator
from autopar.lowering.types import ParameterProgram, RankProgram
from autopar.runtime.state.checks import check_optimizer_state, without_parameters
from autopar.runtime.state.dtensors import DTensorConverter
from autopar.runtime.state.optimizers import is_like_parameter, joined_groups, materialize_state


class OptimizerState:
    """The state of ``optimizer``, None on a pipeline device whose stages have nothing to train.

    ``parameters`` and ``programs`` are this device's, by name.
    """

    def __init__(
        self,
        program: RankProgram,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        programs: Mapping[str, ParameterProgram],
        dtensors: DTensorConverter,
    ) -> None:
        self.program = program
        self.optimizer = optimizer
        self.parameters = parameters
        self.programs = programs
        self.dtensors = dtensors
        self.communicator = dtensors.communicator
        self._names = {id(p): name for name, p in parameters.items()}

    def state_dict(self, *, local: bool = False) -> dict[str, Any]:
        """``{"state": {parameter name: {...}}, "param_groups": [...]}``.

        State with one element per element of its parameter is a DTensor like it (with ``local``
        this rank's shard); the rest (step counts) is left as it is.
        """
        state: dict[str, dict[str, Any]] = {}
        groups = []
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            names = [self._names[id(p)] for p in group["params"]]
            for parameter, name in zip(group["params"], names):
                if self.optimizer is not None and parameter in self.optimizer.state:
                    entries = self.optimizer.state[parameter]
                    state[name] = dict(entries) if local else self._entries_out(name, entries)
            groups.append({**group, "params": names})
        if not local and self.program.pipeline.num_devices > 1:
            groups = self._groups_of_all(groups)
        return {"state": state, "param_groups": groups}

    def _groups_of_all(self, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The parameter groups of all devices of a pipeline, joined."""
        gathered = self.communicator.from_all_ranks(own)
        return joined_groups(gathered, self.program.parameters)

    def _entries_out(self, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        program, parameter = self.programs[name], self.parameters[name]
        return {
            key: self.dtensors.out(value, program.stored, program.shape)
            if is_like_parameter(value, parameter)
            else value
            for key, value in entries.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, on any mesh, whole tensors or DTensors. Collective.

        Raises InputError if it does not fit, and leaves everything as it was.
        """
        state = self._of_this_device(state)
        with self.materialized(), refused_by_all(self.communicator):
            self.check(state)
        if self.optimizer is None:
            return
        for group, given in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update((k, v) for k, v in given.items() if k != "params")
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                if name in state["state"]:
                    self._entries_in(name, self.optimizer.state[parameter], state["state"][name])
                else:
                    self.optimizer.state.pop(parameter, None)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise InputError unless a state dict fits; within `materialized`."""
        if self.optimizer is not None:
            shapes = {p.name: p.shape for p in self.program.parameters}
            own = self._of_this_device(state)
            check_optimizer_state(own, self.optimizer, self._names, shapes)

    def _of_this_device(self, state: Any) -> Any:
        elsewhere = {p.name for p in self.program.parameters} - self.programs.keys()
        return without_parameters(state, elsewhere)

    @contextlib.contextmanager
    def materialized(self) -> Iterator[None]:
        """Run with the state that the first step would make; an InputError removes it again."""
        optimizer = self.optimizer
        if optimizer is None:
            yield
            return
        is_new = not optimizer.state
        with torch.enable_grad():
            materialize_state(optimizer)
        try:
            yield
        except InputError:
            if is_new:
                optimizer.state.clear()
            raise

    def _entries_in(self, name: str, held: dict[str, Any], given: Mapping[str, Any]) -> None:
        parameter, program = self.parameters[name], self.programs[name]
        for key, value in given.items():
            if (
                key not in held
                and isinstance(value, Tensor)
                and tuple(value.shape) == program.shape
            ):
                held[key] = torch.empty_like(parameter, dtype=value.dtype)
            if is_like_parameter(held.get(key), parameter):
                self.dtensors.into(held[key], value, program.stored)
            elif isinstance(value, Tensor) and isinstance(held.get(key), Tensor):
                held[key] = value.detach().to(device=held[key].device, copy=True)
            else:
                held[key] = value


@contextlib.contextmanager
def refused_by_all(communicator: Communicator) -> Iterator[None]:
    """Raise an InputError of one rank on all of them. Collective."""
    refusal: InputError | None = None
    try:
        yield
    except InputError as error:
        refusal = error
    texts = communicator.from_all_ranks(None if refusal is None else str(refusal))
    first = next((text for text in texts if text is not None), None)
    if refusal is None and first is not None:
        refusal = InputError(first)
    if refusal is not None:
        raise refusal
