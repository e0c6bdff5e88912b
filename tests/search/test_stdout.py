"""What a solver writes to standard output goes to standard error, and only while it runs."""

from __future__ import annotations

import os
import threading

import pytest

from autopar.search.mathopt import STDOUT


def test_standard_output_is_back_when_the_last_thread_has_left(
    capfd: pytest.CaptureFixture[str],
) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with STDOUT.on_stderr():
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=other)
    with STDOUT.on_stderr():
        thread.start()
        assert inside.wait(30)
        os.write(1, b"both\n")
    os.write(1, b"one\n")
    leave.set()
    thread.join()
    os.write(1, b"none\n")
    found = capfd.readouterr()
    assert found.err == "both\none\n"
    assert found.out == "none\n"
