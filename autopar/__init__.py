"""autopar: an auto-parallelization compiler for PyTorch."""

from autopar._version import __version__

__all__ = ["__version__"]
