"""Models whose sizes do not divide by the devices: padded splits give eager's results.

Vocabularies, batches, sequences and widths are mostly prime. Random valid assignments run in
lockstep and are compared with eager PyTorch in double precision.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models import Cluster
from autopar.frontend.capture import Captured, capture
from autopar.ir.mesh import Mesh
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from autopar.rules.choice import padded_dims
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import UNEVEN_MODELS, build
from tests.oracles import (
    assert_same,
    lockstep_steps,
    random_assignment,
    reference_steps,
    state_of,
    to_double,
)

MESHES = {
    "2": Mesh(("a",), (2,)),
    "3": Mesh(("a",), (3,)),
    "4": Mesh(("a",), (4,)),
    "2x2": Mesh(("a", "b"), (2, 2)),
}


# transformers computes losses, and Llama its norms, in float32 whatever the model's dtype.
TOLERANCE = {"odd_gpt2": 2e-6, "odd_llama": 5e-6, "odd_vit": 1e-7, "odd_layers": 1e-9}


@lru_cache
def prepared(name: str) -> Any:
    model, make_batch = build(name)
    model = model.double()
    batches = [to_double(make_batch(seed)) for seed in range(2)]
    captured = capture(model, batches[0])
    return captured, state_of(model), batches, reference_steps(model, batches)


def count_padded(strategy: Strategy) -> int:
    """Ops that a strategy splits into parts that do not divide."""
    choices, spaces = strategy.assignment.choices, strategy.analysis.spaces
    return sum(
        bool(padded_dims(s, c, strategy.mesh)) for s, c in zip(spaces, choices) if s is not None
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("name", list(UNEVEN_MODELS))
def test_random_assignments_equal_eager(name, mesh):
    captured, state, batches, expected = prepared(name)
    analysis = Analysis(captured.graph)
    for seed in range(3):
        strategy = Strategy(analysis, random_assignment(analysis, MESHES[mesh], seed))
        strategy.verify()
        assert count_padded(strategy) > 0
        got = lockstep_steps(strategy, captured, state, batches)
        assert_same(got, expected, tolerance=TOLERANCE[name])


class LanguageHead(nn.Module):
    """GPT-2's largest product: a vocabulary of 50,257 over one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50_257, 768)
        self.head = nn.Linear(768, 50_257, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(F.gelu(self.embedding(ids)))
        return F.cross_entropy(logits.view(-1, 50_257), labels.view(-1))


@pytest.fixture(scope="module")
def head_graph() -> Captured:
    tokens = torch.zeros(1, 127, dtype=torch.int64)
    with torch.device("meta"):
        model = LanguageHead()
    return capture(model, (tokens, tokens))


@pytest.mark.parametrize("mesh", [{"tp": 8}, {"dp": 2, "tp": 4}], ids=str)
def test_a_vocabulary_that_does_not_divide_is_split(head_graph, mesh):
    cluster = Cluster.preset("a100-80")
    planned = make_planned(head_graph, cluster, Space(mesh=mesh))
    choices = zip(head_graph.graph.ops, planned.strategy.assignment.choices)
    found = {op.target_name: str(choice).split() for op, choice in choices}
    assert found["aten.linear.default"] == ["n"] * len(mesh)
    assert found["aten.cross_entropy_loss.default"] == ["c"] * len(mesh)
    gathered = [c for c in planned.program.collectives() if c.size_bytes > 127 * 50_257]
    assert not gathered, "the logits or the table travelled"
