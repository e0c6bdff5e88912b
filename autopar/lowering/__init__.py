"""From a strategy to the program of one rank: shard, differentiate, split into F, I and W."""
