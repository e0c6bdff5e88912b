"""The folder of a checkpoint, as a caller names it: checked before any worker is asked."""

from __future__ import annotations

import os
from typing import Any

from autopar.base.errors import InputError
from autopar.runtime.state.checkpoint_format import MANIFEST
from autopar.runtime.state.dcp_checkpoint import METADATA

Path = str | os.PathLike[str]


def check_exists(path: Path) -> None:
    """Raise InputError if there is no checkpoint."""
    _check_path(path)
    if not any(os.path.lexists(os.path.join(path, name)) for name in (MANIFEST, METADATA)):
        raise InputError(
            f"there is no checkpoint in {os.fspath(path)!r}: a folder that compiled.save(path) "
            f"wrote holds a file {MANIFEST}, one of torch.distributed.checkpoint.save {METADATA}"
        )


def check_writable(path: Path) -> None:
    """Raise InputError if the folder cannot be made or written to."""
    _check_path(path)
    name = os.fspath(path)
    existing = os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise InputError(
            f"cannot save to {name!r}: a checkpoint is a folder, and {existing!r} is a file; pass "
            "the name of a new folder, such as compiled.save('checkpoint')"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot save to {name!r}: nothing may be written in {existing!r}; pass a folder of "
            "your own, such as compiled.save('checkpoint')"
        )


def unwritten(path: Path, reason: str) -> InputError:
    """The error of a checkpoint that could not be written."""
    return InputError(
        f"the checkpoint cannot be written to {os.fspath(path)!r}: {reason}. Nothing is lost: pass "
        "another folder, such as compiled.save('checkpoint')"
    )


def _check_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in os.fspath(path):
        raise InputError(
            f"a checkpoint cannot be at {path!r}; pass the name of a folder, such as "
            "compiled.save('checkpoint')"
        )
