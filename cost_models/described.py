"""Validation of hardware descriptions: every field must survive a JSON round trip.

msgspec checks types when it reads JSON; these checks also apply to descriptions made in Python.
"""

import math
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from autopar.base.documents import is_text, shown
from autopar.base.errors import ClusterError


def whole_numbers(given: Any, kind: Any, where: str) -> Any:
    """``given`` with floats such as ``80e9`` converted to ints where an int is expected.

    Raises ClusterError for a string that is not among those allowed; msgspec's message does not
    list them.
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
    """Raise ClusterError for a field that would not survive a JSON round trip."""
    for field, kind in _fields(type(described)).items():
        value = getattr(described, field)
        if get_origin(kind) is tuple and not isinstance(value, tuple):
            raise ClusterError(
                f"{field} is a {type(value).__name__}; a cluster must be hashable, so it must be "
                f"a tuple. Write {field}=({get_args(kind)[0].__name__}(...),)."
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
    """The rule for a field of this type, with an example."""
    if get_origin(kind) is tuple:
        name = get_args(kind)[0].__name__
        return f"all elements must be of type {name}. Write {field}=({name}(...),)."
    if get_origin(kind) is Literal:
        allowed = [repr(word) for word in get_args(kind)]
        name = field.split(".")[-1]
        return f"it must be {' or '.join(allowed)}. For example, write {name}={allowed[0]}."
    if kind is int:
        example = 80 * 10**9 if field.endswith("_bytes") else 8
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
            example = int(value)
        return f"it must be a whole number (an int) below 2**63. Write {field}={example}."
    if kind is float:
        return f"it must be an int or a float. For example, write {field}=1.0."
    if kind is str:
        return (
            "it must be a string without control characters or lone surrogates. For example, "
            f"write {field}='mine'."
        )
    return f"it must be a {kind.__name__}. Write {field}={kind.__name__}(...)."


def require_counts(owner: str, values: dict[str, int]) -> None:
    for field, value in values.items():
        if value < 1:
            raise ClusterError(
                f"{owner} has {field}={value!r}; it must be a whole number of at least 1."
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
    """Whether a number is finite, also for ints that are too large for a float."""
    return abs(value) < math.inf if isinstance(value, float) else abs(value) < 2**1000
