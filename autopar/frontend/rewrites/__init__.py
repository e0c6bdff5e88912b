"""Rewrites of an exported program before it is read."""
