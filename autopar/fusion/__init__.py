"""Horizontal fusion: many models trained as one, each as if it were alone."""
