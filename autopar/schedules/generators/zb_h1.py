"""ZB-H1: a third of 1F1B's bubble at its memory, at most D activations (Qi et al., ICLR 2024).

The bubble is (D-1)(F+I-W) seconds for W <= F and W <= I, both inside each device's span and over
the makespan.
"""

from autopar.schedules.generators.zero_bubble import delayed_weights
from autopar.schedules.schedule import Schedule


def zb_h1(*, num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B's forwards; stage s delays W by s micro-batches."""
    return delayed_weights(
        "zb_h1",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        forwards_ahead=lambda stage: num_stages - 1 - stage,
        weight_delay=lambda stage: stage,
    )
