"""Fused forms of operators, one file per op family."""
