"""Load from other programs is detected during a measurement."""

import os
import subprocess
import sys
import time

import pytest

from autopar.cost_models.others import watched


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) != os.cpu_count(),
    reason="only Linux tells, of processors that this process may use",
)
def test_another_programs_work_is_seen():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with watched(time.process_time) as others:
            time.sleep(1.0)
    finally:
        busy.kill()
        busy.wait(10)
    # It had a processor for most of the second, unless others had it: these are seen as well.
    assert others.share > 0.5 / os.cpu_count()
