"""Adapters to other libraries' training loops; each needs its package only when it is imported."""
