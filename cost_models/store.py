"""The profile store: measured times in one SQLite file, which many processes may write.

A time belongs to a call, a device's name (with the number of processes that shared the host, and
whether products run in TF32), a torch version and a number of threads; a collective's also to its
kind, the shape of its group and its links, its size and its backend. A call that cannot be measured
is stored with the reason. Every time is committed individually, so a process that is killed loses
at most the measurement in progress. Each row has a checksum; a row with a wrong one is ignored and
measured again on demand.

It is a cache: a file that is damaged or of another version is renamed, and a new one started. If
that is impossible (the file is locked, read-only or another program's, or the disk is full), what
is readable is used, new times are kept in memory, and a `StoreWarning` says so. No call waits for
another process for longer than `BUSY_S`.
"""

import contextlib
import hashlib
import json
import math
import os
import sqlite3
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from autopar.cost_models.call_text import call_from_text, call_to_text
from autopar.cost_models.calls import OpCall
from autopar.cost_models.estimate import CostError
from autopar.cost_models.hardware import DeviceSpec

SCHEMA_VERSION = 10
BUSY_S = 3.0
_APPLICATION_ID = 0x61707263
_OPS, _FAILURES, _COLLECTIVES, _REGIONS = "op", "failure", "collective", "region"

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE entries (
    owner TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (owner, kind, name, key)
) WITHOUT ROWID
"""


class StoreWarning(UserWarning):
    """The profile store is damaged, foreign, locked or not writable; says what was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Measured seconds of a call. ``spread`` is the interquartile range over the median."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    spread: float
    num_samples: int

    @property
    def total_s(self) -> float:
        """Seconds of all directions."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    def scaled(self, factor: float) -> "OpTime":
        """The times on a device that is slower by ``factor``."""
        return replace(
            self,
            forward_s=self.forward_s * factor,
            input_grad_s=self.input_grad_s * factor,
            weight_grad_s=self.weight_grad_s * factor,
        )

    def is_sane(self) -> bool:
        """Whether every number is plausible; the forward time is positive."""
        times = (self.forward_s, self.input_grad_s, self.weight_grad_s, self.spread)
        return _are_plausible(times) and self.forward_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Measured seconds of a collective of ``size_bytes``."""

    size_bytes: int
    time_s: float
    spread: float
    num_samples: int

    def is_sane(self) -> bool:
        """Whether every number is plausible."""
        are_plausible = _are_plausible((self.size_bytes, self.time_s, self.spread))
        return are_plausible and self.size_bytes > 0 and self.time_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTime:
    """Measured seconds of a run of ops, one by one and compiled as one function."""

    eager_s: float
    compiled_s: float
    spread: float
    num_samples: int

    def is_sane(self) -> bool:
        """Whether every number is plausible."""
        are_plausible = _are_plausible((self.eager_s, self.compiled_s, self.spread))
        return are_plausible and self.eager_s > 0 and self.compiled_s > 0


def owner_of(device: DeviceSpec) -> str:
    """The key of a device's times in a store: its name and settings, and the version of torch."""
    # Concurrent processes share the host's memory, which changes their times.
    beside = "" if device.num_processes == 1 else f", one of {device.num_processes}"
    name = device.name + beside + _products(device)
    return json.dumps([name, torch.__version__, device.num_threads])


class _NotOurs(Exception):
    """The file is not a profile store, and is not touched."""


