"""Processes to fork from: with the imports that their children would each repeat."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable


def import_what_it_imports(function: Callable[[], object]) -> None:
    """Import in this process the modules that a call of ``function`` imports.

    The call is made in a fork: a process that has computed may have threads, which forks lose.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            before = set(sys.modules)
            function()
            with os.fdopen(writing, "w") as pipe:
                pipe.write("\n".join(name for name in sys.modules if name not in before))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = pipe.read().split("\n")
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the function has raised"
    for name in names:
        with contextlib.suppress(ImportError):  # objects in place of modules, such as torch.ops
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork writes into no page that it shares
