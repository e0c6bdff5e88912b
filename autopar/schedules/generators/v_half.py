"""V-Half: half of 1F1B's activations, and about half of its bubble (Qi et al., NeurIPS 2024).

The peak is (D+2)//2 activations of one micro-batch and 1/D of the model for every D, as in the
paper. At F = I = W the bubble is close to the paper's D (F+I+W) / 2.
"""

from autopar.schedules.generators.building_block import repeat_block
from autopar.schedules.schedule import Schedule


def v_half(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Two stages per device; a pass down takes 2 units per device, a pass up 1.

    ``num_stages`` is twice the number of devices D. Raises ScheduleError if it is odd.
    """
    return repeat_block(
        "v_half",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        steps=(2, 1, 2, 1),
    )
