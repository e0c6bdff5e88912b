"""The plan: its data and JSON, and its text."""
