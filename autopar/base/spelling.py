"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
