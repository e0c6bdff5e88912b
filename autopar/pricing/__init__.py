"""Prices: seconds and bytes of every choice, from the calls that a device makes."""
