"""A model with its batches, the results of eager PyTorch on them, and its lowered programs.

The same case is trained in lockstep (`Case.check`), all ranks of mesh and pipeline in one process,
and on real processes (`tests.runtime`).
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.recomputation import BlockRecomputation, Recomputation
from autopar.ir.stages import Stages
from autopar.lowering.joint import Joint
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.program import Traces
from autopar.lowering.stages import stage_of_blocks, staged_blocks
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.passes.batch_norm import with_batch_norm
from autopar.passes.prepare import prepare
from autopar.schedules import Schedule
from autopar.sharding.strategy import Analysis, Strategy, unsplit
from tests.models.zoo import build, optimizer_of
from tests.oracles import (
    NUM_STEPS,
    Trained,
    assert_same,
    random_assignment,
    reference_steps,
    state_of,
    to_double,
    train_program,
)

# transformers computes some losses and norms in float32 whatever the model's dtype.
TOLERANCE = {
    "gpt2": 2e-6, "resnet": 1e-8, "llama": 5e-6, "t5": 5e-6, "mixtral": 1e-4, "vit": 1e-7,
    "odd_gpt2": 2e-6, "odd_llama": 5e-6, "odd_vit": 1e-7, "inception_v3": 1e-7, "densenet": 1e-7,
    "mobilenet_v2": 1e-7, "pointnet": 1e-8,
}  # fmt: skip
# PyTorch's product of rows grouped by expert, which eager Mixtral uses, has no double precision.
SINGLE_PRECISION = {"mixtral"}
ALONE = Mesh(("x",), (1,))


def joined_batch(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of more rows, some without any label, so that micro-batches fill unevenly."""
    joined = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
    if len(parts) > 1 and "labels" in joined and joined["labels"].dim() == 2:
        joined["labels"][1, 2:] = -100
        joined["labels"][2:4] = -100
    return joined


class Case:
    """A model of the zoo, or ``make_model``'s, on the zoo's batches, ``num_joined`` at once.

    A case that ``is_divided`` has its blocks divided, so that stages can begin inside layers.
    """

    def __init__(
        self,
        kind: str,
        make_model: Callable[[], nn.Module] | None = None,
        *,
        num_joined: int = 1,
        num_steps: int = NUM_STEPS,
        is_divided: bool = False,
    ) -> None:
        self.kind = kind
        model, make_batch = build(kind)
        if make_model is not None:
            torch.manual_seed(0)
            model = make_model().train()
        self.model = model
        self.optimizer = optimizer_of(kind)
        self.batches = [
            joined_batch([make_batch(step + 9 * part) for part in range(num_joined)])
            for step in range(num_steps)
        ]
        if kind not in SINGLE_PRECISION:
            self.model = model.double()
            self.batches = [to_double(batch) for batch in self.batches]
        prepared = prepare(capture(self.model, self.batches[0]))
        self.captured = prepared.captured
        self.block_cuts = prepared.narrow_cuts if is_divided else ()
        self.staged_graph = prepared.cut(1, self.block_cuts).captured.graph
        self.tolerance = TOLERANCE.get(kind, 1e-9)

    @functools.cached_property
    def analysis(self) -> Analysis:
        return Analysis(self.captured.graph)

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.batches[0].values())))

    @property
    def has_batch_norm(self) -> bool:
        return any("batch_norm" in op.target_name for op in self.captured.graph.ops)

    @functools.cache  # noqa: B019  a case lives as long as the tests
    def expected(self, num_microbatches: int = 1) -> Trained:
        """Results of eager training; with batch norm, of each micro-batch separately."""
        if not self.has_batch_norm or num_microbatches == 1:
            return reference_steps(self.model, self.batches, self.optimizer)
        return accumulated_steps(self.model, self.batches, self.optimizer, num_microbatches)

    def strategy(self, num_microbatches: int, mesh: Mesh, seed: int) -> Strategy:
        """Drawn; batch norm has the statistics of each micro-batch."""
        analysis = self._cut(num_microbatches)
        return Strategy(analysis, random_assignment(analysis, mesh, seed))

    def unsplit(self, num_microbatches: int) -> Strategy:
        """As `strategy`, of a single device, on which nothing is split."""
        return unsplit(self._cut(num_microbatches))

    def _cut(self, num_microbatches: int) -> Analysis:
        captured = self.captured
        if num_microbatches > 1:
            captured = with_batch_norm(captured, "local")
        return prepare(captured).cut(num_microbatches, self.block_cuts)[1]

    @functools.cache  # noqa: B019
    def lowered(
        self, num_microbatches: int, mesh: Mesh, seed: int, kept_share: float | None = None
    ) -> RankProgram:
        """Raises PlanError where the drawn parts cannot be cut into micro-batches.

        With a ``kept_share`` every block keeps about that part of the values that it can, drawn,
        and recomputes the others that it needs.
        """
        strategy, traces = self.strategy(num_microbatches, mesh, seed), Traces()
        program = lower_training(strategy, num_microbatches, traces=traces)
        if kept_share is None:
            return program
        recomputation = Recomputation(
            blocks={
                block.name: drawn_block(traces.of_block[block.name], kept_share, seed)
                for block in program.blocks
                if block.role.has_stage
            }
        )
        return lower_training(
            strategy, num_microbatches, recomputation=recomputation, traces=traces
        )

    @functools.cached_property
    def stage_starts(self) -> tuple[str, ...]:
        """The blocks that a stage can begin with."""
        return tuple(block.name for block in staged_blocks(self.staged_graph))

    def stages(self, num_stages: int) -> Stages:
        names = self.stage_starts
        firsts = [names[len(names) * i // num_stages] for i in range(num_stages)]
        return Stages(first_blocks=tuple(firsts))

    def piped(
        self, program: RankProgram, schedule: Schedule, stages: Stages | None = None
    ) -> RankProgram:
        stages = stages or self.stages(schedule.shape.num_stages)
        return with_pipeline(program, stage_of_blocks(stages, self.staged_graph), schedule)

    def check(self, program: RankProgram) -> None:
        """Train it in lockstep."""
        got = train_program(
            program, self.captured, state_of(self.model), self.batches, self.optimizer
        )
        self.compare(got, program.num_microbatches)

    def compare(self, got: Trained, num_microbatches: int = 1) -> None:
        assert_same(got, self.expected(num_microbatches), tolerance=self.tolerance)


def drawn_block(joint: Joint, kept_share: float, seed: int) -> BlockRecomputation:
    generator = random.Random(seed)
    names = [v.name for v in joint.values if v.can_keep and v.operand is None]
    kept = tuple(name for name in names if generator.random() < kept_share)
    return BlockRecomputation(kept=kept, kept_bytes=0, default_bytes=0, time_s=0.0)


def accumulated_steps(
    model: nn.Module, batches: list[dict[str, Tensor]], make_optimizer: Any, num: int
) -> Trained:
    """Eager training with gradients accumulated over micro-batches, each normalised by itself."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(list(model.parameters()))
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(value.chunk(num) for value in batch.values())):
            output = model(**dict(zip(batch, part)))
            loss = (output if isinstance(output, Tensor) else output.loss) / num
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return Trained(
        losses=losses,
        gradients=gradients,
        weights={n: p.detach() for n, p in model.named_parameters()},
        buffers=dict(model.named_buffers()),
    )
