"""One training step on one rank: actions, their values, reductions and updates."""
