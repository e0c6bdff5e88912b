"""The whole way on one page: capture, price, search, plan, lower, run.

``plan`` goes as far as the plan and needs no device; ``compile`` goes on to a running program.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.base.errors import InputError, OptimizerError, PlanError
from autopar.comm.groups import initialize
from autopar.cost_models import (
    Cluster,
    ComputeModel,
    default_store_path,
)
from autopar.cost_models.cluster import is_count
from autopar.frontend.capture import Arguments, Captured, capture, check_model
from autopar.frontend.targets import LossFn, check_loss_fn
from autopar.ir.placement import Placements
from autopar.lowering import RankProgram
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.stages import lower_staged_forward
from autopar.lowering.training import lower_training
from autopar.passes.batch_norm import check_batch_norm, with_batch_norm
from autopar.plan.document import Plan, strategy_of
from autopar.planning.constraints import Constraint
from autopar.planning.forward import plan_forward
from autopar.planning.joint import Fixed, fixed_parts, is_searched, plan_with, searched_calls
from autopar.planning.meshes import MeshSizes, check_mesh
from autopar.planning.pipelines import PipelineChoice, pipeline_choice
from autopar.report.progress import show_progress
from autopar.runtime.compiled import Compiled
from autopar.runtime.host.devices import resolve_devices
from autopar.runtime.measure.collective_times import collective_times
from autopar.runtime.measure.op_times import op_times
from autopar.runtime.runners.spmd import from_first_rank, is_spmd, rank_device
from autopar.runtime.state.optimizers import (
    MakeOptimizer,
    MakeScheduler,
    check_makes_optimizer,
    optimizer_spec,
)
from autopar.runtime.step.clipping import check_max_grad_norm
from autopar.schedules import Schedule
from autopar.sharding.strategy import Analysis, Strategy

Devices: TypeAlias = int | str | Sequence[str | torch.device] | DeviceMesh | Cluster


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
    recompute: bool | None = None,
    batch_norm: str = "global",
    optimizer: MakeOptimizer | None = None,
    compute: ComputeModel | None = None,
    progress: bool = False,
) -> Plan:
    """Search the best strategy for training ``model`` on ``cluster``, offline.

    Arguments:

    * ``model``: any ``nn.Module``; its parameters may live on the meta device.
    * ``cluster``: the devices and links to plan for; nothing of it needs to be there.
    * ``example_inputs``: a tuple (positional), a mapping (keyword) or one tensor: a *global* batch.
    * ``loss_fn``: ``loss_fn(output, *targets)`` for a model that returns no loss itself; the
      targets are the last positional inputs, or the keyword inputs that bear its names.
    * ``mesh``: axis names and sizes, outermost first; by default every factorisation is tried, as
      it is of sizes that are None: ``{"dp": None, "tp": 2}``. In a pipeline it is the mesh of each
      of its devices.
    * ``constraints``: what to force, forbid, pin or keep within; see
      `autopar.planning.constraints`.
    * ``num_microbatches``: cut the batch into so many parts that are computed one after the other,
      with one update at the end; rows of the batch by it is their size. The result is that of the
      whole batch; the memory for activations is that of one part. By default 1, or searched where
      a pipeline is.
    * ``num_stages``, ``schedule``: train as a pipeline of so many stages of contiguous blocks, in
      the order of a schedule: a name that `autopar.schedules.generators.build` knows (by default
      ``"1f1b"``), or what it makes. The schedule says how many pipeline devices there are, which
      share the cluster's devices evenly. Beside a pipeline's name, whatever of stages,
      micro-batches and mesh is not given is searched together with the sharding; with ``"auto"``
      the schedule is searched too, or none chosen; see `autopar.planning.joint`. ``"conventional"``
      and ``"reverse_first_k"`` (whose k is chosen by prices) are no pipelines: all devices have all
      stages, and reduce each stage's gradients into the next step.
    * ``cuts``: the blocks or modules that the second and later stages begin with; by default the
      slowest stage is made as fast as it can be.
    * ``recompute``: keep no activations of a pipeline's stages but their inputs, and make them
      again in front of the backward pass. By default a searched pipeline does so where the memory
      does not suffice otherwise, and one whose parts are all given never.
    * ``batch_norm``: ``"global"`` trains with the statistics of the whole batch, as one device
      does; ``"local"`` with those of each device's shard, as unsynchronised
      ``DistributedDataParallel`` does, with nothing to communicate; see
      `autopar.passes.batch_norm`.
    * ``optimizer``: makes the optimizer from a list of parameters, such as
      ``functools.partial(torch.optim.SGD, lr=0.1)``: called once, over a small parameter, to learn
      how much state it keeps. By default AdamW's is planned for.
    * ``compute``: prices ops; by default an analytical roofline of ``cluster.device``.

    Raises CaptureError, InputError, OptimizerError, ConstraintError, or PlanError where the batch
    cannot be cut into so many micro-batches.
    """
    statistics = check_batch_norm(batch_norm)
    check_makes_optimizer(optimizer)
    if not isinstance(cluster, Cluster):
        raise InputError(
            f"cluster must be an autopar.Cluster, got {cluster!r}; write "
            "autopar.Cluster.preset('a100-80', nodes=1, devices_per_node=8) or Cluster.detect(2)"
        )
    pipeline = _pipeline(
        num_stages, schedule, num_microbatches, cuts, cluster.num_devices, mesh, recompute
    )
    with show_progress(progress) as say:
        say("capture")
        captured = capture(model, example_inputs, loss_fn=loss_fn)
        captured = with_batch_norm(captured, statistics)
        return plan_with(
            captured,
            cluster,
            pipeline,
            mesh=mesh,
            constraints=constraints,
            compute=compute,
            num_microbatches=num_microbatches,
            optimizer=optimizer_spec(optimizer, cluster.device),
            progress=say,
        ).plan


def compile(
    model: nn.Module,
    devices: Devices,
    *,
    example_inputs: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: MakeOptimizer | None = None,
    lr_scheduler: MakeScheduler | None = None,
    plan: Plan | str | Path | None = None,
    mesh: MeshSizes | None = None,
    constraints: Sequence[Constraint] | Constraint = (),
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    schedule: str | Schedule | None = None,
    cuts: Sequence[str] | None = None,
    recompute: bool | None = None,
    batch_norm: str = "global",
    max_grad_norm: float | None = None,
    profile_limit_s: float = 60.0,
    seed: int | None = None,
    progress: bool = False,
    start_timeout_s: float = 120.0,
    call_timeout_s: float = 600.0,
) -> Compiled:
    """Compile ``model`` for ``devices``: plan it (or replay ``plan``), lower it, and start it.

    Arguments beside those of `plan`:

    * ``devices``: how many local devices, a device string, a list of devices, a `DeviceMesh`, or
      a `Cluster`. Under ``torchrun`` there is one process a device and each calls this alike;
      otherwise local worker processes are started. The model itself stays as it is.
    * ``example_inputs``: left out, the first call compiles.
    * ``optimizer``: makes the optimizer from a list of parameters, such as
      ``functools.partial(torch.optim.AdamW, lr=3e-4)``: also once for the plan, over a small
      parameter; ``lr_scheduler`` makes the learning-rate scheduler from the optimizer, and is
      stepped once a training step.
    * ``plan``: a plan or the path of its JSON: replayed without any search, with the
      ``batch_norm`` that it was made with.
    * ``max_grad_norm``: before each update gradients are scaled down to at most this 2-norm of all
      of them, whatever parts they lie in, as ``torch.nn.utils.clip_grad_norm_`` does on one
      device; ``compiled.grad_norm`` is the norm before.
    * ``profile_limit_s``: ops are priced by measuring them on this machine, each once (kept on
      disk), for at most this long; what is left, and everything with 0, is priced by roofline.
      Collectives between the devices are measured once too, in some seconds.
    * ``seed``: of dropout and every other random op.

    Raises what `plan` raises, and DeviceError, PlanError, OptimizerError or WorkerError.
    """
    check_model(model)
    check_loss_fn(loss_fn)
    check_max_grad_norm(max_grad_norm)
    statistics = check_batch_norm(batch_norm)
    check_makes_optimizer(optimizer)
    if lr_scheduler is not None and (optimizer is None or not callable(lr_scheduler)):
        raise OptimizerError(
            f"lr_scheduler is {lr_scheduler!r}, with optimizer={optimizer!r}; pass a callable that "
            "makes a scheduler from the optimizer, and the optimizer: lr_scheduler="
            "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InputError(f"seed is {seed!r}; it must be an int, such as seed=0, or None")
    if not isinstance(plan, Plan | str | Path | None):
        raise PlanError(
            f"plan is {plan!r}; pass what autopar.plan(...) returned, or the path of its JSON"
        )
    if plan is not None:
        _check_replay(
            mesh=mesh or None, constraints=constraints or None, num_stages=num_stages,
            num_microbatches=num_microbatches, schedule=schedule, cuts=cuts, recompute=recompute,
        )  # fmt: skip
    found, mesh = _resolve(devices, mesh)
    pipeline = _pipeline(num_stages, schedule, num_microbatches, cuts, len(found), mesh, recompute)
    options: dict[str, Any] = {
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "lr_scheduler": lr_scheduler,
        "max_grad_norm": max_grad_norm,
        "seed": seed,
        "start_timeout_s": start_timeout_s,
        "call_timeout_s": call_timeout_s,
    }

    def build(inputs: Any) -> Compiled:
        with show_progress(progress) as say:
            say("capture")
            captured = capture(model, inputs, loss_fn=loss_fn)
            captured = with_batch_norm(captured, statistics)
            kind = found[0].type
            if is_spmd():
                initialize(rank_device(kind), datetime.timedelta(seconds=call_timeout_s))

            is_measured = plan is None and profile_limit_s > 0 and not isinstance(devices, Cluster)
            communication, path = None, default_store_path()
            if is_measured:
                say("measure collectives")
                here = from_first_rank(lambda: Cluster.detect(len(found)), "the cluster")
                communication = collective_times(here, found, path, start_timeout_s)

            def search() -> Plan:
                compute = None
                if isinstance(devices, Cluster):
                    cluster = devices
                elif communication is None:
                    cluster = Cluster.detect(len(found))
                else:
                    cluster = communication.cluster
                    calls = searched_calls(captured, cluster, mesh, num_microbatches, pipeline)
                    compute = op_times(
                        calls, cluster, path, limit_s=profile_limit_s,
                        start_timeout_s=start_timeout_s, progress=say,
                    )  # fmt: skip
                return plan_with(
                    captured,
                    cluster,
                    pipeline,
                    mesh=mesh,
                    constraints=constraints,
                    compute=compute,
                    communication=communication,
                    num_microbatches=num_microbatches,
                    optimizer=optimizer_spec(
                        optimizer, cluster.device, is_clipped=max_grad_norm is not None
                    ),
                    device_type=kind,
                    progress=say,
                ).plan

            chosen = _agreed(plan, search)
            say("lower")
            return _start(model, captured, chosen, found, options)

    if example_inputs is not None:
        return build(example_inputs)
    return _Deferred(build, model.training)  # type: ignore[return-value]


def _check_replay(**fixed: Any) -> None:
    """A plan has all of these; one that is given beside it would be ignored."""
    given = [f"{name}={value!r}" for name, value in fixed.items() if value is not None]
    if given:
        raise InputError(
            f"{', '.join(given)} beside plan=...: a plan is replayed as it is; leave that out, or "
            "leave out plan= for a new search"
        )


def _pipeline(
    num_stages: int | None,
    schedule: str | Schedule | None,
    num_microbatches: int | None,
    cuts: Sequence[str] | None,
    num_devices: int,
    mesh: MeshSizes | None,
    recompute: bool | None,
) -> PipelineChoice | Fixed | None:
    """What the user fixed of a pipeline, checked."""
    check_mesh(mesh)
    if recompute is not None and not isinstance(recompute, bool):
        raise InputError(f"recompute is {recompute!r}; it is True, False or None")
    if num_microbatches is not None and not is_count(num_microbatches):
        raise InputError(
            f"num_microbatches is {num_microbatches!r}; it must be a whole number, at least 1, or "
            "None"
        )
    if is_searched(num_stages, schedule, num_microbatches, cuts, mesh):
        name = str(schedule)
        return fixed_parts(num_stages, name, num_microbatches, cuts, mesh, recompute)
    return pipeline_choice(
        num_stages=num_stages,
        schedule=schedule,
        num_microbatches=num_microbatches,
        cuts=cuts,
        num_devices=num_devices,
        mesh=mesh,
        recompute=recompute,
    )


def _start(
    model: nn.Module,
    captured: Captured,
    chosen: Plan,
    devices: Sequence[torch.device],
    options: dict[str, Any],
) -> Compiled:
    num_devices = dist.get_world_size() if is_spmd() else len(devices)
    strategy: Strategy = strategy_of(chosen, captured, num_devices)
    kind = devices[0].type
    program = lower_training(strategy, chosen.schedule.num_microbatches, device_type=kind)
    pipeline = chosen.schedule.pipeline()
    if pipeline is not None:
        stages, schedule = pipeline
        program = with_pipeline(program, stages.of(strategy.graph), schedule)

    def lower_forward(forward: Captured, held: Mapping[int, Placements]) -> RankProgram:
        graph = with_batch_norm(forward, chosen.graph.batch_norm).graph
        assignment = from_first_rank(
            lambda: plan_forward(graph, strategy.mesh, chosen.cluster, held), "the forward plan"
        )
        return lower_staged_forward(Strategy(Analysis(graph), assignment), program)

    return Compiled(
        captured=captured,
        program=program,
        forward_program=lambda: lower_staged_forward(strategy, program),
        lower_forward=lower_forward,
        plan=chosen,
        devices=devices,
        model=model,
        **options,
    )


def _resolve(
    devices: Devices, mesh: MeshSizes | None
) -> tuple[list[torch.device], MeshSizes | None]:
    """The devices one by one, and the mesh that they themselves prescribe, if they do."""
    if isinstance(devices, DeviceMesh):
        names = devices.mesh_dim_names or tuple(f"axis{i}" for i in range(devices.ndim))
        sizes: MeshSizes = {name: devices.size(i) for i, name in enumerate(names)}
        return _repeated(devices.device_type, devices.size()), mesh or sizes
    if isinstance(devices, Cluster):
        return _repeated(devices.device.kind, devices.num_devices), mesh
    if is_spmd() and isinstance(devices, str):
        return _repeated(torch.device(devices).type, _world_size()), mesh
    if is_spmd() and isinstance(devices, int):
        if devices != _world_size():
            raise InputError(
                f"devices={devices}, but torchrun started {_world_size()} processes; "
                f"pass devices={_world_size()}"
            )
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return _repeated(kind, devices), mesh
    return resolve_devices(devices), mesh


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def _repeated(kind: str, count: int) -> list[torch.device]:
    if kind == "cpu" or is_spmd():
        return [torch.device(kind)] * count
    return resolve_devices([f"{kind}:{i}" for i in range(count)])


def _agreed(given: Plan | str | Path | None, make: Callable[[], Plan]) -> Plan:
    """The plan all ranks use: rank 0 reads or makes it, the others take it over."""

    def text() -> str:
        return (_loaded(given) if given is not None else make()).to_json()

    return Plan.from_json(from_first_rank(text, "the plan"))


def _loaded(given: Plan | str | Path) -> Plan:
    return given if isinstance(given, Plan) else Plan.from_json(given)


class _Deferred:
    """A `Compiled` that is made by its first call, as ``torch.compile`` does."""

    def __init__(self, build: Callable[[Any], Compiled], training: bool) -> None:
        self._build = build
        self._compiled: Compiled | None = None
        self._training = training

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        if self._compiled is None:
            self._compiled = self._build(Arguments(args, kwargs)).train(self._training)
        return self._compiled

    @property
    def training(self) -> bool:
        return self._training if self._compiled is None else self._compiled.training

    def train(self, mode: bool = True) -> _Deferred:
        self._training = bool(mode)
        if self._compiled is not None:
            self._compiled.train(mode)
        return self

    def eval(self) -> _Deferred:
        return self.train(False)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._made(args, kwargs).train_step(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._made(args, kwargs)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if self._compiled is None:
            raise InputError(
                f"nothing is compiled yet, so there is no {name!r}: pass example_inputs=... to "
                "autopar.compile, or call train_step(...) first"
            )
        return getattr(self._compiled, name)

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.close()

    def __enter__(self) -> _Deferred:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
