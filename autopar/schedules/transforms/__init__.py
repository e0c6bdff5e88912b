"""Transforms of schedules: recomputation, offloading, reductions, explicit messages."""
