"""Progress while a plan is searched."""
