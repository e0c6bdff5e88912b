"""Small models with random weights, and batches for them."""
