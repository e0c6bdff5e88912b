"""The keywords of `autopar.plan` and `autopar.compile` as frozen, validated values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.base.errors import InputError, PlanError
from autopar.cost_models import ComputeModel
from autopar.cost_models.hardware import is_count
from autopar.frontend.targets import LossFn, check_loss_fn
from autopar.ir.precision import Precision
from autopar.ir.update import Update
from autopar.passes.batch_norm import BatchNorm, check_batch_norm
from autopar.planning.constraints import Constraint, Forbid, Force, forced_axes, named_axes
from autopar.planning.meshes import AXIS_NAMES, MeshSizes, check_mesh
from autopar.planning.recompute_request import Recompute, RecomputeOption
from autopar.planning.space import Space, space_of
from autopar.plans.document import Plan
from autopar.runtime.measure.kernel_choice import check_kernels
from autopar.runtime.options import RunOptions, is_seconds
from autopar.runtime.state.model_options import ArrayOptions
from autopar.runtime.state.optimizers import MakeOptimizer, check_makes_optimizer
from autopar.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The keywords of `autopar.plan`.

    Raises InputError or OptimizerError.
    """

    loss_fn: LossFn | None = None
    mesh: MeshSizes | None = None
    constraints: Sequence[Constraint] | Constraint = ()
    num_microbatches: int | None = None
    num_stages: int | None = None
    schedule: str | Schedule | None = None
    cuts: Sequence[str] | None = None
    recompute: RecomputeOption | None = None
    reshard_after_forward: bool | None = None
    reduce_every_microbatch: bool | None = None
    offload: bool | None = None
    batch_norm: str = "global"
    precision: Precision | None = None
    optimizer: MakeOptimizer | None = None
    update: Update | None = None
    compute: ComputeModel | None = None
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        check_loss_fn(self.loss_fn)
        check_batch_norm(self.batch_norm)
        check_makes_optimizer(self.optimizer)
        check_mesh(self.mesh)
        Recompute.of(self.recompute)
        if not isinstance(self.offload, bool | None):
            raise InputError(f"offload is {self.offload!r}; it must be True, False or None")
        if not isinstance(self.reshard_after_forward, bool | None):
            raise InputError(
                f"reshard_after_forward is {self.reshard_after_forward!r}; it must be True, False "
                "or None"
            )
        if self.reshard_after_forward and self._stores_whole():
            raise InputError(
                "reshard_after_forward=True, but constraints forbid sharded parameters, so none is "
                "gathered and released; remove one of them"
            )
        if self.num_microbatches is not None and not is_count(self.num_microbatches):
            raise InputError(
                f"num_microbatches is {self.num_microbatches!r}; it must be a whole number, at "
                "least 1, or None"
            )
        if self.time_limit_s is not None and not is_seconds(self.time_limit_s):
            raise InputError(
                f"time_limit_s is {self.time_limit_s!r}; it must be a number of seconds, at least "
                "0, such as time_limit_s=60.0"
            )
        self._check_reduction()

    def _check_reduction(self) -> None:
        """Raise InputError where gradients cannot be reduced in every micro-batch as asked."""
        if not isinstance(self.reduce_every_microbatch, bool | None):
            raise InputError(
                f"reduce_every_microbatch is {self.reduce_every_microbatch!r}; it must be True, "
                "False or None"
            )
        if not self.reduce_every_microbatch:
            return
        if self._stores_whole():
            raise InputError(
                "reduce_every_microbatch=True, but constraints forbid sharded parameters, so no "
                "gradient becomes smaller; remove one of them"
            )
        if self.schedule is not None or self.num_stages not in (None, 1):
            raise InputError(
                "reduce_every_microbatch=True with a pipeline or a schedule, which reduces "
                "gradients once per step; leave out one of them"
            )
        if self.num_microbatches in (None, 1):
            raise InputError(
                "reduce_every_microbatch=True without micro-batches: a gradient is reduced once. "
                "Write num_microbatches=8, or leave it out"
            )

    def _stores_whole(self) -> bool:
        """Whether the constraints store parameters as blocks use them, on all axes."""
        whole = (Force("data_parallel"), Forbid("zero3"))
        given = self.constraints
        return any(each in whole for each in (given if isinstance(given, Sequence) else [given]))

    def with_mesh(self, mesh: MeshSizes | None) -> PlanOptions:
        return replace(self, mesh=mesh)

    def space(self, num_devices: int) -> Space:
        """The search space of a plan for ``num_devices``; raises InputError."""
        space = space_of(
            num_devices,
            mesh=self.mesh,
            num_microbatches=self.num_microbatches,
            num_stages=self.num_stages,
            schedule=self.schedule,
            cuts=self.cuts,
            recompute=Recompute.of(self.recompute),
        )
        return replace(
            space,
            reshard_after_forward=self.reshard_after_forward,
            reduce_every_microbatch=self.reduce_every_microbatch,
            offload=self.offload,
            kept_axes=named_axes(self.constraints, self.mesh or ()),
            forced_axes=forced_axes(self.constraints, self.mesh or AXIS_NAMES),
        )

    @property
    def takes_other_batches(self) -> bool:
        """Whether a plan's model can train on batches that need a program of their own."""
        return self.offload is not True and self.batch_norm == BatchNorm.GLOBAL

    def searched(self) -> list[str]:
        """The keywords given that a plan decides, as ``name=value``."""
        decided = {
            "mesh": self.mesh or None,
            "constraints": self.constraints or None,
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "cuts": self.cuts,
            "recompute": self.recompute,
            "reshard_after_forward": self.reshard_after_forward,
            "reduce_every_microbatch": self.reduce_every_microbatch,
            "offload": self.offload,
            "update": self.update,
        }
        return [f"{name}={value!r}" for name, value in decided.items() if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The keywords of `autopar.compile`: those of the plan, or a plan, and how to run it.

    Raises InputError, PlanError or OptimizerError.
    """

    planning: PlanOptions
    running: RunOptions
    plan: Plan | str | Path | None = None
    check_gradients: bool = True
    profile_limit_s: float = 60.0
    kernels: str | None = None

    def __post_init__(self) -> None:
        check_kernels(self.kernels)
        if not isinstance(self.check_gradients, bool):
            raise InputError(
                f"check_gradients is {self.check_gradients!r}; it must be True or False"
            )
        if not is_seconds(self.profile_limit_s):
            raise InputError(
                f"profile_limit_s is {self.profile_limit_s!r}; it must be a number of seconds, at "
                "least 0, such as profile_limit_s=60.0, or 0 to measure nothing"
            )
        if not isinstance(self.plan, Plan | str | Path | None):
            raise PlanError(
                f"plan is {self.plan!r}; pass the result of autopar.plan(...), or the path of its "
                "JSON"
            )
        given = [] if self.plan is None else self.planning.searched()
        if self.plan is not None and self.kernels is not None:
            given.append(f"kernels={self.kernels!r}")
        if given:  # a plan fixes all of these; they would be ignored
            raise InputError(
                f"{', '.join(given)} given with plan=...: a plan is replayed unchanged; remove "
                "these, or remove plan= to search again"
            )

    @property
    def clips_at_end(self) -> bool:
        """Whether gradients are clipped together, when all of them are complete."""
        update = self.planning.update
        is_early = update is not None and update.is_early
        return self.running.max_grad_norm is not None and not is_early


def compile_options(
    *,
    loss_fn: Any,
    optimizer: Any,
    lr_scheduler: Any,
    max_grad_norm: Any,
    seed: Any,
    nonfinite: str,
    start_timeout_s: float,
    call_timeout_s: float,
    cuda_graphs: bool,
    plan: Plan | str | Path | None,
    check_gradients: bool,
    profile_limit_s: float,
    kernels: str | None,
    array: ArrayOptions | None = None,
    **searched: Any,
) -> CompileOptions:
    """The keywords of `autopar.compile`; ``searched`` are those that a plan decides."""
    return CompileOptions(
        planning=PlanOptions(loss_fn=loss_fn, optimizer=optimizer, **searched),
        running=RunOptions(
            loss_fn=loss_fn, optimizer=optimizer, lr_scheduler=lr_scheduler,
            max_grad_norm=max_grad_norm, nonfinite=nonfinite, seed=seed, array=array,
            cuda_graphs=cuda_graphs,
            start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s,
        ),
        plan=plan,
        check_gradients=check_gradients,
        profile_limit_s=profile_limit_s,
        kernels=kernels,
    )  # fmt: skip
