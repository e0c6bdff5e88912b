"""Parameters, buffers and optimizer state: shards, checkpoints, what travels to workers."""
