"""Kept for tools that look for it; everything is declared in setup.cfg."""

from setuptools import setup

setup()
