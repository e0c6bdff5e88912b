"""V-Min: about a third of 1F1B's activations, the minimum of a V (Qi et al., NeurIPS 2024).

The peak is (D+4)//3 activations of one micro-batch and 1/D of the model for every D, as in the
paper. At F = I = W the bubble is at most the paper's 2 D (F+I+W) / 3.
"""

from autopar.schedules.generators.building_block import repeat_block
from autopar.schedules.schedule import Schedule


def v_min(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Two stages per device; every pass reaches the next device after 1 unit.

    ``num_stages`` is twice the number of devices D. Raises ScheduleError if it is odd.
    """
    return repeat_block(
        "v_min",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        steps=(1, 1, 1, 1),
    )
