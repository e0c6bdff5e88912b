"""The search for a plan: meshes, shardings, pipelines, schedules; the known strategies beside it."""
