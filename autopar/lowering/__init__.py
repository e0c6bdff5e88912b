"""From a strategy to the program of one rank: shard, differentiate, split into F, I and W."""

from autopar.lowering.program import lower
from autopar.lowering.types import CollectiveCall, RankProgram

__all__ = ["CollectiveCall", "RankProgram", "lower"]
