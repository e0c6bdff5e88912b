"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LENGTH = 200


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'zero3'?"`` if a known name is similar, else an empty string.

    Case is ignored and dashes count as underscores; a name too long to be typed is not compared.
    """
    if len(name) > MAX_LENGTH:
        return ""
    plain = {_plain(each): each for each in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1)
    return "".join(f"; did you mean {str(plain[each])!r}?" for each in found)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
