"""The search for a plan: meshes, shardings, pipelines, schedules; and the known strategies."""
