"""The devices of a job, from what a user passes to `autopar.compile`.

In: a number, a device string, a list, a ``DeviceMesh`` or a `Cluster`. Out: the device of each
rank, and the sizes of the axes of a ``DeviceMesh``. Under ``torchrun`` the ranks are those that it
started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.base.errors import InputError
from autopar.cost_models import Cluster
from autopar.runtime.host.devices import resolve_devices
from autopar.runtime.runners.spmd import is_spmd

Devices: TypeAlias = int | str | Sequence[str | torch.device] | DeviceMesh | Cluster


def given_devices(devices: Devices) -> tuple[list[torch.device], dict[str, int] | None]:
    """The device of each rank, and the axes of a ``DeviceMesh`` with their sizes.

    Raises InputError for a number of devices that ``torchrun`` has not started, and DeviceError.
    """
    if isinstance(devices, DeviceMesh):
        names = devices.mesh_dim_names or tuple(f"axis{i}" for i in range(devices.ndim))
        sizes = {name: devices.size(i) for i, name in enumerate(names)}
        return _repeated(devices.device_type, devices.size()), sizes
    if isinstance(devices, Cluster):
        return _repeated(devices.device.kind, devices.num_devices), None
    if is_spmd() and isinstance(devices, str):
        return _repeated(torch.device(devices).type, _world_size()), None
    if is_spmd() and isinstance(devices, int):
        if devices != _world_size():
            raise InputError(
                f"devices={devices}, but torchrun started {_world_size()} processes; "
                f"pass devices={_world_size()}"
            )
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return _repeated(kind, devices), None
    return resolve_devices(devices), None


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def _repeated(kind: str, count: int) -> list[torch.device]:
    if kind == "cpu" or is_spmd():
        return [torch.device(kind)] * count
    return resolve_devices([f"{kind}:{i}" for i in range(count)])
