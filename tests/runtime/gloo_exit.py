"""The script of test_gloo_threads.py: one of two ranks that ends right after its collectives.

Arguments: the rank, and the file of their store.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from autopar.runtime.faults import gloo_threads


def main(rank: int, store: str) -> None:
    sys.setswitchinterval(1000.0)  # gloo's threads get the interpreter's lock when this one waits
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    gloo_threads.settle_at_exit()
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(40)]
    for work in works:
        work.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
