"""Times of ops and collectives on the devices at hand."""
