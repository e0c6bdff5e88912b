"""Errors, and the names of private torch API."""
