"""The entry point of the command line.

Reports go to standard output, progress and errors to standard error. It exits with 0, with 1 for an
error that it explains, and with 2 for a wrong command line. Nothing is colored. Only commands that
search or train import torch.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence

from autopar.base.errors import AutoparError
from autopar.cli.commands import plan_file
from autopar.cli.parser import made_parser
from autopar.cli.wording import in_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    if arguments is None:  # a process of its own, which ends before a collection would pay
        gc.disable()
    atexit.register(gc.freeze)
    chosen = made_parser().parse_args(arguments)
    try:
        chosen.run(chosen)
    except BrokenPipeError:  # the reader of standard output has left, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AutoparError, OSError) as error:
        text = in_commands(str(error), vars(chosen), plan_file(chosen))
        print(f"autopar: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 1
    return 0
