"""autopar: an auto-parallelization compiler for PyTorch."""

from autopar._version import __version__
from autopar.api import compile, plan
from autopar.capture import Captured, capture
from autopar.constraints import Forbid, Force, MemoryBudget, Pin
from autopar.cost_models import Cluster
from autopar.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    ConstraintError,
    DeviceError,
    GraphError,
    InputError,
    OptimizerError,
    PlanError,
    RuleError,
    ScheduleError,
    WorkerError,
)
from autopar.plan import Plan
from autopar.rules.base import register as register_rule
from autopar.rules.checking import check_rule
from autopar.runtime.compiled import Compiled

__all__ = [
    "AutoparError",
    "CaptureError",
    "Captured",
    "Cluster",
    "ClusterError",
    "Compiled",
    "ConstraintError",
    "DeviceError",
    "Forbid",
    "Force",
    "GraphError",
    "InputError",
    "MemoryBudget",
    "OptimizerError",
    "Pin",
    "Plan",
    "PlanError",
    "RuleError",
    "ScheduleError",
    "WorkerError",
    "__version__",
    "capture",
    "check_rule",
    "compile",
    "plan",
    "register_rule",
]
