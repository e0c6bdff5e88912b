"""Test oracles: all ranks of a program in one process, and `check_rule`."""
