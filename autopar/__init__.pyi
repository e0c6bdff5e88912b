from autopar._version import __version__ as __version__
from autopar.api import compile, plan
from autopar.base.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    ConstraintError,
    DeviceError,
    GradientError,
    GraphError,
    InputError,
    KeywordError,
    MissingError,
    NonFiniteError,
    OptimizerError,
    PlanError,
    RuleError,
    ScheduleError,
    StepError,
    WorkerError,
)
from autopar.cost_models import Cluster, calibrate
from autopar.frontend.capture import Captured, capture
from autopar.ir.precision import Precision
from autopar.ir.update import Update
from autopar.planning.constraints import Forbid, Force, MemoryBudget, Pin
from autopar.plans.document import Plan
from autopar.rules.registry import register as register_rule
from autopar.runtime.compiled import Compiled
from autopar.testing.check_rule import check_rule

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
    "GradientError",
    "GraphError",
    "InputError",
    "KeywordError",
    "MemoryBudget",
    "MissingError",
    "NonFiniteError",
    "OptimizerError",
    "Pin",
    "Plan",
    "PlanError",
    "Precision",
    "RuleError",
    "ScheduleError",
    "StepError",
    "Update",
    "WorkerError",
    "__version__",
    "calibrate",
    "capture",
    "check_rule",
    "compile",
    "plan",
    "register_rule",
]
