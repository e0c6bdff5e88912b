"""Machines, which run graphs, and links, which carry values between pipeline devices."""
