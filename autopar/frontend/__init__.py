"""From a model and example inputs to the graph."""
