"""What a compiled model asks of its ranks; the runners of workers and of torchrun answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from autopar.lowering.types import RankProgram
from autopar.runtime.checkpointing import SavingRunner
from autopar.runtime.loop import LoopRunner
from autopar.runtime.state.checkpoint_paths import Path
from autopar.runtime.state.model_optimizers import ModelState
from autopar.runtime.step.begun_call import BegunCall
from autopar.runtime.step.timing import RankTimes, Timing


class Runner(SavingRunner, LoopRunner, Protocol):
    """Runs the ranks: this process's own, under ``torchrun``, or local workers.

    ``not_compiled`` names the graphs that should be compiled and cannot be, with the reasons;
    ``graph_notes`` what runs as CUDA graphs and why the rest does not, nothing on CPUs.
    """

    @property
    def not_compiled(self) -> list[str]: ...

    def allow_graphs(self, is_allowed: bool) -> None: ...

    def graph_notes(self) -> list[str]: ...

    def train_step(
        self, tensors: Sequence[Tensor], *, local: bool = False, slot: int = 0
    ) -> Tensor: ...

    def set_training_program(self, slot: int, program: RankProgram) -> None: ...

    def begin_call(self, begun: BegunCall) -> bool: ...

    @property
    def grad_norm(self) -> Tensor | None: ...

    @property
    def loss_scale(self) -> float: ...

    def set_forward_program(self, slot: int, program: RankProgram) -> None: ...

    def forward(
        self,
        slot: int,
        tensors: Sequence[Tensor],
        *,
        local: bool = False,
        as_training_pass: bool = False,
    ) -> list[Tensor]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def full_state_dict(self) -> dict[str, Tensor]: ...

    def gradients(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...

    def model_states(self) -> list[ModelState]: ...

    def load_model_states(self, states: Sequence[ModelState]) -> None: ...

    def save(self, path: Path, *, allow_nonfinite: bool = False) -> None: ...

    def memory_growth_bytes(self) -> list[int]: ...

    def start_counting_tensors(self) -> None: ...

    def counted_tensor_bytes(self) -> list[int]: ...

    def set_timing(self, timing: Timing) -> None: ...

    def step_times(self) -> list[RankTimes]: ...

    def close(self) -> None: ...
