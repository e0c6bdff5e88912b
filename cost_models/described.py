"""Checks of described hardware: every field is what JSON can hold and give back.

msgspec checks types where JSON is read; these hold for descriptions that are made in Python too.
"""

import math
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from autopar.base.documents import is_text, shown
from autopar.base.errors import ClusterError


def whole_numbers(given: Any, kind: Any, where: str) -> Any:
    """``given`` with whole numbers for those that JSON writes as ``80e9``.

    ClusterError for a word that is none of those allowed; msgspec's message does not name them.
    """
    if isinstance(given, dict) and _is_struct(kind):
        kinds = _fields(kind)
        return {
            name: whole_numbers(value, kinds.get(name), f"{where}.{name}")
            for name, value in given.items()
        }
    if isinstance(given, list) and get_origin(kind) is tuple:
        return [
            whole_numbers(item, get_args(kind)[0], f"{where}[{index}]")
            for index, item in enumerate(given)
        ]
    if kind is int and isinstance(given, float) and given.is_integer():
        return int(given)
    if get_origin(kind) is Literal and given not in get_args(kind):
        raise ClusterError(f"{where} is {shown(given)}; {_rule(kind, where, given)}")
    return given


@lru_cache(maxsize=8)
def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a description's fields, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def require_types(owner: str, described: msgspec.Struct) -> None:
    """ClusterError for a field that JSON could not hold, or not give back as it was."""
    for field, kind in _fields(type(described)).items():
        value = getattr(described, field)
        if get_origin(kind) is tuple and not isinstance(value, tuple):
            raise ClusterError(
                f"{field} is a {type(value).__name__}; a cluster can be a key, so it is a "
                f"tuple. Write {field}=(Level(...),)."
            )
        if not _is_of(kind, value):
            rule = _rule(kind, field, value)
            raise ClusterError(f"{owner} has {field}={shown(value)}; {rule}")


def _is_of(kind: Any, value: object) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(get_args(kind)[0], v) for v in value)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is int:
        return type(value) is int and abs(value) < 2**63
    if kind is float:
        return type(value) in (int, float)
    if kind is str:
        return isinstance(value, str) and is_text(value)
    return isinstance(value, kind)


def _rule(kind: Any, field: str, value: object) -> str:
    """What a field of this kind must be, and how it is written."""
    if get_origin(kind) is tuple:
        return f"all are of type Level. Write {field}=(Level(...),)."
    if get_origin(kind) is Literal:
        allowed = [repr(word) for word in get_args(kind)]
        return f"it must be {' or '.join(allowed)}. Write {field.split('.')[-1]}={allowed[0]}, say."
    if kind is int:
        example = 80 * 10**9 if field.endswith("_bytes") else 8
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
            example = int(value)
        return f"it must be a whole number (an int) below 2**63. Write {field}={example}."
    if kind is float:
        return f"it must be a number, an int or a float. Write {field}=1.0, say."
    if kind is str:
        return (
            "it must be text, without control characters or lone surrogates. Write "
            f"{field}='mine', say."
        )
    return f"it must be a {kind.__name__}. Write {field}={kind.__name__}(...)."


def require_counts(owner: str, values: dict[str, int]) -> None:
    for field, value in values.items():
        if value < 1:
            raise ClusterError(
                f"{owner} has {field}={value!r}; it is a count, a whole number of at least 1."
            )


def require_positive(owner: str, values: dict[str, float]) -> None:
    for field, value in values.items():
        if not (is_finite(value) and value > 0):
            raise ClusterError(
                f"{owner} has {field}={shown(value)}; it must be positive and finite."
            )


def require_not_negative(owner: str, values: dict[str, float]) -> None:
    for field, value in values.items():
        if not (is_finite(value) and value >= 0):
            raise ClusterError(
                f"{owner} has {field}={shown(value)}; it must be finite and at least 0."
            )


def is_finite(value: float) -> bool:
    """Also of whole numbers that no float is as large as."""
    return abs(value) < math.inf if isinstance(value, float) else abs(value) < 2**1000
