"""Parameters, buffers and optimizer state: shards, checkpoints, and their way to workers."""
