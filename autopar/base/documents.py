"""JSON documents from outside, read within bounds and refused with the place of what is wrong.

In: text, bytes or a path that anybody may have written. Out: plain values or a msgspec struct of
them, or a `DocumentError`, which the reader of each kind of document raises as its own class.
Nothing of a document is run, and the bounds hold before memory is taken or time is spent.
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
"""No document is larger: a plan for thousands of devices has less than a tenth of it."""
MAX_VALUES = 1_000_000
MAX_DEPTH = 32
MAX_WHOLE = 2**1000
MAX_WHY = 400

T = TypeVar("T")

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What no terminal should be sent, and what no UTF-8 can hold; tabs and line breaks are text."""
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w{0,79}", re.ASCII)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


class DocumentError(AutoparError, ValueError):
    """A document is refused; ``place`` is a JSON path in it, empty where it is the whole."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"at {place}: {why}" if place else why)
        self.why = why
        self.place = place


def shown(value: object) -> str:
    """A value in a message, however large it is."""
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
    """The text of a document: itself, UTF-8 bytes of it, or what the file at a path holds.

    A string with a line break, or that starts with ``{``, is text. A byte order mark is passed
    over. Raises DocumentError, also for what is no regular file: reading a pipe may never end.
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
            f"pass JSON text, bytes of it, or the path of its file, not {shown(source)} of type "
            f"{type(source).__name__}"
        )
    if len(data) > MAX_BYTES:
        raise _too_large(len(data))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"byte {error.start} is no UTF-8; save it as UTF-8 text") from error


def _too_large(size: int) -> DocumentError:
    return DocumentError(f"it has {size:,} bytes; no such document has more than {MAX_BYTES:,}")


def _content(path: str | Path) -> bytes:
    """At most one byte more than is allowed of a regular file."""
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
        raise DocumentError(f"no file can be read at {what}: {why}") from error
    raise DocumentError(f"no file can be read at {what}: it is no regular file")


def load(text: str) -> Any:
    """The values of a JSON text; DocumentError for anything that is not plainly one value.

    Keys given twice, numbers that no float holds, control characters and lone
    surrogates are refused, as are sizes and nesting that no document of ours has.
    """
    if sum(map(text.count, "[{,")) > MAX_VALUES:
        raise DocumentError(f"it has more than {MAX_VALUES:,} values; no such document has")
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
    if repeated:  # inside a value that was itself given twice, and lost
        raise DocumentError(repeated[0].why)
    return document


_TOO_DEEP = "it is nested too deeply; no such document is"


class _Repeated(dict[str, Any]):
    """An object in which a key is given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = Counter(key for key, _ in pairs)
        self.why = f"key {shown(keys.most_common(1)[0][0])} is given twice; leave one out"


def _no_number(word: str) -> NoReturn:
    raise DocumentError(f"it is not JSON: {word} is no number there; write a finite one")


def _check(value: Any, keys: tuple[str | int, ...]) -> None:
    """Raise DocumentError for the first value that is refused by itself."""
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
    """Whether text has no control characters (but tabs and line breaks) and no lone surrogates."""
    return value.isprintable() or _CONTROL.search(value) is None


def _why_not(value: Any) -> str | None:
    if isinstance(value, str):
        if not is_text(value):
            return f"{shown(value)} has a control character or a lone surrogate in it; leave it out"
    elif isinstance(value, _Repeated):
        return value.why
    elif isinstance(value, float) and not math.isfinite(value):
        return "the number is not finite"
    elif isinstance(value, int) and abs(value) >= MAX_WHOLE:
        return f"{shown(value)} is too large for any number"
    return None


def convert(document: Any, kind: type[T]) -> T:
    """``document`` as a struct; DocumentError with the place of what does not fit its types."""
    try:
        return msgspec.convert(document, kind)
    except (ValueError, OverflowError, RecursionError) as error:
        why, at, path = str(error).removesuffix("`").rpartition(" - at `$")
        if not at:
            why, path = str(error), ""
        raise DocumentError(why[:MAX_WHY], _named(document, kind, path)) from error


def _named(document: Any, kind: Any, path: str) -> str:
    """msgspec's path, with the key that it writes as ``[...]``: the first whose value is wrong."""
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
