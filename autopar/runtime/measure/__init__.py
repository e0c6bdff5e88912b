"""Measured times of ops and collectives on this machine's devices."""
