"""Measured times on disk: one SQLite file, written by many processes, never trusted blindly.

A time belongs to a call, a device's name (with the number of processes that shared the host, and
whether products run in TF32), a torch version and a number of threads; a collective's also to its
kind, the shape of its group and its links, its size and its backend. A call that cannot be measured
is kept with the reason. Every time is committed on its own, so a process killed at any moment loses
at most the measurement in flight. Each row carries a checksum of its key and values; one that does
not fit is left out, and measured again where it is asked for.
What is wrong with a file is said by a ``StoreWarning``, and the work goes on:

- a damaged file, or one of an older layout, is set aside under another name and rebuilt;
- a database of another program, or of a newer layout, and what is no regular file are left alone
  and times are kept in memory;
- a file that cannot be written is read; new times are kept in memory;
- in place of a file that was deleted or replaced while open, the one at its path is used, or begun.
"""

import contextlib
import math
import os
import sqlite3
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.cost_models.call_text import call_from_text, call_to_text
from autopar.cost_models.calls import OpCall
from autopar.cost_models.cluster import DeviceSpec
from autopar.cost_models.estimate import CostError

SCHEMA_VERSION = 9
_APPLICATION_ID = 0x61707263
_BUSY_TIMEOUT_S = 60.0

Row = tuple[Any, ...]

_SCHEMA = """
CREATE TABLE op_times (
    op TEXT NOT NULL,
    call TEXT NOT NULL,
    device TEXT NOT NULL,
    torch_version TEXT NOT NULL,
    num_threads INTEGER NOT NULL,
    forward_s REAL NOT NULL CHECK (forward_s >= 0),
    input_grad_s REAL NOT NULL CHECK (input_grad_s >= 0),
    weight_grad_s REAL NOT NULL CHECK (weight_grad_s >= 0),
    spread REAL NOT NULL,
    num_samples INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (op, call, device, torch_version, num_threads)
) WITHOUT ROWID;
CREATE TABLE op_failures (
    call TEXT NOT NULL,
    device TEXT NOT NULL,
    torch_version TEXT NOT NULL,
    num_threads INTEGER NOT NULL,
    reason TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (call, device, torch_version, num_threads)
) WITHOUT ROWID;
CREATE TABLE collective_times (
    kind TEXT NOT NULL,
    group_shape TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    device TEXT NOT NULL,
    torch_version TEXT NOT NULL,
    num_threads INTEGER NOT NULL,
    backend TEXT NOT NULL,
    time_s REAL NOT NULL CHECK (time_s >= 0),
    spread REAL NOT NULL,
    num_samples INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (kind, group_shape, size_bytes, device, torch_version, num_threads, backend)
) WITHOUT ROWID;
"""


_OP_VALUES = "forward_s, input_grad_s, weight_grad_s, spread, num_samples, checksum"


def _checksum(row: Row) -> int:
    """Of a row's key and values, each of the type that SQLite gives back."""
    return zlib.crc32(repr(row).encode())


class StoreWarning(UserWarning):
    """The profile store was damaged, foreign or not writable, and what was done about it."""


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
        """Of all directions."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    def scaled(self, factor: float) -> "OpTime":
        """The times of a device that takes ``factor`` times as long."""
        return replace(
            self,
            forward_s=self.forward_s * factor,
            input_grad_s=self.input_grad_s * factor,
            weight_grad_s=self.weight_grad_s * factor,
        )

    def is_sane(self) -> bool:
        """Whether every number can be a time; what is measured takes some forward."""
        times = (self.forward_s, self.input_grad_s, self.weight_grad_s, self.spread)
        are_times = all(isinstance(t, (int, float)) and math.isfinite(t) and t >= 0 for t in times)
        return are_times and self.forward_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Measured seconds of a collective of ``size_bytes``."""

    size_bytes: int
    time_s: float
    spread: float
    num_samples: int

    def is_sane(self) -> bool:
        """Whether every number can be a time."""
        numbers = (self.size_bytes, self.time_s, self.spread)
        are_numbers = all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers)
        return are_numbers and self.size_bytes > 0 and self.time_s > 0 and self.spread >= 0


class _NotUsable(Exception):
    """A file that is left alone."""


