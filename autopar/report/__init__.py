"""Progress of planning and compiling."""
