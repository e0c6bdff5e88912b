"""Schedule to schedule: recomputation and offloading, reductions, messages."""
