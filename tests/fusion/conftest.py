"""Workers for the arrays of these tests: one group of each size, kept between tests."""

from tests.runtime.conftest import groups

__all__ = ["groups"]
