"""The errors that autopar raises for a user's mistake or a machine's fault.

Each message names the value, the rule that it breaks, and the fix as code that can be pasted. All
of them derive from ``AutoparError``.
"""


class AutoparError(Exception):
    """Base class of all errors raised by autopar."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph."""


class GradientError(CaptureError):
    """The captured graph's loss or gradients differ from the model's in eager mode."""


class InputError(AutoparError, ValueError):
    """Inputs of the wrong kind, number, shape or dtype."""


class MissingError(InputError, AttributeError):
    """A compiled model has no such attribute; the message says what to call instead."""


class KeywordError(InputError, TypeError):
    """A function takes no such keyword; the message says which one is similar."""


class DeviceError(AutoparError, ValueError):
    """The devices asked for do not exist or do not fit the plan."""


class ConstraintError(AutoparError, ValueError):
    """The user's constraints match nothing or contradict each other."""


class PlanError(AutoparError, ValueError):
    """A plan cannot be read or was made for another graph or mesh."""


class OptimizerError(AutoparError, ValueError):
    """The optimizer cannot work on the shards that the plan makes."""


class GraphError(AutoparError, ValueError):
    """A graph breaks a rule that every later stage relies on."""


class SearchError(AutoparError, ValueError):
    """A search problem is malformed or cannot be solved as asked."""


class RuleError(AutoparError):
    """A sharding rule is wrong: on shards the op computes other values than on whole tensors."""


class ScheduleError(AutoparError, ValueError):
    """A schedule breaks a rule; the message names device, step and action.

    ``line`` (from 1) is where a schedule's text could not be parsed, ``device`` the one whose step
    is wrong; each is None where the error is not about a single line or device.
    """

    def __init__(
        self, message: str = "", *, line: int | None = None, device: int | None = None
    ) -> None:
        super().__init__(message)
        self.line = line
        self.device = device


class MovementError(AutoparError, ValueError):
    """A movement plan breaks a rule, or no plan keeps within the capacity.

    ``least_bytes`` is the least capacity that would do, where the capacity is at fault.
    """

    def __init__(self, message: str = "", *, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class ClusterError(AutoparError, ValueError):
    """A cluster description is unknown, incomplete or contradictory."""


class NonFiniteError(AutoparError, FloatingPointError):
    """The loss or the gradients of a training step are not finite; the step was rolled back.

    ``block`` and ``location`` (file and line of the user's code) say where the first such value was
    computed, ``phase`` (``"forward"`` or ``"backward"``) and ``microbatch`` when; each is None if
    unknown.
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


class PackageError(AutoparError, ImportError):
    """A package that is optional, and needed here, is not installed."""


class WorkerError(AutoparError, RuntimeError):
    """A worker process failed; carries that worker's rank and traceback."""

    def __init__(self, message: str, *, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class StepError(WorkerError):
    """An op raised in a training step; the step was rolled back, and training can continue."""


def first_line(error: BaseException) -> str:
    """The type of an error, and what it says first."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
