"""Communication between ranks: axis-named collectives, process groups and transports."""
