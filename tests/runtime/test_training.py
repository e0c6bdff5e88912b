"""Training on real processes equals eager PyTorch, on meshes of one and two axes.

That every model equals eager under drawn and known strategies is checked in lockstep
(`tests.equality`); here some models train under known strategies on processes, and some under drawn
assignments. ``make exhaustive`` runs every model under all of them, with 20 drawn assignments.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autopar.ir.mesh import Mesh
from autopar.lowering.program import lower
from autopar.sharding.strategy import Strategy
from tests.effort import EXHAUSTIVE
from tests.equality.test_known_strategies import STRATEGIES, case_of, divides, planned
from tests.models.zoo import MODELS, MORE_MODELS, UNEVEN_MODELS
from tests.oracles import random_assignment
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

MESHES = {
    "2": Mesh(("a",), (2,)),
    "2x1": Mesh(("a", "b"), (2, 1)),
    "4": Mesh(("a",), (4,)),
    "2x2": Mesh(("a", "b"), (2, 2)),
}
ASSIGNMENTS = 20 if EXHAUSTIVE else 0
NAMES = (*MODELS, *MORE_MODELS, *UNEVEN_MODELS)
USUAL = "zero3 x tensor on 2x2"


def check(name: str, groups: Groups, strategy: Strategy) -> None:
    case, program = case_of(name), lower(strategy)
    group = groups(program.mesh.num_devices)
    runner = runner_of(group, case.captured, program, case.model, optimizer=case.optimizer)
    case.compare(process_steps(runner, case.captured, case.batches))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", list(MESHES) if ASSIGNMENTS else ["2x2"])
@pytest.mark.parametrize("name", NAMES if ASSIGNMENTS else list(MODELS))
def test_random_assignments(name: str, mesh: str, groups: Groups) -> None:
    analysis = case_of(name).analysis

    @settings(
        max_examples=math.ceil(ASSIGNMENTS / len(MESHES)) or 1,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # no seed is simpler than another
    )
    @given(seed=st.integers(0, 2**32))
    def sample(seed: int) -> None:
        check(name, groups, Strategy(analysis, random_assignment(analysis, MESHES[mesh], seed)))

    sample()


def pairs() -> list[tuple[str, str]]:
    every = [(name, x) for name in NAMES for x in STRATEGIES if divides(name, x)]
    if ASSIGNMENTS:
        return every
    usual = {name: USUAL if name in MODELS else "searched on 2" for name in NAMES}
    return [(name, x) for name, x in every if name == "gpt2" or usual[name] == x]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "strategy"), pairs())
def test_searched_and_known_strategies(name: str, strategy: str, groups: Groups) -> None:
    check(name, groups, planned(name, strategy).strategy)
