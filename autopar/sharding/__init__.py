"""Strategies: a placement for every value, with micro-batches as one more mesh axis."""
