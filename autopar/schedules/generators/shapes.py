"""Placements of stages on devices, and checks of the generators' arguments."""

from autopar.base.errors import ScheduleError
from autopar.schedules.schedule import PipelineShape


def chain_shape(num_stages: int, num_microbatches: int) -> PipelineShape:
    """Stage s on device s."""
    return PipelineShape(num_microbatches=num_microbatches, placement=(tuple(range(num_stages)),))


def looped_shape(
    num_stages: int, num_microbatches: int, num_devices: int, group_size: int = 1
) -> PipelineShape:
    """Groups of ``group_size`` adjacent stages, group j on device j mod num_devices."""
    placement = tuple(stage // group_size % num_devices for stage in range(num_stages))
    return PipelineShape(num_microbatches=num_microbatches, placement=(placement,))


def v_shape(num_stages: int, num_microbatches: int) -> PipelineShape:
    """Two stages per device, d and num_stages - 1 - d: down the devices and back up."""
    half = num_stages // 2
    placement = (*range(half), *reversed(range(half)))
    return PipelineShape(num_microbatches=num_microbatches, placement=(placement,))


def require(condition: bool, rule: str, fix: str) -> None:
    """Raise ScheduleError with the broken rule and its fix unless the condition holds."""
    if not condition:
        raise ScheduleError(f"{rule}; {fix}")


def require_even_stages(name: str, num_stages: int) -> None:
    """Raise ScheduleError for an odd number: V-shaped and bidirectional schedules pair stages."""
    require(
        num_stages % 2 == 0,
        f"{name} needs an even number of stages, got num_stages={num_stages}",
        f"use num_stages={num_stages + 1}",
    )
