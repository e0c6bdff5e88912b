"""Real processes for the runtime's tests: what their workers serve, and how a test trains on them.

Two groups of workers, of 2 and of 4 processes with one thread each, live as long as the test
session (see conftest.py); each test gives them its own program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.comm.groups import Communicator
from autopar.frontend.capture import Captured
from autopar.ir.choice import Choice
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R
from autopar.lowering.program import lower
from autopar.lowering.types import RankProgram
from autopar.movement.execution import Movement
from autopar.runtime.machine.process import ProcessMachine
from autopar.runtime.machine.randomness import Seeds
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.runners.rank_service import RankService
from autopar.runtime.state import background, checkpoint_writer
from autopar.runtime.state.checkpoint_writer import Layout
from autopar.runtime.state.initial import initial_state, state_keys
from autopar.runtime.step.forward_programs import LowerForward
from autopar.runtime.step.rank_options import RankOptions
from autopar.runtime.workers.group import WorkerGroup
from autopar.sharding.strategy import Analysis, Assignment, Strategy
from autopar.testing.capped_memory import CappedMemory
from tests.oracles import Trained, random_assignment


def single_op(mesh: Mesh, op: str, label: str, static: Sequence[int]) -> torch.fx.GraphModule:
    """The graph of one raw op of ``autopar.comm.ops``."""
    from autopar.comm import ops as collectives

    graph = torch.fx.Graph()
    operand, num = graph.placeholder("x"), mesh.size(mesh.axes_of(label))
    call = graph.call_function(getattr(collectives, op), (operand, label, num, *static))
    graph.output((call,))
    return torch.fx.GraphModule({}, graph)


class ProbedService(RankService):
    """A rank service that also shows tests what a rank sees."""

    def collective(
        self, mesh: Mesh, op: str, label: str, static: Sequence[int], operand: Tensor
    ) -> tuple[Tensor, bool]:
        """One raw op on this rank's operand: the result, and whether the operand is as it was."""
        from autopar.comm import ops as collectives

        communicator = Communicator(mesh, torch.device("cpu"), [label])
        before = operand.clone()
        result = communicator.bind(getattr(collectives, op), label, *static)(operand)
        same = torch.equal(before, operand)
        return result.contiguous(), same

    def moves(
        self, mesh: Mesh, wanted: Sequence[tuple[str, str, Sequence[int]]], operands: list[Tensor]
    ) -> list[Tensor]:
        """Several raw ops, begun together: op, label and static arguments of each."""
        labels = {label for _, label, _ in wanted}
        communicator = Communicator(mesh, torch.device("cpu"), labels)
        machine = ProcessMachine(communicator, Seeds(mesh, 0))
        graphs = [single_op(mesh, *each) for each in wanted]
        with torch.no_grad():
            wait = machine.start_moves(list(zip(graphs, operands)))
            return [result.contiguous() for result in wait()]

    def full_tensors(self, what: str) -> dict[str, Tensor]:
        """The DTensors that leave the runtime, made whole by torch's own ``full_tensor()``."""
        runtime = self.running
        if what == "optimizer":
            entries = runtime.optimizer_state_dict()["state"]
            found = {f"{n}.{k}": v for n, e in entries.items() for k, v in e.items()}
        else:
            found = getattr(runtime, what)()
        return {n: t.full_tensor() for n, t in found.items() if hasattr(t, "full_tensor")}

    def described(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Placements and mesh axes of each parameter's DTensor."""
        return {
            name: (str(tuple(t.placements)), t.device_mesh.mesh_dim_names)  # type: ignore[attr-defined]
            for name, t in self.running.parameters().items()
        }

    def all_parts(self) -> dict[str, Tensor]:
        """This rank's parts of the parameters, and buffers."""
        return self.running.held_parts()

    memory: CappedMemory | None = None

    left_bytes = 0
    """What earlier tests' programs left in this process, such as constants of compiled code."""

    def prepare(self, program: bytes) -> None:
        self.memory = self.runtime = None
        self._state, self.program = {}, None  # type: ignore[assignment]
        self.left_bytes = self._tensor_bytes()
        super().prepare(program)

    def counted_tensor_bytes(self) -> int:
        return super().counted_tensor_bytes() - self.left_bytes

    def cap_memory(self, cap_bytes: int | None) -> None:
        """From now on training steps run in a memory with a cap."""
        self.memory = CappedMemory(cap_bytes, self.running.tensors())

    def capped_peak_bytes(self) -> int:
        assert self.memory is not None
        return self.memory.peak_bytes

    def state_bytes(self) -> int:
        """Bytes of memory that the tensors of the running program take between steps."""
        return CappedMemory(None, self.running.tensors()).held_bytes

    def copied_bytes(self) -> int:
        """Bytes copied to the host and back since training began."""
        mover = self.running.mover
        return 0 if mover is None else mover.num_copied_bytes

    def train_step(self, tensors: Sequence[Tensor], slot: int) -> Any:
        with self.memory or contextlib.nullcontext():
            return super().train_step(tensors, slot)

    def mapped_bytes(self) -> int:
        """Bytes of this process in memory that it shares with others: that of transports."""
        gc.collect()
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(m.size for m in maps if "memfd:autopar" in m.path)

    def _tensor_bytes(self) -> int:
        """Bytes of memory that torch allocated for this process's tensors."""
        gc.collect()
        plain = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
        on_cpu = [t for t in plain if t.layout is torch.strided and t.device.type == "cpu"]
        storages = [t.untyped_storage() for t in on_cpu]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.resizable()}.values())

    def local_step(self, parts: Sequence[Tensor]) -> Tensor:
        return self.running.train_step(parts, local=True)

    def local_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.running.forward(0, tensors)

    def drawn(self) -> tuple[Tensor, Tensor]:
        """Two numbers of the user's own generator, the first after seeding it."""
        return torch.rand(1), torch.rand(1)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def progress(self) -> tuple[int, int, Any]:
        """Steps done, the seed of random operators, and the state of the schedule."""
        runtime = self.running
        schedule = runtime.lr_scheduler
        return runtime.num_steps, runtime.seed, schedule and schedule.state_dict()

    def limit_file_size(self, size_bytes: int) -> None:
        """Limit the files that this process writes, as a full disk would; -1 lifts the limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, -1))

    def hold_writes(self, until: str | None) -> None:
        """From now on background saves wait in the middle of a file until a path exists."""
        write = checkpoint_writer.write_file

        def held(folder: str, layout: Layout, tensors: Iterable[Tensor]) -> str:
            def some_then_all() -> Iterator[Tensor]:
                for number, tensor in enumerate(tensors):
                    deadline_s = time.monotonic() + 300
                    while number == 2 and until is not None and not Path(until).exists():
                        assert time.monotonic() < deadline_s
                        time.sleep(0.01)
                    yield tensor

            return write(folder, layout, some_then_all())

        background.write_file = write if until is None else held

    def fsdp_steps(self, batches: list[tuple[Tensor, Tensor]]) -> Any:
        """Training under ``fully_shard`` on this rank."""
        from tests.runtime.test_precision import fsdp_steps

        return fsdp_steps(self.rank, batches)

    def resharded_fsdp_steps(self, batches: list[tuple[Tensor, Tensor]], released: bool) -> Any:
        """Training under ``fully_shard`` on this rank, with or without a release after forward."""
        from tests.runtime.test_reshard import resharded_fsdp_steps

        return resharded_fsdp_steps(self.rank, batches, released)

    def reload_as_dtensors(self) -> bool:
        """Whether loading its own DTensors leaves every number as it was."""
        runtime = self.running
        before = {n: p.clone() for n, p in runtime.held_parts().items()}
        state = {n: t.clone() for n, t in runtime.state_dict().items()}
        with torch.no_grad():
            for part in runtime.held_parts().values():
                part.zero_()
        runtime.load_state_dict(state)
        after = runtime.held_parts()
        return all(torch.equal(after[n], before[n]) for n in before)


def counted_bytes(compiled: Any) -> int:
    """The predicted bytes of a device's tensors, but for the batch, which workers read from the
    caller's memory."""
    counted: dict[str, int] = compiled.plan.prediction.memory_bytes
    return sum(counted.values()) - counted["inputs"]


