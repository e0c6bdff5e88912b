"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from autopar.base.errors import KeywordError

F = TypeVar("F", bound=Callable[..., Any])

MAX_LENGTH = 200


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'zero3'?"`` if a known name is similar, else an empty string.

    Case is ignored and dashes count as underscores; a name too long to be typed is not compared.
    """
    found = closest(name, known)
    return "" if found is None else f"; did you mean {str(found)!r}?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar, compared as by `did_you_mean`; None if none is.

    A known name that starts with the given one comes first: ``h100-sxm`` for ``h100``.
    """
    if not 0 < len(name) <= MAX_LENGTH:
        return None
    plain = {_plain(each): each for each in known}
    longer = [each for each in plain if len(name) > 1 and each.startswith(_plain(name))]
    if longer:
        return plain[min(longer, key=len)]
    found = difflib.get_close_matches(_plain(name), plain, n=1)
    return plain[found[0]] if found else None


def refusing_unknown_keywords(function: F) -> F:
    """The function, which raises KeywordError for a keyword that it does not take."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise KeywordError(
                    f"autopar.{function.__name__} takes no {name}="
                    + (did_you_mean(name, known) or f"; it takes {', '.join(known)}")
                )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
