"""`plan` and `compile`, end to end on one page: capture, price, search, plan, lower, run.

``plan`` stops at the plan and needs no device; ``compile`` continues to a running program.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch.distributed as dist
from torch import nn

from autopar.base.accelerators import cpu_by_default, release_cached
from autopar.base.errors import GradientError, InputError
from autopar.base.exclusive import in_turn
from autopar.base.gc_pause import collector_paused
from autopar.base.spelling import refusing_unknown_keywords
from autopar.cost_models import Cluster, CommunicationModel, ComputeModel, default_store_path
from autopar.frontend.autocast import refuse_autocast
from autopar.frontend.capture import Captured, capture, check_model, split_inputs
from autopar.frontend.checking.gradients import check_trainable, compare_with_eager
from autopar.frontend.full_masks import full_masks_of
from autopar.frontend.targets import LossFn
from autopar.fusion.array import Array
from autopar.fusion.members import LEAVE, check_array, members_of
from autopar.ir.precision import Precision, check_precision
from autopar.ir.update import Update, check_update
from autopar.lowering.program import Traces
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.movement.execution import Movement
from autopar.options import CompileOptions, PlanOptions, compile_options
from autopar.passes.prepare import Prepared, prepare
from autopar.planning.constraints import Constraint
from autopar.planning.meshes import MeshSizes
from autopar.planning.movement import movement_of
from autopar.planning.other_calls import OtherCalls
from autopar.planning.planner import make_planned
from autopar.planning.recompute_request import RecomputeOption
from autopar.planning.setting import Progress
from autopar.planning.space import Space
from autopar.planning.worth_measuring import calls_worth_measuring, collectives_worth_measuring
from autopar.plans.binding import strategy_of
from autopar.plans.document import Plan
from autopar.plans.parts import agreed_precision
from autopar.report.progress import show_progress
from autopar.runtime.compiled import Compiled
from autopar.runtime.deferred import Deferred
from autopar.runtime.measure.collective_times import collective_times
from autopar.runtime.measure.kernel_choice import with_kernels
from autopar.runtime.measure.op_times import op_times
from autopar.runtime.options import check_early, check_offloaded, may_be_early
from autopar.runtime.runners.given_devices import Devices, given_devices
from autopar.runtime.runners.spmd import from_first_rank, is_spmd, rank_device, watched_compile
from autopar.runtime.runners.start import is_own_process
from autopar.runtime.state.model_options import ArrayOptions
from autopar.runtime.state.optimizers import MakeOptimizer, optimizer_spec
from autopar.runtime.step.agreement import check_nonfinite
from autopar.runtime.step.loss_scale import check_scaled
from autopar.runtime.workers import fork_server
from autopar.schedules import Schedule


@refusing_unknown_keywords
def plan(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    mesh: MeshSizes | None = None,
    constraints: Sequence[Constraint] | Constraint = (),
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    schedule: str | Schedule | None = None,
    cuts: Sequence[str] | None = None,
    recompute: RecomputeOption | None = None,
    reshard_after_forward: bool | None = None,
    reduce_every_microbatch: bool | None = None,
    offload: bool | None = None,
    batch_norm: str = "global",
    precision: str | Precision | None = None,
    optimizer: MakeOptimizer | None = None,
    update: str | Update | None = None,
    compute: ComputeModel | None = None,
    time_limit_s: float | None = None,
    progress: bool = False,
) -> Plan:
    """Search for the fastest strategy to train ``model`` on ``cluster``, offline.

    Arguments:

    * ``model``: any ``nn.Module``; its parameters may live on the meta device.
    * ``cluster``: the devices and links to plan for; none of them need to be present.
    * ``example_inputs``: a tuple (positional), a mapping (keyword) or one tensor: a *global* batch.
    * ``loss_fn``: ``loss_fn(output, *targets)`` for a model that does not return a loss; the
      targets are the last positional inputs, or the keyword inputs named like its parameters. Only
      the model is trained: gradients of other tensors that it uses are refused.
    * ``mesh``: axis names and sizes, outermost first. By default every factorisation is tried;
      sizes that are None are searched: ``{"dp": None, "tp": 2}``. In a pipeline it is the mesh of
      each pipeline rank. More than three axes are searched with adjacent ones merged, but for those
      that ``constraints`` name.
    * ``constraints``: strategies to force or forbid, placements to pin, a memory budget; see
      `autopar.planning.constraints`.
    * ``num_microbatches``: split the batch into this many equal micro-batches, computed in sequence
      with one update at the end. The result is that of the whole batch; activations take the memory
      of one micro-batch. By default searched for a pipeline, and where the memory takes the whole
      batch at once only with a loss of time, or not at all; otherwise 1, which also forbids
      pipelines that were not asked for.
    * ``num_stages``, ``schedule``: train as a pipeline of this many stages of contiguous blocks
      under a schedule: a name that `autopar.schedules.generators.build` knows (by default
      ``"1f1b"``), or a `Schedule` made by it. The schedule fixes the number of pipeline ranks,
      which share the cluster's devices evenly. With the name of a pipeline schedule, those of
      stages, micro-batches and mesh that are not given are searched together with the sharding;
      with ``"auto"`` the schedule is searched too, as is whether to use a pipeline at all; see
      `autopar.planning.planner`. By default it is searched on several nodes, where the memory costs
      time or communication is exposed. ``"conventional"`` and ``"reverse_first_k"`` (whose k is
      chosen by prices) are not pipelines: every device has all stages, and the reductions of their
      gradients overlap with the next step.
    * ``cuts``: the first blocks or modules of the second and later stages, such as
      ``"layers.4"``, or ``"layers.4.mlp"`` inside a layer; by default the stages are cut so that
      the slowest is as fast as possible, inside layers too where that may save time.
    * ``recompute``: which activations are recomputed in the backward pass instead of kept, block by
      block, without and with a pipeline. By default what fits the memory in the least time is
      searched: nothing, if everything fits. ``"none"`` keeps all that is needed, ``"full"`` as
      little as possible (blocks' inputs, and results of collectives); a list of module names
      recomputes what these modules compute; a number of bytes, text such as ``"8GiB"`` or a
      fraction such as 0.5 limits what is kept on a device; see `autopar.planning.recomputation`.
    * ``reshard_after_forward``: as in PyTorch's ``fully_shard``. With True every parameter that is
      gathered for its blocks is released after each forward pass and gathered again for the
      backward pass (ZeRO-3), in every micro-batch; with False it is gathered once per step and kept
      until its last use. By default as many are kept as fit the memory.
    * ``reduce_every_microbatch``: with True gradients of sharded parameters are reduce-scattered in
      every micro-batch and accumulate as shards (ZeRO-2, ZeRO-3); with False they accumulate whole
      and are reduced once per step (ZeRO-1; ``no_sync`` in PyTorch). By default as many accumulate
      whole as fit the memory. Pipelines always reduce once.
    * ``offload``: with True tensors may move to the host's memory and back in every step where the
      memory needs it, if that is predicted to be faster than recomputation: results that the
      backward pass reads, parameters that blocks read as they are stored, optimizer states,
      gradients between the micro-batches that contribute to them; those whose copies take least
      (`autopar.movement`). By default only where nothing else fits a GPU.
    * ``batch_norm``: ``"global"`` trains with the statistics of the whole batch, as one device
      does; ``"local"`` with those of each device's shard and without communication, as
      ``DistributedDataParallel`` does by default; see `autopar.passes.batch_norm`.
    * ``precision``: ``"bf16"`` or ``"fp16"`` computes in bfloat16 or float16, in which parameters
      are gathered too; parameters, gradients and optimizer state stay in the model's own dtypes
      (float32). A `Precision` also says in which dtype gradients are reduced; see
      `autopar.ir.precision` for the equivalent eager program. By default every op computes in the
      dtype that the model gives it.
    * ``optimizer``: makes the optimizer from a list of parameters, such as
      ``functools.partial(torch.optim.SGD, lr=0.1)``. It is called once, on a small parameter, to
      count the state that it keeps. By default the state of AdamW is assumed.
    * ``update``: ``"early"`` updates each parameter within the backward pass, as soon as its
      gradient is complete and reduced, and releases the gradient (known as optimizer in backward);
      very large ones are computed, reduced and used by rows. ``"at_end"`` updates after the
      backward pass. By default early only where the memory needs it and the optimizer is
      element-wise. A step under an early update cannot be undone once its backward pass has begun:
      see ``nonfinite`` of `compile`. With micro-batches gradients are accumulated, so only the last
      one can save; `autopar.Update` has more options.
    * ``compute``: the cost model of ops; by default an analytical roofline of ``cluster.device``.
      On unequal islands it prices the slowest devices, and rooflines all others.
    * ``time_limit_s``: seconds of processor time of the capture and a search over schedules, stages
      or micro-batches. The search has what the capture leaves, but at least half: a third of that
      to find options, the rest to lower them until one fits. A whole batch that fits only with less
      kept has a third of it before. By default 60, and in proportion more on over 4,096 devices.
      What was not tried is in the report. The sharding of each option is searched exactly, or to
      its own limit.
    * ``progress``: show what is being done; such a search shows the best step so far and, where
      all prices are analytical, its gap to a lower bound.

    Raises CaptureError, InputError, OptimizerError, ConstraintError, or PlanError if the batch
    cannot be split into ``num_microbatches``.
    """
    refuse_autocast("cpu", "autopar.plan was called")
    options = PlanOptions(
        loss_fn=loss_fn, mesh=mesh, constraints=constraints, num_microbatches=num_microbatches,
        num_stages=num_stages, schedule=schedule, cuts=cuts, recompute=recompute,
        reshard_after_forward=reshard_after_forward,
        reduce_every_microbatch=reduce_every_microbatch, offload=offload, batch_norm=batch_norm,
        precision=check_precision(precision), optimizer=optimizer, update=check_update(update),
        compute=compute, time_limit_s=time_limit_s,
    )  # fmt: skip
    if not isinstance(cluster, Cluster):
        raise InputError(
            f"cluster must be an autopar.Cluster, got {cluster!r}; write "
            "autopar.Cluster.preset('a100-80', nodes=1, devices_per_node=8) or Cluster.detect(2)"
        )
    space, begun_s = options.space(cluster.num_devices), time.process_time()
    with in_turn(), collector_paused(), show_progress(progress) as say:

        def planned(full_masks: Collection[str] | None) -> Plan:
            say("capture")
            captured = capture(
                model, example_inputs, loss_fn=loss_fn, precision=options.precision,
                full_masks=full_masks,
            )  # fmt: skip
            return make_planned(
                prepare(captured, batch_norm),
                cluster,
                space,
                constraints=constraints,
                compute=compute,
                optimizer=optimizer_spec(optimizer, cluster.device),
                update=options.update,
                time_limit_s=time_limit_s,
                begun_s=begun_s,
                progress=say,
            ).plan

        found = planned(None if options.takes_other_batches else ())
        return planned(()) if _lacks_masks(found) else found


@overload
def compile(
    model: nn.Module, devices: Devices, example_inputs: Any = None, **options: Any
) -> Compiled: ...


@overload
def compile(
    model: Sequence[nn.Module], devices: Devices, example_inputs: Any = None, **options: Any
) -> Array: ...


@refusing_unknown_keywords  # type: ignore[misc]
def compile(
    model: nn.Module | Sequence[nn.Module],
    devices: Devices,
    example_inputs: Any = None,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    plan: Plan | str | Path | None = None,
    mesh: MeshSizes | None = None,
    constraints: Sequence[Constraint] | Constraint = (),
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    schedule: str | Schedule | None = None,
    cuts: Sequence[str] | None = None,
    recompute: RecomputeOption | None = None,
    reshard_after_forward: bool | None = None,
    reduce_every_microbatch: bool | None = None,
    offload: bool | None = None,
    batch_norm: str = "global",
    precision: str | Precision | None = None,
    update: str | Update | None = None,
    max_grad_norm: Any = None,
    check_gradients: bool = True,
    nonfinite: str = "raise",
    kernels: str | None = None,
    cuda_graphs: bool = True,
    profile_limit_s: float = 60.0,
    time_limit_s: float | None = None,
    seed: Any = None,
    progress: bool = False,
    start_timeout_s: float = 120.0,
    call_timeout_s: float = 600.0,
) -> Any:
    """Compile ``model`` for ``devices``: plan it (or replay ``plan``), lower it and start it.

    Arguments in addition to those of `plan`:

    * ``devices``: a number of local devices, a device string, a list of devices, a `DeviceMesh`, or
      a `Cluster`. Under ``torchrun`` there is one process per device and all make the same call;
      otherwise one CPU is this process's own, and for other devices local worker processes are
      started. The model itself is not changed.
    * ``example_inputs``: if omitted, the first call compiles.
    * ``optimizer``: makes the optimizer from a list of parameters, such as
      ``functools.partial(torch.optim.AdamW, lr=3e-4)``; as in `plan`, also called once on a small
      parameter. ``lr_scheduler`` makes the learning-rate scheduler from the optimizer; it is
      stepped once per training step.
    * ``plan``: a plan or the path of its JSON, replayed without a search, with the ``batch_norm``
      and the ``precision`` that it was made with.
    * ``max_grad_norm``: clip the global 2-norm of all gradients, over all shards, to at most this
      before each update, as ``torch.nn.utils.clip_grad_norm_`` does on one device;
      ``compiled.grad_norm`` is the norm before clipping. Early updates: ``Update(clipping=...)``.
    * ``check_gradients``: run one step of the captured graph on one device, and compare loss,
      outputs, buffers and gradients with a step of a copy of the model in eager mode; see
      `autopar.frontend.checking.gradients`.
    * ``nonfinite``: what happens to a training step whose loss or gradients are not finite; all
      devices agree on it before any of them updates. With ``"raise"`` (the default, as training on
      NaN ruins a run, and the check costs one pass over the gradients) the step is rolled back:
      weights, optimizer state, buffers, random numbers and the scheduler are as before, a
      `NonFiniteError` names the block and the line that computed the first such value, and training
      can continue. With ``"skip"`` it is rolled back too, `Compiled.num_skipped_steps` counts it,
      and its loss is returned; the run is bitwise equal to one without that batch. With
      ``"ignore"`` it updates anyway, as eager PyTorch does. On GPUs the host waits for the
      agreement before it launches the updates, unless it is ``"ignore"``. Under an early update
      the devices agree on the loss before the backward pass, and a step whose loss is not finite is
      rolled back as above (in a pipeline it is not); a gradient that is not finite is found when
      weights have changed, which the NonFiniteError says, and ``"skip"`` is refused; with
      ``Update(clipping="second_pass")`` nothing has changed. See `autopar.runtime.step.agreement`.
    * ``kernels``: ``"eager"`` (the default) runs blocks op by op, ``"compiled"`` as Inductor makes
      them, ``"auto"`` each graph as is measured to be faster; see `autopar.lowering.regions`.
    * ``cuda_graphs``: record forward and backward of a step on one GPU, after two steps, as a CUDA
      graph, and replay it in each later step; `Compiled.report` says where that is not possible,
      and why (`autopar.runtime.step.graphs`). Gradients are then overwritten by the next step.
    * ``profile_limit_s``: time limit for measuring ops on this machine, each once (results are kept
      on disk), but for those that cannot change the plan; it begins anew if micro-batches are
      searched. Others, and all ops if it is 0, are priced by roofline. Collectives between the
      devices are measured too, which takes seconds.
    * ``seed``: the seed of dropout and all other random ops.

    A list of models is compiled into an `autopar.fusion.array.Array`, in which each trains as if it
    were alone: ``loss_fn``, ``optimizer``, ``lr_scheduler``, ``max_grad_norm`` and ``seed`` may
    then be lists with one for each, and ``example_inputs`` a list with a batch for each. With
    ``nonfinite="leave"`` a model whose loss or gradients are not finite leaves the array.

    Threads that compile or plan at the same time take turns; under ``torchrun`` all but one are
    refused.

    Raises the errors of `plan`, GradientError if the gradient check fails, DeviceError, PlanError,
    OptimizerError and WorkerError.
    """
    options = functools.partial(
        compile_options, mesh=mesh, constraints=constraints, num_stages=num_stages,
        num_microbatches=num_microbatches, schedule=schedule, cuts=cuts, recompute=recompute,
        time_limit_s=time_limit_s,
        reshard_after_forward=reshard_after_forward,
        reduce_every_microbatch=reduce_every_microbatch, offload=offload,
        batch_norm=batch_norm, precision=check_precision(precision), update=check_update(update),
        cuda_graphs=cuda_graphs, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s,
        kernels=kernels,
        plan=plan, check_gradients=check_gradients, profile_limit_s=profile_limit_s,
    )  # fmt: skip
    own = {
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "lr_scheduler": lr_scheduler,
        "max_grad_norm": max_grad_norm,
        "seed": seed,
    }
    if isinstance(model, list | tuple):
        if precision is not None:
            raise InputError(
                f"precision is {precision!r} for a list of models, which train in their own "
                "dtypes; leave precision= out, or compile the models one by one"
            )
        return _array(model, devices, example_inputs, own, nonfinite, options, progress=progress)
    check_model(model)
    assert isinstance(model, nn.Module)
    compiler = _Compiler(model, devices, options(nonfinite=nonfinite, **own), progress=progress)
    if example_inputs is not None:
        return compiler.compile(example_inputs)
    return Deferred(compiler.compile, training=model.training, has_optimizer=optimizer is not None)


def _array(
    models: Sequence[nn.Module],
    devices: Devices,
    example_inputs: Any,
    own: Mapping[str, Any],
    nonfinite: str,
    options: Callable[..., CompileOptions],
    *,
    progress: bool,
) -> Array:
    """Several models as one; each part of ``own`` is one for all, or a list with one for each."""
    check_array(models, example_inputs, options.keywords)  # type: ignore[attr-defined]
    members = members_of(models, **own)
    if nonfinite != LEAVE:
        check_nonfinite(nonfinite, LEAVE)

    def start(
        stacked: nn.Module, captured: Captured, inputs: Any, array: ArrayOptions, checks: bool
    ) -> Compiled:
        made = options(
            loss_fn=None, optimizer=array.models[0].optimizer, lr_scheduler=None,
            max_grad_norm=None, seed=None, array=array,
            nonfinite="skip" if nonfinite == LEAVE else nonfinite,
        )  # fmt: skip
        if not checks:
            made = replace(made, check_gradients=False)
        compiler = _Compiler(stacked, devices, made, progress=progress)
        return compiler.compile(inputs, captured)

    return Array(
        members, example_inputs, start, nonfinite_leaves=nonfinite == LEAVE,
        raises=nonfinite == "raise",
    )  # fmt: skip


_TWO_THREADS = (
    "autopar.compile was called while another thread of this process compiles or plans; under "
    "torchrun all ranks must compile in the same order: call it from one thread"
)


class _Compiler:
    """Makes a `Compiled` from example inputs: captures, plans or replays a plan, lowers, starts."""

    def __init__(
        self, model: nn.Module, devices: Devices, options: CompileOptions, *, progress: bool
    ) -> None:
        self.model = model
        self.cluster = devices if isinstance(devices, Cluster) else None
        self.devices, sizes = given_devices(devices)
        refuse_autocast(self.devices[0].type, "autopar.compile was called")
        self.options = options
        self.planning = options.planning.with_mesh(options.planning.mesh or sizes)
        self.space = self.planning.space(len(self.devices))
        if options.running.array is not None:
            self.space = replace(self.space, num_microbatches=1)  # an array has no others
        self.progress = progress
        self.traces = Traces()  # of the blocks, where this rank makes the plan

    @cpu_by_default()
    def compile(self, inputs: Any, captured: Captured | None = None) -> Compiled:
        """Compile for a batch; ``captured`` is given for an array, whose graph exists already."""
        limit_s = self.options.running.call_timeout_s
        with (
            in_turn(_TWO_THREADS if is_spmd() else None),
            watched_compile(self.devices[0].type, limit_s),
            collector_paused(),
            show_progress(self.progress) as say,
        ):
            if not (is_spmd() or is_own_process(self.devices)):
                fork_server.begin()  # it imports torch while this process plans
            replayed = self._replayed()
            precision = self._precision(replayed)
            if captured is None:
                masks = self._full_masks(inputs, replayed)
                captured = self._captured(inputs, precision, masks, say)
            self._check(captured, inputs, say)
            chosen = replayed or self._planned(captured, say)
            if replayed is None and _lacks_masks(chosen):
                captured = self._captured(inputs, precision, (), say)
                self._check(captured, inputs, say)
                chosen = self._planned(captured, say)
            release_cached()
            say("lower")
            return self._start(captured, chosen)

    def _full_masks(self, inputs: Any, replayed: Plan | None) -> Collection[str]:
        """The masks that the program leaves out: the plan's, or those that are full on rank 0."""
        if replayed is not None:
            return replayed.graph.full_masks
        if not self.planning.takes_other_batches:
            return ()
        return from_first_rank(lambda: full_masks_of(*split_inputs(inputs)), "the masks")

    def _captured(
        self, inputs: Any, precision: Precision | None, full_masks: Collection[str], say: Progress
    ) -> Captured:
        say("capture")
        return capture(
            self.model, inputs, loss_fn=self.planning.loss_fn, precision=precision,
            full_masks=full_masks,
        )  # fmt: skip

    def _check(self, captured: Captured, inputs: Any, say: Progress) -> None:
        if self.options.check_gradients:
            say("check gradients")
            self._check_gradients(captured, inputs)
        if self.options.running.optimizer is not None:
            check_trainable(captured.graph)

    def _planned(self, captured: Captured, say: Progress) -> Plan:
        prepared = prepare(captured, self.planning.batch_norm)
        communication = self._collectives(prepared, say)
        return _agreed(lambda: self._search(prepared, communication, say))

    def _replayed(self) -> Plan | None:
        given = self.options.plan
        if given is None:
            return None
        return _agreed(lambda: given if isinstance(given, Plan) else Plan.from_json(given))

    def _precision(self, replayed: Plan | None) -> Precision | None:
        """The precision asked for, or the plan's; raises InputError where options contradict it."""
        given, update = self.planning.precision, self.planning.update
        running = self.options.running
        if replayed is not None:
            given = agreed_precision(given, replayed.graph.precision)
            update = replayed.update.update
            check_offloaded(running, is_offloaded=replayed.offload is not None)
        check_scaled(given, running.nonfinite)
        check_early(update, running, given)
        return given

    def _check_gradients(self, captured: Captured, inputs: Any) -> None:
        """Compare with eager mode on the first rank; all raise GradientError on a mismatch."""

        def verdict() -> str:
            device = self.devices[0]
            device = rank_device(device.type) if is_spmd() else device
            try:
                compare_with_eager(
                    captured, self.model, inputs, loss_fn=self.planning.loss_fn, device=device
                )
            except GradientError as error:
                return str(error)
            return ""

        if failure := from_first_rank(verdict, "the gradient check"):
            raise GradientError(failure)

    def _collectives(self, prepared: Prepared, say: Progress) -> CommunicationModel | None:
        """Measured collectives between the given devices; None if none are to be measured."""
        options, limit_s = self.options, self.options.running.start_timeout_s
        if options.plan is not None or options.profile_limit_s <= 0 or self.cluster is not None:
            return None
        say("measure collectives")
        here = from_first_rank(lambda: Cluster.detect(len(self.devices)), "the cluster")
        grid = collectives_worth_measuring(prepared, here, self.space)
        return collective_times(here, self.devices, default_store_path(), grid, limit_s)

    def _search(
        self, prepared: Prepared, communication: CommunicationModel | None, say: Progress
    ) -> Plan:
        planning, running = self.planning, self.options.running
        if communication is None:
            cluster = self.cluster or Cluster.detect(len(self.devices))
        else:
            cluster = communication.cluster

        def measure(space: Space) -> ComputeModel:
            return op_times(
                calls_worth_measuring(prepared, cluster, space), cluster, default_store_path(),
                limit_s=self.options.profile_limit_s, start_timeout_s=running.start_timeout_s,
                progress=say,
            )  # fmt: skip

        spec = optimizer_spec(
            running.optimizer, cluster.device, is_clipped=self.options.clips_at_end
        )
        planned = make_planned(
            prepared, cluster, self.space, constraints=planning.constraints,
            measure=None if communication is None else measure,
            communication=communication, optimizer=spec, update=planning.update,
            may_update_early=may_be_early(running, planning.precision),
            may_move=running.array is None, device_type=self.devices[0].type,
            time_limit_s=planning.time_limit_s, progress=say,
        )  # fmt: skip
        self.traces = planned.traces
        found = with_kernels(
            planned.plan, planned.program, self.options.kernels, default_store_path(),
            limit_s=0.0 if communication is None else self.options.profile_limit_s,
            start_timeout_s=running.start_timeout_s, progress=say,
        )  # fmt: skip
        return found.with_trace(planned.plan.search_trace)

    def _start(self, captured: Captured, chosen: Plan) -> Compiled:
        num_devices = dist.get_world_size() if is_spmd() else len(self.devices)
        strategy = strategy_of(chosen, captured, num_devices)
        kind = self.devices[0].type
        program = lower_training(
            strategy, chosen.schedule.num_microbatches, pipeline=chosen.schedule.pipeline(),
            device_type=kind, update=chosen.update.update, tile_bytes=chosen.update.tile_bytes,
            in_steps=chosen.offload is None, recomputation=chosen.recomputed,
            traces=self.traces, compiled=chosen.compiled,
        )  # fmt: skip
        others = OtherCalls(chosen, strategy, program, from_first_rank)
        return Compiled(
            captured=captured,
            program=program,
            movement=self._movement(chosen, program),
            forward_program=others.lower_own_forward,
            lower_forward=others.lower_forward,
            lower_training=others.lower_training if others.trains else None,
            plan=chosen,
            devices=self.devices,
            model=self.model,
            options=self.options.running,
        )

    def _movement(self, chosen: Plan, program: RankProgram) -> tuple[Movement, ...]:
        """The movement of each pipeline rank; raises PlanError where the plan's is wrong."""
        running = self.options.running
        if chosen.offload is None or running.optimizer is None:
            return ()
        spec = optimizer_spec(
            running.optimizer, chosen.cluster.device, is_clipped=self.options.clips_at_end
        )
        return movement_of(chosen, program, spec)


def _lacks_masks(plan: Plan) -> bool:
    """Whether a plan leaves masks out, and its model can have no second program with them."""
    return plan.offload is not None and bool(plan.graph.full_masks)


def _agreed(make: Callable[[], Plan]) -> Plan:
    """The plan that all ranks use: rank 0 reads or makes it and broadcasts it.

    Rank 0 alone keeps the moments of its search.
    """
    made: list[Plan] = []

    def text() -> str:
        made.append(make())
        return made[0].to_json()

    found = Plan.from_json(from_first_rank(text, "the plan"))
    return found.with_trace(made[0].search_trace) if made else found
