"""Every error that autopar raises for a user's mistake or a machine's fault.

Each message names what was wrong with which value, the rule it breaks, and the fix as code that
can be pasted. ``AutoparError`` is the common base, so a user can catch them all at once.
"""


class AutoparError(Exception):
    """Base class of all errors raised by autopar."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph."""


class GradientError(CaptureError):
    """The captured graph computes another loss or other gradients than the model in eager mode."""


class InputError(AutoparError, ValueError):
    """Inputs of the wrong kind, number, shape or dtype."""


class DeviceError(AutoparError, ValueError):
    """The devices asked for do not exist or do not fit the plan."""


class ConstraintError(AutoparError, ValueError):
    """The user's constraints name nothing, or contradict each other."""


class PlanError(AutoparError, ValueError):
    """A plan cannot be read, or belongs to another graph or mesh."""


class OptimizerError(AutoparError, ValueError):
    """The optimizer cannot work on the shards that the plan makes."""


class GraphError(AutoparError, ValueError):
    """A graph breaks a rule that every later stage relies on."""


class SearchError(AutoparError, ValueError):
    """A search problem is malformed or cannot be solved as asked."""


class RuleError(AutoparError):
    """A rule is wrong: the op on shards differs from the op unsplit."""


class ScheduleError(AutoparError, ValueError):
    """A schedule breaks a rule; the message names device, step and action.

    ``line`` is that of a text which cannot be read, from 1, and ``device`` that of the step; each
    is None where the message is about no single one.
    """

    def __init__(
        self, message: str = "", *, line: int | None = None, device: int | None = None
    ) -> None:
        super().__init__(message)
        self.line = line
        self.device = device


class ClusterError(AutoparError, ValueError):
    """A cluster description is unknown, incomplete or contradictory."""


class NonFiniteError(AutoparError, FloatingPointError):
    """The loss or the gradients of a training step are not finite; the step has not happened.

    ``block`` and ``location`` (file and line in the user's code) say where the first such value was
    made, in the ``"forward"`` or ``"backward"`` pass of a micro-batch; None where that is not
    known.
    """

    def __init__(
        self,
        message: str,
        *,
        block: str | None = None,
        phase: str | None = None,
        microbatch: int | None = None,
        location: str | None = None,
    ) -> None:
        super().__init__(message)
        self.block = block
        self.phase = phase
        self.microbatch = microbatch
        self.location = location


class WorkerError(AutoparError, RuntimeError):
    """A worker process failed; carries its rank and its traceback."""

    def __init__(self, message: str, *, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class StepError(WorkerError):
    """An op raised in a training step; the step has not happened, and training can go on."""
