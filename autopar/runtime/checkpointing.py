"""Checkpoints after every so many training steps, and going on from the newest of them.

In: each training step of `autopar.runtime.compiled.Compiled`, on every rank alike. Out: a folder of
numbered checkpoints, written in the background (see `autopar.runtime.state.background`). Ranks
agree between steps on how a write has ended, so that its error is raised on all of them at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from autopar.base.errors import AutoparError, InputError
from autopar.cost_models.hardware import is_count
from autopar.runtime.runners.spmd import from_first_rank
from autopar.runtime.state.checkpoint_paths import Path, check_writable, unwritten
from autopar.runtime.state.numbered_checkpoints import complete_checkpoints, path_after

_log = logging.getLogger(__name__)


class SavingRunner(Protocol):
    """The methods of a runner that periodic checkpoints use.

    * ``begin_save`` copies the state, and begins to write it; one save at a time. Of the numbered
      checkpoints beside it ``keep`` are kept.
    * ``save_outcomes`` has for each rank how the last save ended: empty if well, None if it has not
      ended; with ``wait``, after as long as a write may take. With ``alone`` it asks no other
      process under ``torchrun``.
    * ``give_up_save`` makes no rank wait for the files of others any more.
    """

    @property
    def num_steps(self) -> int: ...

    @property
    def num_skipped_steps(self) -> int: ...

    def watched(self, name: str) -> AbstractContextManager[None]: ...

    def load(self, path: Path) -> None: ...

    def begin_save(self, path: str, keep: int) -> None: ...

    def save_outcomes(self, *, wait: bool, alone: bool = False) -> list[str | None]: ...

    def give_up_save(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """Save after every ``num_steps`` steps."""

    num_steps: int
    folder: str
    keep: int


class PeriodicCheckpoints:
    """Saves after training steps, once `begin` was called. Every method is collective."""

    def __init__(self, runner: SavingRunner) -> None:
        self._runner = runner
        self._setting: _Setting | None = None
        self._writing: str | None = None
        self._error: InputError | None = None

    def begin(self, num_steps: int, folder: Path, keep: int) -> int:
        """As `autopar.runtime.compiled.Compiled.checkpoint_every`."""
        for name, value in (("num_steps", num_steps), ("keep", keep)):
            if not is_count(value):
                raise InputError(
                    f"{name} is {value!r}; it must be a whole number, at least 1: "
                    "compiled.checkpoint_every(100, 'checkpoints', keep=3)"
                )
        check_writable(folder)
        self.finish()
        if self._setting is None:  # behind the workers', so that it comes before their end
            atexit.register(_finish_at_exit, weakref.ref(self))
        setting = _Setting(num_steps=num_steps, folder=os.path.abspath(folder), keep=keep)
        with self._runner.watched("checkpoint_every()"):
            paths = from_first_rank(
                lambda: complete_checkpoints(setting.folder), "the list of checkpoints"
            )
        self._load_newest(paths, setting)
        self._setting = setting
        return self._num_done

    @property
    def _num_done(self) -> int:
        """The number of batches that were trained on, or skipped."""
        return self._runner.num_steps + self._runner.num_skipped_steps

    def _load_newest(self, paths: Sequence[str], setting: _Setting) -> None:
        """Load the first that is good, if there are any."""
        refused: list[InputError] = []
        for path in paths:
            try:
                self._runner.load(path)
            except InputError as error:
                refused.append(error)
                continue
            for reason in refused:
                _log.warning("training goes on from %r: %s", path, reason)
            return
        if refused:
            raise InputError(
                f"none of the {len(paths)} checkpoints in {setting.folder!r} can be loaded: "
                f"{refused[0]}. To begin anew pass the name of another folder: "
                f"compiled.checkpoint_every({setting.num_steps}, 'checkpoints')"
            ) from refused[0]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step, and save if it is time.

        Raises what went wrong in a save before: before the step, so that no step's loss is lost.
        """
        if self._error is None and self._writing is not None:
            self._follow()
        self._raise_error()
        yield
        setting = self._setting
        if setting is None or self._num_done % setting.num_steps:
            return
        if self._writing is not None:
            self._follow(wait=True)
        if self._writing is None:
            self._save(path_after(setting.folder, self._num_done), setting.keep)

    def _save(self, path: str, keep: int) -> None:
        try:
            self._runner.begin_save(path, keep)
        except InputError as error:
            self._error = self._error or error
        else:
            self._writing = path

    def _follow(self, *, wait: bool = False, alone: bool = False) -> None:
        """Note whether the files of the last save are written, and what went wrong."""
        assert self._writing is not None
        outcomes = self._runner.save_outcomes(wait=wait, alone=alone)
        reason = next(filter(None, outcomes), None)
        if reason is not None:
            self._runner.give_up_save()
            outcomes = self._runner.save_outcomes(wait=True, alone=alone)
        elif wait and None in outcomes:
            late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
            which = "this rank's file" if alone else f"the files of ranks {late}"
            reason = f"{which} were not written in half of the time limit of a call"
        if reason is not None:
            self._error = unwritten(self._writing, reason)
        if None not in outcomes:
            self._writing = None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the threads that write have ended
            self.end()

    def end(self) -> None:
        """Wait for the last save of a model that was not closed, and log what went wrong."""
        try:
            self.finish()
        except AutoparError as error:
            _log.error("the last checkpoint is missing: %s", error)

    def finish(self) -> None:
        """Wait for the last save; raises what went wrong. Under ``torchrun`` each rank waits for
        its own part, the first one for all files."""
        if self._writing is not None:
            self._follow(wait=True, alone=True)
        self._writing = None
        self._raise_error()


def _finish_at_exit(found: weakref.ref[PeriodicCheckpoints]) -> None:
    if (checkpoints := found()) is not None:
        checkpoints.end()
