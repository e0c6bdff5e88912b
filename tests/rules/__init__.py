"""Tests of placements and rules, by arithmetic on all ranks in one process."""