class ProfileStore:
    """The times measured on one kind of device with one version of torch.

    ``path`` None keeps them in memory. Forked processes open the file anew; what is in memory alone
    stays with the parent. Threads may share a store.
    """

    def __init__(self, path: str | Path | None, device: DeviceSpec) -> None:
        self.path = None if path is None else Path(path)
        # Processes beside each other share the host's memory, so their times are others.
        beside = "" if device.num_processes == 1 else f", one of {device.num_processes}"
        name = device.name + beside + _products(device)
        self._owner = (name, torch.__version__, device.num_threads)
        self._pid = os.getpid()
        self._read_only = False
        self._said: set[str] = set()
        self._inode: int | None = None
        self._connection = self._open()
        self._unwritten: dict[OpCall, OpTime] = {}
        self._unwritten_failures: dict[OpCall, str] = {}
        self._unwritten_collectives: dict[tuple[str, str, str], dict[int, CollectiveTime]] = {}

    def close(self) -> None:
        """Closes the file; a closed store must not be used."""
        self._connection.close()

    def __enter__(self) -> "ProfileStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, call: OpCall) -> OpTime | None:
        """The measured times of ``call`` on this device, or None."""
        known = self._unwritten.get(call)
        if known is not None:
            return known
        rows = self._read(
            f"SELECT {_OP_VALUES} FROM op_times "
            "WHERE op=? AND call=? AND device=? AND torch_version=? AND num_threads=?",
            (call.target, call_to_text(call), *self._owner),
        )
        return self._op_time(call, rows[0]) if rows else None

    def put(self, call: OpCall, times: OpTime) -> None:
        """Keeps the times of ``call``, replacing earlier ones; committed at once."""
        if not times.is_sane():
            raise CostError(f"{times} cannot be the times of {call.target}.")
        seconds = (times.forward_s, times.input_grad_s, times.weight_grad_s, times.spread)
        row = (*self._key(call), *map(float, seconds), times.num_samples)
        written = self._write(
            "INSERT OR REPLACE INTO op_times VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            (*row, _checksum(row)),
        )
        if not written:
            self._unwritten[call] = times

    def failure(self, call: OpCall) -> str | None:
        """Why ``call`` cannot be measured on this device; None where that was not found."""
        known = self._unwritten_failures.get(call)
        if known is not None:
            return known
        rows = self._read(
            "SELECT reason, checksum FROM op_failures "
            "WHERE call=? AND device=? AND torch_version=? AND num_threads=?",
            (call_to_text(call), *self._owner),
        )
        for reason, checksum in rows:
            if checksum == _checksum((*self._key(call), reason)):
                return str(reason)
            self._say("a reason why a call has no time is damaged and left out")
        return None

    def put_failure(self, call: OpCall, reason: str, *, for_now: bool = False) -> None:
        """Keeps why ``call`` cannot be measured, so that no later run tries it again.

        ``for_now``: nor does anybody who has this store open, but later runs do.
        """
        checksum = _checksum((*self._key(call), reason))
        written = not for_now and self._write(
            "INSERT OR REPLACE INTO op_failures VALUES (?,?,?,?,?,?)",
            (call_to_text(call), *self._owner, reason, checksum),
        )
        if not written:
            self._unwritten_failures[call] = reason

    def of_op(self, target: str) -> Iterator[tuple[OpCall, OpTime]]:
        """Every measured call of one operation on this device."""
        return (pair for pair in self._calls("AND op=?", (target,)) if pair[0].target == target)

    def everything(self) -> Iterator[tuple[OpCall, OpTime]]:
        """Every measured call on this device."""
        return self._calls("", ())

    def _calls(self, condition: str, values: tuple[object, ...]) -> Iterator[tuple[OpCall, OpTime]]:
        rows = self._read(
            f"SELECT call, {_OP_VALUES} FROM op_times "
            f"WHERE device=? AND torch_version=? AND num_threads=? {condition}",
            (*self._owner, *values),
        )
        for text, *numbers in rows:
            try:
                call = call_from_text(text)
            except CostError as error:
                self._say(f"a row that cannot be read is left out: {error}")
                continue
            if call in self._unwritten:
                continue
            times = self._op_time(call, tuple(numbers))
            if times is not None:
                yield call, times
        yield from self._unwritten.items()

    def put_collective(self, kind: str, shape: str, backend: str, times: CollectiveTime) -> None:
        """Keeps the time of one collective of one size on groups of one shape."""
        if not times.is_sane():
            raise CostError(f"{times} cannot be the time of {kind}.")
        numbers = (float(times.time_s), float(times.spread), times.num_samples)
        row = (kind, shape, times.size_bytes, *self._owner, backend, *numbers)
        written = self._write(
            "INSERT OR REPLACE INTO collective_times VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            (*row, _checksum(row)),
        )
        if not written:
            unwritten = self._unwritten_collectives.setdefault((kind, shape, backend), {})
            unwritten[times.size_bytes] = times

    def collectives(self, backend: str) -> dict[tuple[str, str], tuple[CollectiveTime, ...]]:
        """Measured times by kind and group shape, in order of size."""
        rows = self._read(
            "SELECT kind, group_shape, size_bytes, time_s, spread, num_samples, checksum "
            "FROM collective_times WHERE device=? AND torch_version=? AND num_threads=? "
            "AND backend=?",
            (*self._owner, backend),
        )
        found: dict[tuple[str, str], dict[int, CollectiveTime]] = {}
        for kind, shape, size_bytes, *values, checksum in rows:
            row = (kind, shape, size_bytes, *self._owner, backend, *values)
            time_s, spread, num_samples = values
            times = CollectiveTime(
                size_bytes=size_bytes, time_s=time_s, spread=spread, num_samples=num_samples
            )
            if checksum == _checksum(row) and times.is_sane():
                found.setdefault((kind, shape), {})[size_bytes] = times
            else:
                self._say(f"a time of {kind} that is damaged or cannot be one is left out")
        for (kind, shape, of_backend), unwritten in self._unwritten_collectives.items():
            if of_backend == backend:
                found.setdefault((kind, shape), {}).update(unwritten)
        return {
            key: tuple(of_size[size] for size in sorted(of_size))
            for key, of_size in sorted(found.items())
        }

    def _key(self, call: OpCall) -> Row:
        return (call.target, call_to_text(call), *self._owner)

    def _op_time(self, call: OpCall, row: Row) -> OpTime | None:
        *numbers, checksum = row
        forward_s, input_grad_s, weight_grad_s, spread, num_samples = numbers
        times = OpTime(
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            spread=spread,
            num_samples=num_samples,
        )
        if checksum == _checksum((*self._key(call), *numbers)) and times.is_sane():
            return times
        self._say("a row of numbers that are damaged or cannot be times is left out")
        return None

    def _say(self, what: str) -> None:
        """Once for each store: a damaged table has many rows."""
        if what in self._said:
            return
        self._said.add(what)
        warnings.warn(f"profile store {self.path}: {what}", StoreWarning, stacklevel=4)

    def _read(self, query: str, values: tuple[object, ...]) -> list[Row]:
        self._reopen_after_fork()
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            self._give_up(error)
            return []

    def _write(self, query: str, values: tuple[object, ...]) -> bool:
        self._reopen_after_fork()
        if self._read_only:
            return False
        self._reopen_after_deletion()
        try:
            self._connection.execute(query, values)
        except sqlite3.OperationalError as error:
            self._say(f"it cannot be written, new times are kept in memory: {error}")
            self._read_only = True
            return False
        except sqlite3.DatabaseError as error:
            self._give_up(error)
            self._connection.execute(query, values)
        return True

    def _give_up(self, error: sqlite3.DatabaseError) -> None:
        """Goes on in memory after the file broke while in use; the next process rebuilds it."""
        self._say(f"it broke while in use, times are kept in memory: {error}")
        self._connection.close()
        self._connection, self._inode = _in_memory(), None

    def _reopen_after_fork(self) -> None:
        if self._pid != os.getpid():
            # SQLite forbids a connection in the child; the parent's handle is left to the parent.
            self._pid = os.getpid()
            self._connection = self._open()

    def _reopen_after_deletion(self) -> None:
        """What is written to a file without a name is lost."""
        if self.path is None or self._inode is None or self._inode == _inode(self.path):
            return
        self._say("it was deleted or replaced while open; new times go to the one at its path")
        self._connection.close()
        if not self.path.exists():
            _remove_logs(self.path)
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        self._inode = None
        if self.path is None:
            return _in_memory()
        try:
            if self.path.exists() and not self.path.is_file():
                raise _NotUsable("it is no regular file")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._open_file(self.path)
            self._inode = _inode(self.path)
            return connection
        except _NotUsable as reason:
            self._say(f"{reason}; times are kept in memory")
        except (OSError, ValueError, sqlite3.OperationalError) as error:
            opened = _open_for_reading(self.path)
            if opened is not None:
                self._say(f"it cannot be written, new times are kept in memory: {error}")
                self._read_only = True
                return opened
            self._say(f"it cannot be opened, times are kept in memory: {error}")
        return _in_memory()

    def _open_file(self, path: Path) -> sqlite3.Connection:
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        num_rebuilt = 0
        while num_rebuilt < 3:
            inode = _inode(path)
            connection = _connect(path)
            try:
                problem = _prepare(connection)
            except sqlite3.OperationalError as error:
                connection.close()
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                # Changing to WAL does not wait for other processes that do the same.
                time.sleep(0.02)
                continue
            except sqlite3.DatabaseError as error:
                problem = f"it is damaged ({error})"
            except _NotUsable:
                connection.close()
                raise
            if problem is None:
                return connection
            connection.close()
            num_rebuilt += 1
            if inode is not None and _inode(path) == inode:
                aside = _set_aside(path)
                self._say(f"{problem}; it is now {aside.name} and a new one is begun")
        raise _NotUsable("it is damaged again and again")


