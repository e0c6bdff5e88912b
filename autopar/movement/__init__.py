"""Tensors that leave the device and come back: lifetimes, plans, and the choice of what moves."""
