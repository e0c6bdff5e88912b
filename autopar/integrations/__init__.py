"""Loaders, and adapters to other libraries' training loops.

Each adapter needs its package only when it is imported.
"""