def runner_of(
    group: WorkerGroup,
    captured: Captured,
    program: RankProgram,
    model: nn.Module,
    *,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    movement: tuple[Movement, ...] = (),
) -> LocalRunner:
    options = RankOptions(
        keys=state_keys(model, captured, program),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        seed=seed,
        max_grad_norm=max_grad_norm,
        movement=movement,
    )
    return LocalRunner(program, initial_state(model), options, lambda: group, owns_group=False)


def process_steps(
    runner: LocalRunner, captured: Captured, batches: Sequence[Mapping[str, Tensor]]
) -> Trained:
    """As `tests.oracles.lockstep_steps`, on real processes."""
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        losses.append(runner.train_step(captured.signature.flatten((), batch)).item())
        gradients = gradients or runner.gradients()
    names = {p.name for p in runner.program.parameters}
    state = runner.full_state_dict()
    return Trained(
        losses=losses,
        gradients=gradients,
        weights={n: t for n, t in state.items() if n in names},
        buffers={n: t for n, t in state.items() if n not in names},
    )


def steps_on_shards(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    batches: Sequence[tuple[Tensor, Tensor]],
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and whole weights of a model under ``fully_shard``, on one of two ranks."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.chunk(2)[rank]), y.chunk(2)[rank])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    return losses, {name: x.full_tensor() for name, x in model.state_dict().items()}


def lower_forward(mesh: Mesh, seed: int = 0, *, device_type: str = "cpu") -> LowerForward:
    """Forward programs under drawn assignments, but for the values that are held."""

    def lowered(captured: Captured, held: Mapping[int, Placements]) -> RankProgram:
        analysis = Analysis(captured.graph)
        drawn = random_assignment(analysis, mesh, seed)
        assignment = dataclasses.replace(drawn, stored={**drawn.stored, **held})
        strategy = Strategy(analysis, assignment)
        return lower(strategy, device_type=device_type, training=False)

    return lowered


def stored_assignment(
    analysis: Analysis, mesh: Mesh, stored: Mapping[str, Placements]
) -> Assignment:
    """Every op computed redundantly, parameters and inputs stored as given by name."""
    graph = analysis.graph
    whole = (R,) * mesh.num_axes
    names = {(v.target or v.name): v.index for v in graph.values}
    return Assignment(
        mesh=mesh,
        choices=tuple(Choice((None,) * mesh.num_axes) for _ in graph.ops),
        stored={names[name]: placements for name, placements in stored.items()},
        relays=dict.fromkeys(analysis.relayed, whole),
    )
