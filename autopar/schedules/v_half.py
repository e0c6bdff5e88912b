"""V-Half: about half of 1F1B's activations, at about half of its bubble (Qi et al., 2024)."""

from autopar.schedules.building_block import repeat_block
from autopar.schedules.schedule import Schedule


def v_half(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Two stages a device; each down and up pair of passes takes 3 units a device."""
    return repeat_block(
        "v_half",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        steps=(2, 1, 2, 1),
    )
