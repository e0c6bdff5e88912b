"""V-Min: about a third of 1F1B's activations, the least a V can have (Qi et al., 2024)."""

from autopar.schedules.building_block import repeat_block
from autopar.schedules.schedule import Schedule


def v_min(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Two stages a device; every pass goes on to the next device at once."""
    return repeat_block(
        "v_min",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        steps=(1, 1, 1, 1),
    )
