"""The origin of a source file, the user's, ours or torch's, by the real paths of the packages."""

from __future__ import annotations

import contextlib
import copyreg
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[1]


@lru_cache(maxsize=4096)
def real_path(filename: str) -> str:
    return os.path.realpath(filename)


def lies_in(filename: str, places: Iterable[str | Path]) -> bool:
    """Whether a file is one of ``places`` or inside one of them; links are followed."""
    path = real_path(filename)
    return any(
        path == place or path.startswith(place + os.sep)
        for place in (real_path(os.fspath(p)) for p in places)
    )


_LIBRARIES = (
    PACKAGE,
    PACKAGE / "cost_models",  # in a checkout, a link to a folder outside of PACKAGE
    PACKAGE / "search",
    Path(torch.__file__).parent,
    Path(contextlib.__file__),
    Path(copyreg.__file__),
)


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor ours, and its code was not generated."""
    return not filename.startswith("<") and not lies_in(filename, _LIBRARIES)
