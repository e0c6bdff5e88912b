"""ZB-H2: zero bubble at twice 1F1B's memory, at most 2D-1 activations (Qi et al., ICLR 2024).

For N >= 2D-1 micro-batches the bubble is (D-1)(F+I-2W) seconds, for W <= F and W <= I. As in the
paper it is measured inside each device's own span (``Timeline.bubble_s``): device s starts s F
after device 0 and ends that much later, which costs time only if a barrier follows.

With fewer micro-batches stage 0 runs out of forwards before its first gradient arrives, D F + (D-1)
I seconds after its start, in any order. At F = I = W the bubble is then 2D-1-N units.
"""

from autopar.schedules.generators.zero_bubble import delayed_weights
from autopar.schedules.schedule import Schedule


def zb_h2(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Stage s runs 2(D-1-s) forwards ahead and delays W by 2s micro-batches."""
    return delayed_weights(
        "zb_h2",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        forwards_ahead=lambda stage: 2 * (num_stages - 1 - stage),
        weight_delay=lambda stage: 2 * stage,
    )
