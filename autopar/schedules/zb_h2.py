"""ZB-H2: zero bubble at twice 1F1B's memory. Bubble (D-1)(F+I-2W), at most 2D-1 activations."""

from autopar.schedules.schedule import Schedule
from autopar.schedules.zero_bubble import delayed_weights


def zb_h2(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Stage s runs 2(D-1-s) forwards ahead and holds W back by 2s micro-batches."""
    return delayed_weights(
        "zb_h2",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        forwards_ahead=lambda stage: 2 * (num_stages - 1 - stage),
        weight_delay=lambda stage: 2 * stage,
    )
