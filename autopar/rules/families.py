"""The op families: every module of this package is imported, and registers its rules.

So a new family is one new file.
"""

import importlib
import pkgutil

from autopar import rules

MODULES = tuple(
    importlib.import_module(f"{rules.__name__}.{module.name}")
    for module in pkgutil.iter_modules(rules.__path__)
    if module.name != "families"
)
