"""SIGTERM, which a launcher sends to all ranks as soon as one has ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


def handle_termination(handler: Handler) -> bool:
    """Handle SIGTERM unless the script does, or this is no main thread; whether it is handled."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, handler)
    return True


def end_by_sigterm() -> None:
    """End this process as SIGTERM does without a handler."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
