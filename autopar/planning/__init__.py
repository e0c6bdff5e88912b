"""The search for a plan: meshes, shardings, pipelines, schedules; known strategies beside it."""
