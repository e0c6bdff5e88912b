"""autopar: an auto-parallelization compiler for PyTorch.

Public names are imported on first use, so that a worker process imports what it runs, and neither
the frontend nor the search. ``__init__.pyi`` shows the same names to type checkers.
"""

import pkgutil
from importlib import import_module
from typing import Any

from autopar._version import __version__
from autopar.base.gc_pause import collector_paused

_PLACES = {
    "AutoparError": "autopar.base.errors:AutoparError",
    "CaptureError": "autopar.base.errors:CaptureError",
    "Captured": "autopar.frontend.capture:Captured",
    "Cluster": "autopar.cost_models:Cluster",
    "ClusterError": "autopar.base.errors:ClusterError",
    "Compiled": "autopar.runtime.compiled:Compiled",
    "ConstraintError": "autopar.base.errors:ConstraintError",
    "DeviceError": "autopar.base.errors:DeviceError",
    "Forbid": "autopar.planning.constraints:Forbid",
    "Force": "autopar.planning.constraints:Force",
    "GradientError": "autopar.base.errors:GradientError",
    "GraphError": "autopar.base.errors:GraphError",
    "InputError": "autopar.base.errors:InputError",
    "KeywordError": "autopar.base.errors:KeywordError",
    "MemoryBudget": "autopar.planning.constraints:MemoryBudget",
    "MissingError": "autopar.base.errors:MissingError",
    "NonFiniteError": "autopar.base.errors:NonFiniteError",
    "OptimizerError": "autopar.base.errors:OptimizerError",
    "Pin": "autopar.planning.constraints:Pin",
    "Plan": "autopar.plans.document:Plan",
    "PlanError": "autopar.base.errors:PlanError",
    "Precision": "autopar.ir.precision:Precision",
    "RuleError": "autopar.base.errors:RuleError",
    "ScheduleError": "autopar.base.errors:ScheduleError",
    "StepError": "autopar.base.errors:StepError",
    "Update": "autopar.ir.update:Update",
    "WorkerError": "autopar.base.errors:WorkerError",
    "calibrate": "autopar.cost_models:calibrate",
    "capture": "autopar.frontend.capture:capture",
    "check_rule": "autopar.testing.check_rule:check_rule",
    "compile": "autopar.api:compile",
    "plan": "autopar.api:plan",
    "register_rule": "autopar.rules.registry:register",
}
_PACKAGES = frozenset(module.name for module in pkgutil.iter_modules(__path__))

__all__ = [*_PLACES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        with collector_paused():  # nothing of a thousand modules is garbage
            found = globals()[name] = pkgutil.resolve_name(_PLACES[name])
        return found
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
