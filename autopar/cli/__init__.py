"""The ``autopar`` command: make, show, explain, draw and compare plans; measure steps."""

from autopar.cli.main import main

__all__ = ["main"]
