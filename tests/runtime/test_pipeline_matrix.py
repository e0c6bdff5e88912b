"""Every model under every schedule that fits, on 2, 4 and 8 processes, equals eager PyTorch.

Three steps each: losses, gradients, weights and buffers. ``AUTOPAR_TEST_ASSIGNMENTS=20``
(``make exhaustive``) runs the whole table of `tests.runtime.pipeline_matrix`; otherwise what no
other test has.
"""

from __future__ import annotations

import functools

import pytest

from autopar.cost_models import Cluster
from autopar.lowering import RankProgram
from autopar.lowering.pipeline import with_pipeline
from autopar.passes.batch_norm import with_batch_norm
from autopar.planning.planner import make_planned
from tests.runtime.conftest import Groups
from tests.runtime.pipeline_matrix import INSIDE, MODELS, NUM_ROWS, Combination, combinations
from tests.runtime.test_pipelines import ALONE, EXHAUSTIVE, Case

USUAL = [
    Combination(model="bert", num_processes=4, inside="data 2 x tensor 2", row="reverse_first_k"),
    Combination(model="llama", num_processes=4, inside="tensor 2", row="zb_h1"),
    Combination(model="t5", num_processes=4, inside="data 2", row="1f1b, recomputed"),
]
TABLE = [c for c in combinations() if c.misfit() is None] if EXHAUSTIVE else USUAL


@functools.cache
def case_of(model: str, is_large: bool) -> Case:
    return Case(model, MODELS[model][is_large], num_joined=NUM_ROWS // 4)


@functools.cache
def program_of(model: str, is_large: bool, inside: str, num: int) -> RankProgram:
    case, mesh = case_of(model, is_large), INSIDE[inside]
    if not mesh.sizes:
        return case.lowered(num, ALONE, 0)
    captured = with_batch_norm(case.captured, "local" if num > 1 else "global")
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=mesh.num_devices)
    return make_planned(
        captured, cluster, mesh=dict(zip(("x", "y"), mesh.sizes)), constraints=mesh.constraints,
        num_microbatches=num,
    ).program  # fmt: skip


@pytest.mark.parametrize("entry", TABLE, ids=str)
def test_equals_eager(entry: Combination, groups: Groups) -> None:
    assert entry.misfit() is None
    made = entry.schedule
    case = case_of(entry.model, entry.is_large)
    program = program_of(entry.model, entry.is_large, entry.inside, made.shape.num_microbatches)
    stages = case.stages(made.shape.num_stages).of(case.captured.graph)
    piped = with_pipeline(program, stages, made)
    assert piped.num_ranks == entry.num_processes
    case.check(groups, piped)


def test_what_does_not_fit() -> None:
    """No more than what is known not to, each for one of the known reasons."""
    reasons = {str(c): c.misfit() for c in combinations()}
    known = ("num_pipelines = 2f", "the whole batch for batch norm")
    for name, reason in reasons.items():
        assert reason is None or any(text in reason for text in known), (name, reason)
