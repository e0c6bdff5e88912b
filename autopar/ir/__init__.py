"""The intermediate representation: graph, blocks, mesh, placements."""
