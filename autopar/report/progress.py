"""Progress on a terminal: one line with the current step and its duration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def show_progress(enabled: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows a message; silent unless ``enabled`` and on rank 0.

    Without a terminal, or with NO_COLOR set, each message is printed as a plain line.
    """
    if not enabled or os.environ.get("RANK", "0") != "0":
        yield lambda _: None
        return
    console = Console(stderr=True)
    if not console.is_terminal or console.no_color:
        yield lambda message: console.print(message, highlight=False)
        return
    with console.status("start") as status:
        yield lambda message: status.update(message)
