"""Passes: rewrites of a captured graph before strategies are made for it."""
