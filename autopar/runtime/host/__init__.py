"""The machine below: devices, heap, peak memory."""
