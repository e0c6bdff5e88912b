"""Data pinning over numbers: which tensors stay on the device for the whole step."""
