"""A pause of Python's cyclic garbage collector while many long-lived objects are made.

Tracing and pricing make millions of objects that live until the end, and every full collection
would traverse all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable collection inside, then restore the previous state; nests; also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
