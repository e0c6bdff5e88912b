"""The frontend: from a model and example inputs to the graph."""
