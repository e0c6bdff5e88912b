"""Transports of collectives and messages between processes, behind one protocol (`base`)."""
