"""Seconds and bytes of every choice, from the prices of the calls that a device makes."""
