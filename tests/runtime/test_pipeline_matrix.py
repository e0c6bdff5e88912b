"""The table of pipelines on real processes: 2, 4 and 8 of them.

Three entries with meshes inside their stages; ``make exhaustive`` runs the whole table, as
`tests.equality.test_pipeline_table` does in lockstep.
"""

from __future__ import annotations

import pytest

from tests.effort import EXHAUSTIVE
from tests.equality.pipeline_table import Combination, combinations
from tests.equality.test_pipeline_table import program_of_entry
from tests.runtime.conftest import Groups
from tests.runtime.test_pipelines import check

USUAL = [
    Combination(model="bert", num_processes=4, inside="data 2 x tensor 2", row="reverse_first_k"),
    Combination(model="llama", num_processes=4, inside="tensor 2", row="zb_h1"),
    Combination(model="t5", num_processes=4, inside="data 2", row="1f1b, recomputed"),
]
TABLE = [c for c in combinations() if c.misfit() is None] if EXHAUSTIVE else USUAL


@pytest.mark.parametrize("entry", TABLE, ids=str)
def test_equals_eager(entry: Combination, groups: Groups) -> None:
    case, program = program_of_entry(entry)
    check(case, groups, program)
