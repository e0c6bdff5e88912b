"""From a strategy to the program of one rank: shard, differentiate, split into F, I and W."""

from autopar.lowering.program import CollectiveCall, RankProgram, lower

__all__ = ["CollectiveCall", "RankProgram", "lower"]
