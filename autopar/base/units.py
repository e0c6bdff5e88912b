"""Sizes and times formatted for people, and rounded for plans."""

from __future__ import annotations

import numpy as np


def nine_digits(number: float) -> float:
    """Nine significant digits, so that the order of a sum does not change a plan's bytes."""
    return float(np.format_float_positional(number, precision=9, fractional=False)) + 0.0


def format_bytes(size_bytes: float) -> str:
    """``1.50 GiB``, ``12.3 MiB`` or ``640 B``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(time_s: float) -> str:
    """``1.25 s``, ``3.40 ms`` or ``12.0 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if time_s >= scale:
            return f"{time_s / scale:.2f} {unit}"
    return f"{time_s * 1e6:.1f} us"
