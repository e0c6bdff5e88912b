"""Fault injections: drawn faults in running jobs, each named by its number.

``python -m tests.faults.run --numbers 0-999`` runs them; a single number runs alone. The processes
of a job are forked from one that has imported torch; local workers and ``torchrun`` start as users
start them.
"""
