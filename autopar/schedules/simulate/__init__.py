"""Schedules played over real costs: timeline, trace, drawing."""
