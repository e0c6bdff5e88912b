"""Backward schedules, one generator a file."""
