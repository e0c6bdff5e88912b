"""The peaks that a process reports follow its allocations."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.runtime.host.peak_memory import PeakMemory, PeakTensors

SIZE_BYTES = 64 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell only the lifetime's peak")
def test_growth_is_what_was_allocated_and_stays_after_it_is_freed():
    peak = PeakMemory(torch.device("cpu"))
    assert peak.growth_bytes() < SIZE_BYTES / 4
    block = torch.ones(SIZE_BYTES // 4)
    grown = peak.growth_bytes()
    assert SIZE_BYTES * 0.9 < grown < SIZE_BYTES * 1.3
    del block
    assert peak.growth_bytes() >= grown * 0.99


def test_tensors_count_while_they_are_held_and_no_longer():
    gc.collect()  # garbage of other tests would go in the midst
    before = torch.ones(1 << 20)  # 4 MiB, held throughout
    view = before[:10]
    peak = PeakTensors(torch.device("cpu"))
    peak.start()
    base = peak.stop()  # what else this process holds
    given_up = torch.ones(3 << 20)
    peak.start()
    del given_up  # from before the count, and gone at its end: never counted
    first = torch.ones(2 << 20)
    del first
    second = torch.ones(1 << 20) + view[0]  # two of 4 MiB for a moment, each
    found = peak.stop()
    assert found - base == 8 << 20
    del second
    peak.start()
    assert peak.stop() == base


def test_tensors_that_only_describe_others_hold_nothing():
    peak = PeakTensors(torch.device("cpu"))
    peak.start()
    base = peak.stop()
    described = [
        _fake(1 << 20),
        torch._to_functional_tensor(torch.ones(0)),
        torch.ones(1 << 20, device="meta"),
        torch.eye(3).to_sparse(),
    ]
    peak.start()
    assert peak.stop() - base < 1 << 10
    del described


def _fake(num_elements: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(num_elements)


def test_counting_tensors_prints_nothing_unless_asked_to():
    code = (
        "import os, torch\n"
        "from autopar.runtime.host.peak_memory import PeakTensors\n"
        "before = dict(os.environ)\n"
        "peak = PeakTensors(torch.device('cpu'))\n"
        "peak.start()\n"
        "assert peak.stop() >= 0\n"
        "assert dict(os.environ) == before\n"
    )
    lines = {}
    for level in (None, "5"):
        given = {**os.environ} | ({} if level is None else {"KINETO_LOG_LEVEL": level})
        run = subprocess.run(
            [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=120,
            check=True,
        )  # fmt: skip
        lines[level] = [line for line in run.stderr.splitlines() if "profiler_st" in line]
    assert lines[None] == []
    if torch.__version__.startswith("2.13"):
        assert lines["5"]
