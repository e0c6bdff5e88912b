"""The values that every later stage speaks of: graph, blocks, mesh, placements."""
