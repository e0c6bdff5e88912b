"""The heap of a process that trains: kept between steps, and given back when asked to."""

import subprocess
import sys

import pytest

from autopar.runtime.heap import with_huge_pages

SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from autopar.runtime.heap import give_back_freed_memory, keep_freed_memory

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20

keep_freed_memory()
start = resident_mib()
tensors = [torch.ones(8 << 20) for _ in range(8)]
full = resident_mib()
del tensors
kept = resident_mib()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
again = [torch.ones(8 << 20) for _ in range(8)]
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
del again
give_back_freed_memory()
print(full - start, kept - start, resident_mib() - start, faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is Linux's")
def test_freed_memory_is_kept_for_the_next_step_and_given_back_when_asked_to() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    full, kept, given_back, faults = map(int, run.stdout.split())
    assert full >= 250  # 8 tensors of 32 MiB
    assert kept >= full - 8
    assert given_back <= 48
    assert faults < 16384  # of 65,536 pages; alignment takes some new ones


CREEPING = """
import torch
from autopar.runtime.heap import FreedMemory, keep_freed_memory, resident_bytes

keep_freed_memory()
freed = FreedMemory()

def after(num_tensors):
    tensors = [torch.ones(4 << 20) for _ in range(num_tensors)]
    del tensors
    freed.after_step()
    return resident_bytes() >> 20

print(*(after(number) for number in (1, 1, 1, 40, 1, 40)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is Linux's")
def test_a_heap_that_creeps_is_given_back_once_in_a_while() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CREEPING], capture_output=True, text=True, check=True, timeout=120
    )
    _, settled, usual, given_back, next_step, soon_after = map(int, run.stdout.split())
    tensor = 16 + 2  # MiB, and alignment: a tensor that does not fit into the hole of the last one
    assert settled - 2 <= usual <= settled + tensor  # kept, not given back
    assert given_back <= settled
    assert next_step <= settled + tensor
    assert soon_after >= settled + 500  # a second time only after a pause


def test_a_choice_of_the_users_own_is_left_as_it_is() -> None:
    own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "A": "b"}
    assert with_huge_pages(own) == own
    added = with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.check=1"})["GLIBC_TUNABLES"]
    assert added in ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1")
