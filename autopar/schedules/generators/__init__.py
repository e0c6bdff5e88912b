"""Generators of backward schedules, one per file."""
