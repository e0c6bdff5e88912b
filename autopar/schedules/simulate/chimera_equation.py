"""Chimera's performance equation (Li and Hoefler, SC 2021, section 3.4), without a simulation.

In: seconds of a stage and of what it sends. Out: the seconds of a step of one unit, as many
micro-batches as stages, on one pair of pipelines:

    T = (F + c) C_F + (B + c) C_B + max over devices of the reductions that no bubble hides

with C_F = D forwards and C_B = 2D - 2 backwards on the critical path, and c seconds of a message.
It knows equal stages only, and is the independent check of the simulator.
"""

from autopar.base.errors import ScheduleError


def chimera_step_s(
    num_stages: int,
    *,
    forward_s: float,
    backward_s: float,
    message_s: float = 0.0,
    reduction_s: float = 0.0,
    num_units: int = 1,
) -> float:
    """Seconds of a step; ``reduction_s``: the whole reduction of one stage's gradients.

    Several units (``num_units``) follow each other so closely that only the first one's forwards
    and the last one's backwards are exposed, which holds for backwards as long as forwards. Raises
    ScheduleError for an odd number of stages.
    """
    if num_stages % 2 or num_stages < 2:
        raise ScheduleError(f"num_stages={num_stages}: Chimera needs an even number of stages")
    forwards = num_stages * num_units
    backwards = num_stages * num_units + num_stages - 2
    passes_s = forwards * (forward_s + message_s) + backwards * (backward_s + message_s)
    return passes_s + max(
        _exposed_s(num_stages, device, backward_s + message_s, reduction_s)
        for device in range(num_stages // 2)
    )


def _exposed_s(num_stages: int, device: int, backward_s: float, reduction_s: float) -> float:
    """Seconds of a device's two reductions after the last backward of the step.

    Device d has the stages d and D-1-d. The gradients of D-1-d are complete D-1-2d backwards before
    those of d, whose last backward is d backwards before the last one of the step.
    """
    between_s = (num_stages - 1 - 2 * device) * backward_s
    both_s = reduction_s + max(0.0, reduction_s - between_s)
    return max(0.0, both_s - device * backward_s)
