"""Simulation of schedules over real costs: timeline, trace, drawing."""