class ProfileStore:
    """The times measured on a kind of device with a version of torch.

    ``path`` None keeps them in memory. Forked processes reopen the file; times in memory only stay
    with the parent. Threads may share a store.
    """

    def __init__(self, path: str | Path | None, device: DeviceSpec) -> None:
        self.path = None if path is None else Path(path)
        self._owner = owner_of(device)
        self._said: set[str] = set()
        self._memory = _connect(":memory:")
        self._memory.execute(_SCHEMA)
        self._file: sqlite3.Connection | None = None
        self._is_writable = True
        self._open()

    def close(self) -> None:
        """Close the file; a closed store must not be used."""
        self._memory.close()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "ProfileStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, call: OpCall) -> OpTime | None:
        """The measured times of ``call`` on this device, or None."""
        found = self._find(_OPS, call.target, call_to_text(call))
        return next((t for v in found.values() if (t := self._read(v, OpTime))), None)

    def put(self, call: OpCall, times: OpTime) -> None:
        """Store the times of ``call``, replacing earlier ones; commits at once."""
        if not times.is_sane():
            raise CostError(f"{times} cannot be the times of {call.target}.")
        self._keep(_OPS, call.target, call_to_text(call), times)

    def failure(self, call: OpCall) -> str | None:
        """The reason why ``call`` cannot be measured on this device, or None."""
        found = self._find(_FAILURES, call.target, call_to_text(call))
        return next((self._read(value, str) for value in found.values()), None)

    def put_failure(self, call: OpCall, reason: str, *, for_now: bool = False) -> None:
        """Store the reason why ``call`` cannot be measured, so that later runs do not try again.

        ``for_now``: only as long as this store is open.
        """
        self._keep(_FAILURES, call.target, call_to_text(call), reason, for_now=for_now)

    def of_op(self, target: str) -> Iterator[tuple[OpCall, OpTime]]:
        """All measured calls of an operation on this device."""
        return self._calls(target)

    def everything(self) -> Iterator[tuple[OpCall, OpTime]]:
        """All measured calls on this device."""
        return self._calls(None)

    def _calls(self, target: str | None) -> Iterator[tuple[OpCall, OpTime]]:
        for (_, key), value in self._find(_OPS, target).items():
            times = self._read(value, OpTime)
            if times is None:
                continue
            try:
                call = call_from_text(key)
            except CostError as error:
                self._say(f"an unreadable row is ignored: {error}")
                continue
            yield call, times

    def put_collective(self, kind: str, shape: str, backend: str, times: CollectiveTime) -> None:
        """Store the time of a collective of one size on groups of one shape."""
        if not times.is_sane():
            raise CostError(f"{times} cannot be the time of {kind}.")
        self._keep(_COLLECTIVES, backend, json.dumps([kind, shape, times.size_bytes]), times)

    def collectives(self, backend: str) -> dict[tuple[str, str], tuple[CollectiveTime, ...]]:
        """Measured times by kind and group shape, ordered by size."""
        found: dict[tuple[str, str], list[CollectiveTime]] = {}
        for (_, key), value in self._find(_COLLECTIVES, backend).items():
            times = self._read(value, CollectiveTime)
            if times is not None:
                kind, shape, _ = json.loads(key)
                found.setdefault((kind, shape), []).append(times)
        return {
            key: tuple(sorted(found[key], key=lambda times: times.size_bytes))
            for key in sorted(found)
        }

    def put_region(self, text: str, times: RegionTime) -> None:
        """Store the times of a region, named by its text."""
        if not times.is_sane():
            raise CostError(f"{times} cannot be the times of a region.")
        self._keep(_REGIONS, _digest(text), text, times)

    def region(self, text: str) -> RegionTime | None:
        """The measured times of a region, or None."""
        found = self._find(_REGIONS, _digest(text), text)
        return next((t for v in found.values() if (t := self._read(v, RegionTime))), None)

    def _keep(self, kind: str, name: str, key: str, value: Any, *, for_now: bool = False) -> None:
        """Write to the file, or to memory if the file is not writable."""
        row = (self._owner, kind, name, key, msgspec.json.encode(value).decode())
        insert = "INSERT OR REPLACE INTO entries VALUES (?,?,?,?,?,?)"
        self._reopen_after_fork()
        if self._file is not None and self._is_writable and not for_now:
            try:
                self._file.execute(insert, (*row, _checksum(row)))
                return
            except sqlite3.Error as error:
                self._is_writable = False
                self._say(f"it cannot be written, so new times are kept in memory: {error}{_FIX}")
        self._memory.execute(insert, (*row, _checksum(row)))

    def _find(
        self, kind: str, name: str | None = None, key: str | None = None
    ) -> dict[tuple[str, str], str]:
        """Intact values by name and key; those in memory are newer."""
        query = "SELECT name, key, value, checksum FROM entries WHERE owner=? AND kind=?"
        given = [self._owner, kind]
        for column, wanted in (("name", name), ("key", key)):
            if wanted is not None:
                query += f" AND {column}=?"
                given.append(wanted)
        self._reopen_after_fork()
        rows: list[Any] = []
        if self._file is not None:
            try:
                rows = self._file.execute(query, given).fetchall()
            except sqlite3.Error as error:
                self._file = None
                self._say(f"it failed while in use, so times are kept in memory: {error}{_FIX}")
        found = {}
        for *text, value, checksum in (*rows, *self._memory.execute(query, given)):
            if checksum == _checksum((self._owner, kind, *text, value)):
                found[text[0], text[1]] = value
            else:
                self._say("a damaged row is ignored")
        return found

    def _read(self, value: str, kind: type[T]) -> T | None:
        """Decode a value of this type; None, with a warning, if it is implausible."""
        with contextlib.suppress(msgspec.DecodeError):
            found = msgspec.json.decode(value, type=kind)
            if isinstance(found, str) or found.is_sane():  # type: ignore[attr-defined]
                return found
        self._say("a row with implausible numbers is ignored")
        return None

    def _say(self, what: str) -> None:
        """Warn once per store and message, since a damaged table has many rows."""
        if what in self._said:
            return
        self._said.add(what)
        warnings.warn(f"profile store {self.path}: {what}", StoreWarning, stacklevel=4)

    def _reopen_after_fork(self) -> None:
        if self._pid != os.getpid():
            # SQLite connections must not be used after a fork; the parent keeps its own.
            self._open()

    def _open(self) -> None:
        """Open or create the file at the path; without one if it cannot be used."""
        self._pid = os.getpid()
        self._is_writable = True
        self._file = None
        if self.path is None:
            return
        try:
            if self.path.exists() and not self.path.is_file():
                raise _NotOurs("it is not a regular file")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._begun(self.path)
        except _NotOurs as reason:
            self._say(f"{reason}; times are kept in memory")
        except (OSError, ValueError, sqlite3.OperationalError) as error:
            self._is_writable = False
            self._file = None if _is_locked(error) else _opened_for_reading(self.path)
            how = "opened, so times" if self._file is None else "written, so new times"
            self._say(f"it cannot be {how} are kept in memory: {error}{_FIX}")

    def _begun(self, path: Path) -> sqlite3.Connection:
        for _ in range(3):
            inode = path.stat().st_ino if path.exists() else None
            connection = _connect(path)
            try:
                _prepare(connection)
                return connection
            except (sqlite3.OperationalError, _NotOurs):
                connection.close()
                raise
            except sqlite3.DatabaseError as error:
                connection.close()
                aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
                # Another process may have created a new one in the meantime.
                if path.exists() and path.stat().st_ino == inode:
                    _set_aside(path, aside)
                    self._say(
                        f"it is damaged ({error}); it was renamed to {aside.name}, and a new one "
                        "started"
                    )
        raise _NotOurs("it is damaged repeatedly")


