"""Strategies: a placement for every value; micro-batches as one more axis of the mesh."""
