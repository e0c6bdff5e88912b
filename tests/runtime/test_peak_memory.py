"""The peak that a process reports follows what it allocates."""

from __future__ import annotations

import sys

import pytest
import torch

from autopar.runtime.peak_memory import PeakMemory

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
