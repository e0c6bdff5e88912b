"""V-Half: half of 1F1B's activations, and about half of its bubble (Qi et al., NeurIPS 2024).

Peak (D+2)//2 micro-batches' activations of 1/D of the model, the paper's figure, for every D. At
F = I = W the bubble is within 4% of the paper's D (F+I+W) / 2 for D up to 32.
"""

from autopar.schedules.generators.building_block import repeat_block
from autopar.schedules.schedule import Schedule


def v_half(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Two stages a device; a pass down takes 2 units a device, a pass up 1.

    ``num_stages`` is twice the number of devices D. Raises ScheduleError when it is odd.
    """
    return repeat_block(
        "v_half",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        steps=(2, 1, 2, 1),
    )