def default_store_path() -> Path:
    """Where times are kept unless a path is given."""
    from autopar.cost_models.detect import cache_folder

    return cache_folder() / "profile.sqlite3"


def _products(device: DeviceSpec) -> str:
    """What of a CUDA device's settings changes the time of a product, as part of its name."""
    if device.kind != "cuda":
        return ""
    allowed = {
        "products": device.allow_tensor_float32,
        "convolutions": device.allow_tensor_float32_in_cudnn,
    }
    names = [name for name, is_allowed in allowed.items() if is_allowed]
    return f", TF32 in {' and '.join(names)}" if names else ""


def _connect(database: str | Path, *, uri: bool = False) -> sqlite3.Connection:
    """Text that is not UTF-8 is read with replacements: no call has such a text."""
    connection = sqlite3.connect(
        database, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    return connection


def _in_memory() -> sqlite3.Connection:
    connection = _connect(":memory:")
    connection.executescript(_SCHEMA)
    return connection


def _prepare(connection: sqlite3.Connection) -> str | None:
    """Checks a file or lays it out; says what is wrong with one that must be rebuilt."""
    if _identity(connection) == (0, 0):
        # New, or being laid out by another process at this moment: the lock decides. A failure
        # closes the connection, which rolls the whole layout back.
        connection.execute("BEGIN IMMEDIATE")
        if _identity(connection) == (0, 0) and not _table_names(connection):
            for statement in _SCHEMA.split(";")[:-1]:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    application, version = _identity(connection)
    if application != _APPLICATION_ID:
        raise _NotUsable("it is another program's database")
    if version > SCHEMA_VERSION:
        raise _NotUsable(f"its layout {version} is newer than {SCHEMA_VERSION}")
    if version < SCHEMA_VERSION:
        return f"its layout {version} is older than {SCHEMA_VERSION}"
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        return f"it is damaged ({verdict})"
    with contextlib.closing(_in_memory()) as fresh:
        if any(_columns(fresh, t) != _columns(connection, t) for t in _table_names(fresh)):
            return "it is damaged (tables or columns are missing)"
    connection.execute("PRAGMA journal_mode=WAL")
    # A crash of the machine may lose the last times; a crash of the process may not.
    connection.execute("PRAGMA synchronous=NORMAL")
    return None


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    return application, version


def _table_names(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
    return {name for (name,) in rows}


def _columns(connection: sqlite3.Connection, table: str) -> list[tuple[str, str]]:
    """Names and types, in order; none where there is no such table."""
    rows = connection.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
    return [(name, kind) for name, kind in rows]


def _inode(path: Path) -> int | None:
    """Which file is at ``path``; None where there is none, or none that may be seen."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _remove_logs(path: Path) -> None:
    """SQLite's files beside one that is to be begun anew."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    _remove_logs(path)
    if path.exists():
        path.replace(aside)
    return aside


def _open_for_reading(path: Path) -> sqlite3.Connection | None:
    """A usable file that cannot be written: read as it is, or None."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        try:
            connection = _connect(f"{path.absolute().as_uri()}?{mode}", uri=True)
        except sqlite3.OperationalError:  # it is not there, or may not be read
            continue
        try:
            if _identity(connection) == (_APPLICATION_ID, SCHEMA_VERSION):
                connection.execute("SELECT count(*) FROM op_times").fetchone()
                return connection
        except sqlite3.DatabaseError:
            pass
        connection.close()
    return None
