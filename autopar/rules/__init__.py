"""Rules: what the compiler knows about each op family, in one file each (see `registry.Rule`)."""

from autopar.rules import families
from autopar.rules.choice import enumerate_choices, needs, supplies
from autopar.rules.context import LocalContext
from autopar.rules.derivative import (
    KEEPS_FACTORS,
    KEEPS_NOTHING,
    KEEPS_OPERANDS,
    KEEPS_OUTPUT,
    Keeps,
    Operands,
)
from autopar.rules.digits import find_bases
from autopar.rules.local import run_local
from autopar.rules.registry import register, registered_targets, rule_of, space_of, unregister
from autopar.rules.space import Space, SpaceBuilder, layout

__all__ = [
    "KEEPS_FACTORS",
    "KEEPS_NOTHING",
    "KEEPS_OPERANDS",
    "KEEPS_OUTPUT",
    "Keeps",
    "LocalContext",
    "Operands",
    "Space",
    "SpaceBuilder",
    "enumerate_choices",
    "families",
    "find_bases",
    "layout",
    "needs",
    "register",
    "registered_targets",
    "rule_of",
    "run_local",
    "space_of",
    "supplies",
    "unregister",
]
