"""The op families: importing this module imports all others here, which register their rules.

A new family is therefore one new file.
"""

import importlib
import pkgutil
from pathlib import Path

MODULES = tuple(
    importlib.import_module(f"{__package__}.{module.name}")
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if module.name != "families"
)
