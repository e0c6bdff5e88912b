"""A step on real devices: machines, runners, workers, state, faults."""
