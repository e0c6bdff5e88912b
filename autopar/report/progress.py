"""Progress on a terminal: one line with the elapsed time and the current step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


@contextmanager
def show_progress(enabled: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows a message behind the seconds elapsed; silent unless ``enabled`` and on
    rank 0.

    Without a terminal, or with NO_COLOR set, each message is printed as a plain line.
    """
    if not enabled or os.environ.get("RANK", "0") != "0":
        yield lambda _: None
        return
    console, started_s = Console(stderr=True), time.perf_counter()

    def timed(message: str) -> str:
        return f"{time.perf_counter() - started_s:6.1f} s  {message}"

    if not console.is_terminal or console.no_color:
        yield lambda message: console.print(
            timed(message), highlight=False, markup=False, soft_wrap=True
        )
        return
    with console.status("start") as status:
        yield lambda message: status.update(escape(timed(message)))
