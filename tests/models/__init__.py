"""Small models, random weights: the five of the first milestone and their batches."""
