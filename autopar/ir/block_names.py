"""Names of blocks and modules: the blocks that no stage has, and what lies in a module."""

from __future__ import annotations

FIXED = "fixed"
TOTALS = "batch sums"
"""The sums over the batch that are computed from inputs alone, such as the number of targets."""


def lies_in(path: str, module: str) -> bool:
    """Whether the module at ``path`` is ``module`` or inside it; every module is inside ``""``."""
    return not module or path == module or path.startswith(f"{module}.")
