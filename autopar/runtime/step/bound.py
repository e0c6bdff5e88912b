"""A program bound to one rank: its executor, and the state of the rank that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.lowering.types import RankProgram
from autopar.runtime.step.agreement import Agreement
from autopar.runtime.step.executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A program with the parameters and constants that it reads; ``buffers`` are names.

    ``agreement``: that of the ranks on a training step, if they agree.
    """

    program: RankProgram
    executor: Executor[Tensor]
    is_random: bool
    parameters: Mapping[int, nn.Parameter]
    buffers: Mapping[int, str]
    constants: Mapping[int, Tensor]
    agreement: Agreement | None

    @property
    def changed(self) -> set[str]:
        """The buffers that its steps change."""
        return {b.name for b in self.program.buffers if b.following is not None}

    @staticmethod
    def of(
        executor: Executor[Tensor],
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        agreement: Agreement | None,
    ) -> Bound:
        """The program of an executor, with those of its parameters that this rank has."""
        program = executor.program
        constants = dict(program.constants)
        return Bound(
            program=program,
            executor=executor,
            is_random=program.is_random,
            parameters={
                p.value: parameters[p.name] for p in program.parameters if p.name in parameters
            },
            buffers={b.value: b.name for b in program.buffers if b.name not in constants},
            constants={
                b.value: constants[b.name].to(device)
                for b in program.buffers
                if b.name in constants
            },
            agreement=agreement,
        )

    def held(self, buffers: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Constants and present buffers, by value."""
        return {**self.constants, **{v: buffers[name] for v, name in self.buffers.items()}}
