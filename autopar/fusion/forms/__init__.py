"""Fused forms of operators, one file an op family."""