_FIX = (
    ". Stop the process that locks it, make it writable, or free disk space; or set "
    "$AUTOPAR_CACHE_DIR to another folder"
)


def default_store_path() -> Path:
    """The default path of the store."""
    from autopar.cost_models.detect import cache_folder

    return cache_folder() / f"profile-{SCHEMA_VERSION}.sqlite3"


def _products(device: DeviceSpec) -> str:
    """The settings of a CUDA device that change the time of a product, as part of its name."""
    if device.kind != "cuda":
        return ""
    allowed = {
        "products": device.allow_tensor_float32,
        "convolutions": device.allow_tensor_float32_in_cudnn,
    }
    names = [name for name, is_allowed in allowed.items() if is_allowed]
    return f", TF32 in {' and '.join(names)}" if names else ""


def _are_plausible(numbers: Iterable[object]) -> bool:
    """Whether all are finite numbers that are not negative."""
    return all(isinstance(n, (int, float)) and math.isfinite(n) and n >= 0 for n in numbers)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checksum(row: tuple[Any, ...]) -> int:
    """The checksum of a row's key and value."""
    return zlib.crc32(repr(row).encode())


def _connect(database: str | Path, *, uri: bool = False) -> sqlite3.Connection:
    """Open a database; invalid UTF-8 is replaced, so that the row's checksum does not match."""
    connection = sqlite3.connect(
        database, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Check or initialize a file; raises DatabaseError if it must be renamed."""
    if _identity(connection) == (0, 0):
        # New, or being initialized by another process: the lock decides. A failure closes the
        # connection, which rolls everything back.
        connection.execute("BEGIN IMMEDIATE")
        (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if _identity(connection) == (0, 0) and not count:
            connection.execute(_SCHEMA)
            connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    application, version = _identity(connection)
    if application != _APPLICATION_ID:
        raise _NotOurs("it is another program's database")
    if version != SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"its layout is {version}, not {SCHEMA_VERSION}")
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    _log_ahead(connection)
    # A crash of the machine may lose the last times; a crash of the process may not.
    connection.execute("PRAGMA synchronous=NORMAL")


def _log_ahead(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log, retrying while other processes do the same."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if not _is_locked(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _is_locked(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    return application, version


def _set_aside(path: Path, aside: Path) -> None:
    """Rename the file, and remove its write-ahead log."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.replace(aside)


def _opened_for_reading(path: Path) -> sqlite3.Connection | None:
    """Open a file that cannot be written for reading; None if it is unusable."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        with contextlib.suppress(sqlite3.Error):
            connection = _connect(f"{path.absolute().as_uri()}?{mode}", uri=True)
            if _identity(connection) == (_APPLICATION_ID, SCHEMA_VERSION):
                connection.execute("SELECT count(*) FROM entries").fetchone()
                return connection
            connection.close()
    return None
