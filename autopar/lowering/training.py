"""The training program of a strategy: one micro-batch after the other where there are several."""

from __future__ import annotations

from autopar.lowering.program import lower
from autopar.lowering.types import RankProgram
from autopar.sharding.microbatches import Microbatches
from autopar.sharding.strategy import Strategy


def lower_training(
    strategy: Strategy, num_microbatches: int = 1, *, device_type: str = "cpu"
) -> RankProgram:
    """The training program of a strategy, one micro-batch after the other where there are any."""
    if num_microbatches > 1:
        strategy = Microbatches(strategy.analysis, num_microbatches).cut(strategy)
    return lower(strategy, device_type=device_type)
