"""One rank in this process, without a worker: a model compiled for one device, a CPU.

In: the calls of `autopar.runtime.runners.local.LocalRunner`, as a group of workers takes them. Out:
the results of the same service. A worker costs a process that imports torch, and a message there
and back in every step; and there is nothing that it could compute beside this process.

What this process has set stays as it is, and what the caller passes or gets is its own: random
numbers are drawn from seeds, after which torch's generator is as before. The number of threads and
the treatment of denormal numbers are those of this process, as in eager PyTorch. An error leaves
with its own traceback, and the model stays open, as after an error under ``torchrun``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from autopar.base.accelerators import cpu_by_default
from autopar.base.closing import closed_error
from autopar.base.errors import WorkerError
from autopar.runtime.faults import progress
from autopar.runtime.host.heap import give_back_freed_memory, keep_freed_memory
from autopar.runtime.runners.rank_service import RankService


class OwnProcess:
    """The methods of `autopar.runtime.workers.group.WorkerGroup` that a runner calls.

    ``dtype`` is torch's default where the model was compiled, which some operators compute in.
    Calls from several threads take turns. Steps have no time limit, as nobody else is waited for:
    ``call_timeout_s`` limits files that are written in the background.
    """

    def __init__(self, dtype: torch.dtype, *, call_timeout_s: float) -> None:
        keep_freed_memory()
        progress.publish_here()
        self.call_timeout_s = call_timeout_s
        self._dtype = dtype
        self._service: RankService | None = RankService(0, 1, is_guest=True)
        self._lock = threading.RLock()
        self._owner_pid = os.getpid()

    @property
    def closed(self) -> bool:
        return self._service is None

    def call(self, method: str, *args: Any, **_limits: float) -> list[Any]:
        """Run a method of the service; its result, in a list of one."""
        with self._lock:
            self.check_open(f"{method}()")
            with _as_compiled(self._dtype):
                return [getattr(self._service, method)(*args)]

    def check_open(self, what: str) -> None:
        """Raise WorkerError, for a call of ``what``, where it is closed or of another process."""
        if self.closed:
            raise closed_error("close() was called")
        if os.getpid() != self._owner_pid:
            raise WorkerError(
                f"cannot call {what} in process {os.getpid()}: the model was compiled in process "
                f"{self._owner_pid}, which this one was forked from; call it there"
            )

    def close(self) -> None:
        """Free what the rank holds."""
        with self._lock:
            if not self.closed:
                self._service = None
                give_back_freed_memory()


@contextlib.contextmanager
def _as_compiled(dtype: torch.dtype) -> Iterator[None]:
    """Within: torch's defaults as where the model was compiled, and tensors that may be changed
    later, whatever the caller's are."""
    before = torch.get_default_dtype()
    with cpu_by_default(), torch.inference_mode(False):
        if before is dtype:
            yield
            return
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
