"""Hypothesis draws new examples on every run, except in CI, where they are fixed; an example may
take as long as the machine needs."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", derandomize=True, database=None, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")
