"""Drawn combinations of model, plan and schedule equal eager PyTorch, in lockstep.

``make exhaustive`` draws twenty times as many.
"""

from __future__ import annotations

import functools

import pytest

from tests.effort import EXHAUSTIVE
from tests.equality.case import Case
from tests.equality.drawn_plans import drawn_programs
from tests.models import families
from tests.models.zoo import MODELS, MORE_MODELS, UNEVEN_MODELS, gpt2

FACTOR = 20 if EXHAUSTIVE else 1
NUM_STEPS = 2
PROGRAMS = {
    "mlp": 28,
    "gpt2": 8,
    "dlrm": 8,
    "odd_layers": 8,
    "bert": 4,
    "transformer_encoder": 4,
    "llama": 2,
    "odd_vit": 2,
    "alexnet": 1,
    "lstm": 1,
    "mixtral": 1,
    "odd_gpt2": 1,
    "resnet": 1,
}
"""Programs drawn of each model; one of the others, which take longer, under fewer schedules."""
MANY_SCHEDULES, FEW_SCHEDULES = 30, 8
"""Schedules that each program is tried under, the plain one among them."""
DIVIDED = ["gpt2 inside layers", "llama inside layers", "bert inside layers"]
NAMES = [
    *MODELS, *MORE_MODELS, *UNEVEN_MODELS, "gpt2 of 8 layers", "llama of 6 layers", *DIVIDED
]  # fmt: skip


@functools.cache
def case_of(name: str) -> Case:
    deep = {"gpt2 of 8 layers": lambda: gpt2(8), "llama of 6 layers": lambda: families.llama(6)}
    kind = name.split()[0]
    num_joined = 1 if kind in UNEVEN_MODELS else 2
    return Case(
        kind, deep.get(name), num_joined=num_joined, num_steps=NUM_STEPS,
        is_divided=name in DIVIDED,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=pytest.mark.xdist_group(f"drawn {name}"))
        for name in NAMES
        for number in range(FACTOR * PROGRAMS.get(name, 1))
    ],
)
def test_drawn_plans_equal_eager(name: str, number: int) -> None:
    case, tried = case_of(name), 0
    num_schedules = MANY_SCHEDULES if name in PROGRAMS else FEW_SCHEDULES
    for drawn in drawn_programs(case, number, num_schedules):
        try:
            case.check(drawn.program)
        except Exception as error:
            error.add_note(drawn.text)
            raise
        tried += 1
    assert tried >= num_schedules // 2, "nearly everything that was drawn was refused"
