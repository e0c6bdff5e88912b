"""The plan: its data, its JSON and its text."""
