"""The heap of a training process: kept between steps, and released on request."""

import os
import platform
import statistics
import subprocess
import sys

import pytest

from autopar.runtime.host.heap import with_heap_settings

SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from autopar.runtime.host.heap import give_back_freed_memory, keep_freed_memory

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
from autopar.runtime.host.heap import FreedMemory, keep_freed_memory, resident_bytes

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


HOLES = """
import ctypes, sys
import torch
from autopar.runtime.host import heap

if sys.argv[1] == "plain":
    heap._spare_small_chunks = lambda glibc: None
heap.keep_freed_memory()
torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
end_of_heap = ctypes.CDLL(None).sbrk
end_of_heap.argtypes, end_of_heap.restype = [ctypes.c_ssize_t], ctypes.c_void_p
start = end_of_heap(0)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 128, 256)).square().mean().backward()
    optimizer.step()
print(end_of_heap(0) - start)
"""


def _glibc_version() -> tuple[int, ...]:
    name, version = platform.libc_ver()
    return tuple(map(int, version.split("."))) if name == "glibc" else ()


@pytest.mark.skipif(
    not (2, 26) <= _glibc_version() < (2, 38),
    reason="glibc leaves holes beside aligned memory from 2.26 (its caches) to 2.37",
)
def test_tensors_fit_into_the_holes_of_those_before() -> None:
    """Training grows the heap by about a sixth less than a plain one."""
    plain = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    grown: dict[str, list[int]] = {"ours": [], "plain": []}
    for _ in range(3):
        for name, env in (("ours", with_heap_settings(plain)), ("plain", plain)):
            command = [sys.executable, "-c", HOLES, name]
            run = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=120, env=env
            )
            grown[name].append(int(run.stdout))
    assert statistics.median(grown["ours"]) <= 0.93 * statistics.median(grown["plain"])


def test_a_choice_of_the_users_own_is_left_as_it_is() -> None:
    own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0:glibc.malloc.tcache_count=7", "A": "b"}
    assert with_heap_settings(own) == own
    added = with_heap_settings({"GLIBC_TUNABLES": "glibc.malloc.check=1"})["GLIBC_TUNABLES"]
    ours = "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=0"
    assert added in ("glibc.malloc.check=1", f"glibc.malloc.check=1:{ours}")
