"""The start of a compiled model's ranks: this process, for one CPU or under ``torchrun``, or local
workers.

In: a program, the model with its initial state, and how it trains. Out: its runner, and the options
that each rank got.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autopar.frontend.capture import Captured
from autopar.lowering.types import RankProgram
from autopar.movement.execution import Movement
from autopar.runtime.options import RunOptions
from autopar.runtime.runner import Runner
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.runners.own_process import OwnProcess
from autopar.runtime.runners.spmd import SpmdRunner, is_spmd
from autopar.runtime.state.initial import initial_state, state_keys
from autopar.runtime.state.schedulers import checked_scheduler
from autopar.runtime.step.agreement import NonFinite
from autopar.runtime.step.rank_options import RankOptions
from autopar.runtime.workers.group import WorkerGroup


def rank_options(
    captured: Captured,
    program: RankProgram,
    model: nn.Module,
    options: RunOptions,
    movement: tuple[Movement, ...],
) -> RankOptions:
    """The options of each rank; without a seed, that of torch's generator."""
    seed = torch.initial_seed() if options.seed is None else options.seed
    return RankOptions(
        keys=state_keys(model, captured, program),
        optimizer=options.optimizer,
        lr_scheduler=checked_scheduler(options.lr_scheduler),
        seed=seed & (2**63 - 1),
        max_grad_norm=options.max_grad_norm,
        nonfinite=NonFinite(options.nonfinite),
        array=options.array,
        precision=captured.precision,
        movement=movement,
        cuda_graphs=options.cuda_graphs,
    )


def started(
    program: RankProgram,
    model: nn.Module,
    ranks: RankOptions,
    devices: Sequence[torch.device],
    options: RunOptions,
) -> Runner:
    """The runner of a program whose state is the model's: this process, under ``torchrun`` or with
    one CPU alone, or one worker a device."""
    state = initial_state(model, options.loss_fn)
    if is_spmd():
        return SpmdRunner(program, state, ranks, timeout_s=options.call_timeout_s)

    def start() -> WorkerGroup | OwnProcess:
        if is_own_process(devices):
            return OwnProcess(ranks.default_dtype, call_timeout_s=options.call_timeout_s)
        return LocalRunner.start_workers(
            devices,
            start_timeout_s=options.start_timeout_s,
            call_timeout_s=options.call_timeout_s,
        )

    return LocalRunner(program, state, ranks, start)


def is_own_process(devices: Sequence[torch.device]) -> bool:
    """Whether a model compiled for these devices runs in this process, without workers: one CPU."""
    return not is_spmd() and [device.type for device in devices] == ["cpu"]
