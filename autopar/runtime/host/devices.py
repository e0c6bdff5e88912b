"""Resolves what a user passes as devices to a list of ``torch.device``, one for each rank.

In: a number, a device string, or a list of strings and devices. Out: one existing device for each
rank, all of one type. A wrong request is refused, with the fix, before a process is started or a
byte allocated.
"""

from collections.abc import Sequence

import torch

from autopar.base.errors import DeviceError

MAX_CPU_WORKERS = 64
"""Local CPU workers may outnumber the cores, to try a plan; each takes some 300 MB."""

_TYPES = ("cpu", "cuda")


def resolve_devices(
    devices: int | str | torch.device | Sequence[str | torch.device],
) -> list[torch.device]:
    """The device of each rank.

    * An int n: the first n CUDA devices; on a machine without any, n CPU workers.
    * ``"cpu"`` or ``"cuda:1"``: that one. ``"cuda"`` is torch's current CUDA device.
    * A list: one for each rank. ``["cpu"] * 4`` are four CPU workers, on any machine; a CUDA device
      may be listed once only, as two ranks on one would deadlock in NCCL.

    Raises ``DeviceError`` for a device that does not exist, for more than ``MAX_CPU_WORKERS`` CPU
    workers, and for anything else. Creates no CUDA context.
    """
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _first_devices(devices)
    if isinstance(devices, str | torch.device):
        return [_one_device(devices)]
    if not isinstance(devices, Sequence):
        raise DeviceError(
            f"devices={devices!r} is a {type(devices).__name__}; devices are an int, a device "
            'string, or a list of these: devices=2, devices="cuda:1" or devices=["cpu", "cpu"]'
        )
    resolved = [_one_device(device) for device in devices]
    _check_together(resolved)
    return resolved


def _first_devices(count: int) -> list[torch.device]:
    num_cuda = torch.cuda.device_count()
    if count < 1:
        raise DeviceError(f"devices={count}: at least one device is needed; pass devices=1 or more")
    if not num_cuda:
        _check_cpu_workers(count)
        return [torch.device("cpu")] * count
    if count > num_cuda:
        raise DeviceError(
            f"devices={count}: this machine has {num_cuda} CUDA device(s), and each rank needs "
            f'its own; pass devices={num_cuda}, or devices=["cpu"] * {count} for CPU workers'
        )
    return [torch.device("cuda", index) for index in range(count)]


def _one_device(device: str | torch.device) -> torch.device:
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f'{device!r} is no device: {str(error).splitlines()[0]}; pass "cpu" or "cuda:0"'
        ) from error
    if resolved.type not in _TYPES:
        raise DeviceError(
            f"{device!r} is of type {resolved.type!r}; autopar runs on {' and '.join(_TYPES)} "
            'devices: pass "cpu" or "cuda:0"'
        )
    if resolved.type == "cpu":
        if resolved.index:
            raise DeviceError(
                f"{device!r}: the CPU is one device, which any number of ranks share; "
                f'pass ["cpu"] * {resolved.index + 1} for that many workers'
            )
        return torch.device("cpu")
    num_cuda = torch.cuda.device_count()
    index = _current_cuda_index() if resolved.index is None else resolved.index
    if index >= num_cuda:
        fix = f'pass "cuda:0" to "cuda:{num_cuda - 1}"' if num_cuda else 'pass "cpu"'
        raise DeviceError(
            f"{device!r} does not exist: this machine has {num_cuda} CUDA device(s); {fix}"
        )
    return torch.device("cuda", index)


def _check_together(devices: list[torch.device]) -> None:
    if not devices:
        raise DeviceError('devices=[]: at least one device is needed; pass devices=["cpu"]')
    types = sorted({device.type for device in devices})
    if len(types) > 1:
        raise DeviceError(
            f"devices={[str(device) for device in devices]} are of types {types}; all ranks have "
            f"the same type: pass only {' or only '.join(types)} devices"
        )
    if types == ["cpu"]:
        _check_cpu_workers(len(devices))
        return
    doubled = sorted({str(device) for device in devices if devices.count(device) > 1})
    if doubled:
        raise DeviceError(
            f"{', '.join(doubled)} is listed more than once; each rank needs a CUDA device of "
            f"its own: pass {sorted({str(device) for device in devices})}"
        )


def _check_cpu_workers(count: int) -> None:
    if count > MAX_CPU_WORKERS:
        raise DeviceError(
            f"{count} CPU workers were asked for; at most {MAX_CPU_WORKERS} are started on one "
            f"machine: pass devices={MAX_CPU_WORKERS}, or plan offline for a larger Cluster"
        )


def _current_cuda_index() -> int:
    """torch's current CUDA device; 0 if none has been chosen, without creating a context."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
