"""Communication between ranks: collectives by mesh axis, process groups, and what carries them."""
