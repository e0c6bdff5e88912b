"""Oracles: the programs of all ranks in one process, and the check of a rule."""
