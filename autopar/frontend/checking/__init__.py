"""The gradient check: the captured graph, run on one device and compared with the user's model."""
