"""The host machine: devices, heap, peak memory."""
