"""Where graphs run, and what links one pipeline rank to the next."""
