"""The captured graph, run at one device and compared with the user's model."""
