"""Untrusted JSON documents, read within fixed limits; an error gives the path of the bad value.

In: text, bytes or a path, from anyone. Out: plain values or a msgspec struct; or a `DocumentError`,
which the reader of each kind of document re-raises as its own class. Nothing in a document is
executed, and the limits are checked before memory or time is spent on it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import msgspec

from autopar.base.errors import AutoparError

MAX_BYTES = 32 << 20
"""Size limit of a document; a plan for thousands of devices needs less than a tenth of it."""
MAX_VALUES = 1_000_000
MAX_DEPTH = 32
MAX_WHOLE = 2**1000
MAX_WHY = 400

T = TypeVar("T")

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters unsafe on a terminal or not encodable in UTF-8; tabs and line breaks are allowed."""
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w{0,79}", re.ASCII)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


class DocumentError(AutoparError, ValueError):
    """A document was refused; ``place`` is the JSON path of the bad value, empty for the whole."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"at {place}: {why}" if place else why)
        self.why = why
        self.place = place


def shown(value: object) -> str:
    """A value as an error message shows it, shortened if it is long."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def path_of(keys: Iterable[str | int]) -> str:
    """The JSON path of a value: ``$.ops["a b"]``, ``$.schedule.actions[3]``."""
    return "$" + "".join(map(_step, keys))


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    if _PLAIN_KEY.fullmatch(key):
        return f".{key}"
    return f"[{json.dumps(key if len(key) <= 80 else key[:77] + '...')}]"


def text_of(source: object) -> str:
    """The text of a document given as text, as UTF-8 bytes, or as the path of a file.

    A string that has a line break or starts with ``{`` is text, not a path. A byte order mark is
    skipped. Raises DocumentError, also for anything but a regular file, as reading a pipe may never
    end.
    """
    if isinstance(source, str) and ("\n" in source or source.lstrip("\ufeff \t\r")[:1] == "{"):
        if len(source) > MAX_BYTES:
            raise _too_large(len(source))
        return source.removeprefix("\ufeff")
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str | Path):
        data = _content(source)
    else:
        raise DocumentError(
            f"pass JSON text, its UTF-8 bytes, or the path of a JSON file, not {shown(source)} of "
            f"type {type(source).__name__}"
        )
    if len(data) > MAX_BYTES:
        raise _too_large(len(data))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"byte {error.start} is not valid UTF-8; save it as UTF-8 text"
        ) from error


def _too_large(size: int) -> DocumentError:
    return DocumentError(f"it has {size:,} bytes; the limit is {MAX_BYTES:,}")


def _content(path: str | Path) -> bytes:
    """The content of a regular file, read no further than one byte past the limit."""
    what = shown(str(path))
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if status.st_size > MAX_BYTES:
                    raise _too_large(status.st_size)
                if stat.S_ISREG(status.st_mode):
                    return file.read(MAX_BYTES + 1) or b""
    except DocumentError:
        raise
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DocumentError(f"cannot read {what}: {why}") from error
    raise DocumentError(f"cannot read {what}: not a regular file")


def load(text: str) -> Any:
    """Parse strict JSON text; raises DocumentError.

    Duplicate keys, numbers outside the range of a float, control characters, lone surrogates, and
    documents that exceed the limits on size and nesting are refused.
    """
    if sum(map(text.count, "[{,")) > MAX_VALUES:
        raise DocumentError(f"it has more than {MAX_VALUES:,} values, which is the limit")
    repeated: list[_Repeated] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            found = _Repeated(pairs)
            repeated.append(found)
        return found

    try:
        document = json.loads(text, object_pairs_hook=unique, parse_constant=_no_number)
    except RecursionError:
        raise DocumentError(_TOO_DEEP) from None
    except DocumentError:
        raise
    except ValueError as error:
        raise DocumentError(f"it is not JSON: {error}") from error
    _check(document, ())
    if repeated:  # nested in the value of a duplicate key, so dropped by the parser
        raise DocumentError(repeated[0].why)
    return document


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep, which is the limit"


class _Repeated(dict[str, Any]):
    """An object with a duplicate key."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = Counter(key for key, _ in pairs)
        self.why = f"key {shown(keys.most_common(1)[0][0])} is given twice; remove one"


def _no_number(word: str) -> NoReturn:
    raise DocumentError(f"it is not JSON, which has no number {word}; write a finite one")


def _check(value: Any, keys: tuple[str | int, ...]) -> None:
    """Raise DocumentError for the first value that is refused, depth first."""
    why = _TOO_DEEP if len(keys) > MAX_DEPTH else _why_not(value)
    if why is not None:
        raise DocumentError(why, path_of(keys))
    if isinstance(value, dict):
        for key, item in value.items():
            why = _why_not(key)
            if why is not None:
                raise DocumentError(f"key {why}", path_of(keys))
            _check(item, (*keys, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _check(item, (*keys, position))


def is_text(value: str) -> bool:
    """Whether text has no lone surrogates, and no control characters but tabs and line breaks."""
    return value.isprintable() or _CONTROL.search(value) is None


def _why_not(value: Any) -> str | None:
    if isinstance(value, str):
        if not is_text(value):
            return f"{shown(value)} contains a control character or a lone surrogate; remove it"
    elif isinstance(value, _Repeated):
        return value.why
    elif isinstance(value, float) and not math.isfinite(value):
        return "the number is not finite"
    elif isinstance(value, int) and abs(value) >= MAX_WHOLE:
        return f"{shown(value)} is too large"
    return None


def convert(document: Any, kind: type[T]) -> T:
    """``document`` as a struct; raises DocumentError with the path of a value of the wrong type."""
    try:
        return msgspec.convert(document, kind)
    except (ValueError, OverflowError, RecursionError) as error:
        why, at, path = str(error).removesuffix("`").rpartition(" - at `$")
        if not at:
            why, path = str(error), ""
        raise DocumentError(why[:MAX_WHY], _named(document, kind, path)) from error


def _named(document: Any, kind: Any, path: str) -> str:
    """msgspec's path, with each ``[...]`` replaced by the first key whose value does not fit."""
    keys: list[str | int] = []
    for field, index in _STEP.findall(path):
        if field and _is_struct(kind) and isinstance(document, dict) and field in document:
            kind = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}.get(field)
            keys.append(field)
        elif index == "..." and get_origin(kind) is dict and isinstance(document, dict):
            kind = get_args(kind)[1]
            wrong = next((key for key, value in document.items() if not _fits(value, kind)), None)
            if wrong is None:
                break
            keys.append(wrong)
        elif index.isdecimal() and get_origin(kind) is tuple and isinstance(document, list):
            kind = get_args(kind)[0]
            keys.append(min(int(index), len(document) - 1))
        else:
            break
        document = document[keys[-1]]
    return path_of(keys)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (ValueError, OverflowError):
        return False
    return True
