"""This process's membership in a job under ``torchrun``: the process group, and the watch over it.

In: each compilation and each runner, as they begin and end. Out: one process group and one watch,
which all of them share. A process group that the user made is left to the user.
"""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from autopar.base.accelerators import backend_of, is_accelerator
from autopar.base.errors import DeviceError
from autopar.base.torch_private import default_store
from autopar.comm.transports.c10d import backends
from autopar.runtime.faults import gloo_threads
from autopar.runtime.faults.host_peers import published_location
from autopar.runtime.faults.rendezvous import Rendezvous
from autopar.runtime.faults.watch import Watch


@dataclass(slots=True)
class _Membership:
    """The watch over the default process group, the number of its users, and the process group that
    was joined here, None where the user has joined it."""

    watch: Watch | None = None
    num_users: int = 0
    joined_here: Any = None


_MEMBERSHIP = _Membership()
_NUMBERS = itertools.count()
"""Of the process groups joined here; the same on all ranks, which join together."""


def join(device: torch.device, timeout_s: float) -> Watch:
    """Become one more user of the process group and the watch; collective.

    The process group that ``torchrun`` describes is joined unless there is one.
    """
    membership = _MEMBERSHIP
    watch = membership.watch
    if watch is None or not dist.is_initialized() or watch.world is not dist.group.WORLD:
        if watch is not None:  # over a process group that the user has destroyed
            watch.stop()
        watch, membership.num_users = _watch(device, timeout_s), 0
        membership.watch = watch
    membership.num_users += 1
    return watch


def _watch(device: torch.device, timeout_s: float) -> Watch:
    """The watch over the process group, which is joined first unless there is one."""
    gloo_threads.settle_at_exit()
    timeout, joins = datetime.timedelta(seconds=timeout_s), not dist.is_initialized()
    if joins:
        store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
        # A group that was closed has left its addresses in the store.
        store = dist.PrefixStore(f"autopar/group/{next(_NUMBERS)}", store)
    else:
        _check_backend(device)
        store, rank, num_ranks = default_store(), dist.get_rank(), dist.get_world_size()
    with published_location() as location:
        ranks = Rendezvous(store, rank, num_ranks, location, device, timeout_s)
        if joins:
            ranks.supervised(
                lambda: dist.init_process_group(
                    backend_of(device.type),
                    store=store,
                    rank=rank,
                    world_size=num_ranks,
                    timeout=timeout,
                    device_id=device if is_accelerator(device) else None,
                )
            )
            _MEMBERSHIP.joined_here = dist.group.WORLD
        return Watch(ranks)


def _check_backend(device: torch.device) -> None:
    """Raise DeviceError unless the user's process group communicates between such devices."""
    config = dist.get_backend_config()
    if device.type not in backends():
        raise DeviceError(
            f"the process group is {config!r}, without a backend for {device.type} devices; write "
            f"torch.distributed.init_process_group({backend_of(device.type)!r}), or leave it to "
            "autopar.compile"
        )


def leave(watch: Watch, *, destroy_group: bool = False) -> None:
    """End the watch with its last user, and with ``destroy_group`` a process group joined here.

    After a fault both are left to the end of the process: the other ranks would wait.
    """
    membership = _MEMBERSHIP
    if watch is not membership.watch or watch.has_fault:
        return
    membership.num_users -= 1
    if membership.num_users:
        return
    membership.watch = None
    watch.stop()
    if destroy_group and dist.is_initialized() and membership.joined_here is dist.group.WORLD:
        dist.destroy_process_group()
        membership.joined_here = None
