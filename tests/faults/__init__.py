"""Fault injection: faults in running jobs, drawn at random, each reproducible by its number.

``python -m tests.faults.run --numbers 0-999`` runs them; a single number runs alone. The processes
of a job are forked from one that has imported torch; local workers and ``torchrun`` are started as
users start them.
"""
