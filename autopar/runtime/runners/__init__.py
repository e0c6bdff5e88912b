"""Runners of a compiled model: over processes under torchrun, or over local workers."""
