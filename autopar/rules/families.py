"""The op families: every module of this package is imported, and registers its rules.

So a new family is one new file.
"""

import importlib
import pkgutil
from pathlib import Path

MODULES = tuple(
    importlib.import_module(f"{__package__}.{module.name}")
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if module.name != "families"
)
