"""The checkpoints of one job in one folder: subfolders named by the number of steps done.

A subfolder is complete once it has a manifest. Others are what a save that ended early left.
"""

from __future__ import annotations

import contextlib
import os
import re

from autopar.runtime.state.checkpoint_format import MANIFEST, remove_ours

_NAME = re.compile(r"step-([0-9]{8,18})")


def path_after(folder: str, num_steps: int) -> str:
    """The path of the checkpoint after so many steps."""
    return os.path.join(folder, f"step-{num_steps:08d}")


def complete_checkpoints(folder: str) -> list[str]:
    """The paths of the complete ones, the newest first."""
    return [path for _, path in reversed(_numbered(folder)) if _is_complete(path)]


def remove_old(path: str, keep: int) -> None:
    """Keep a complete checkpoint and the ``keep - 1`` before it; remove what is older, and what is
    incomplete, as far as possible.

    Newer ones were there when training went on from an older one; they stay until they are written
    again.
    """
    others = [(n, other) for n, other in _numbered(os.path.dirname(path)) if other != path]
    own = int(os.path.basename(path).removeprefix("step-"))
    older = [other for n, other in others if n < own and _is_complete(other)]
    old = older[: len(older) - (keep - 1)] if keep <= len(older) else []
    for other in [*old, *(other for _, other in others if not _is_complete(other))]:
        _remove(other)


def _numbered(folder: str) -> list[tuple[int, str]]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [(int(m[1]), os.path.join(folder, m[0])) for m in map(_NAME.fullmatch, names) if m]
    return sorted(found)


def _is_complete(path: str) -> bool:
    return os.path.lexists(os.path.join(path, MANIFEST))


def _remove(path: str) -> None:
    """Remove the files of a checkpoint, its manifest first, and the folder if nothing else is in
    it."""
    with contextlib.suppress(OSError):
        if _is_complete(path):
            os.unlink(os.path.join(path, MANIFEST))
        remove_ours(path, [])
        os.rmdir(path)
