"""Problems for the tests: random small ones, the authors' instances, and a layered graph."""

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from autopar.search import Problem

DATA = Path(__file__).parent / "data"


@st.composite
def problems(draw, *, memory: bool | None = None, forbidden: bool = True, most_nodes: int = 6):
    """Small problems with integer costs, so that ties are common and sums exact."""
    num_nodes = draw(st.integers(1, most_nodes))
    sizes = draw(st.lists(st.integers(1, 3), min_size=num_nodes, max_size=num_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = draw(st.sampled_from([2, 6, 50]))
    density = draw(st.sampled_from([0.2, 0.5, 1.0]))
    nodes = [rng.integers(0, top, size).astype(float) for size in sizes]
    edges = {}
    for i in range(num_nodes):
        for j in range(i + 1, num_nodes):
            if rng.random() < density:
                table = rng.integers(0, top, (sizes[i], sizes[j])).astype(float)
                if forbidden:
                    table[rng.random(table.shape) < 0.1] = np.inf
                edges[i, j] = table
    if forbidden and rng.random() < 0.2:
        nodes[0][0] = np.inf
    if memory is None:
        memory = draw(st.booleans())
    if not memory:
        return Problem(nodes, edges)
    groups = [int(group) for group in rng.integers(0, draw(st.integers(1, 3)), num_nodes)]
    num_groups = 1 + max(groups)
    budget = float(rng.integers(0, 4 * num_nodes))
    if rng.random() < 0.4:
        budget = [float(each) for each in rng.integers(0, 3 * num_nodes, num_groups)]
    return Problem(
        nodes,
        edges,
        [rng.integers(0, 8, size).astype(float) for size in sizes],
        budget,
        memory_groups=groups,
    )


def authors_problem(name: str) -> tuple[Problem, float]:
    """One of the PaSE authors' instances, with the optimum that their program found."""
    with np.load(DATA / f"{name}.npz") as data:
        nodes = [data[f"node_{node}"] for node in range(int(data["n_nodes"]))]
        edges = {(int(i), int(j)): data[f"edge_{i}_{j}"] for i, j in data["edges"]}
        return Problem(nodes, edges), float(data["optimal_cost"])


def layered(num_layers: int, *, num_choices: int = 9, budget: float | None = None) -> Problem:
    """Equal layers of six nodes with two skip edges each; equal tables are one object."""
    rng = np.random.default_rng(7)
    costs = [rng.random(num_choices) for _ in range(6)]
    memory = [rng.permutation(num_choices) + 1.0 - 0.5 * cost for cost in costs]
    tables = [rng.random((num_choices, num_choices)) for _ in range(8)]
    num_nodes = 6 * num_layers
    edges = {(i, i + 1): tables[i % 6] for i in range(num_nodes - 1)}
    for start in range(0, num_nodes - 6, 6):
        edges[start, start + 3] = tables[6]
        edges[start + 3, start + 6] = tables[7]
    return Problem(
        [costs[i % 6] for i in range(num_nodes)],
        edges,
        [memory[i % 6] for i in range(num_nodes)],
        budget,
    )


def dense(num_nodes: int, num_choices: int, *, node_scale_s: float = 4.0) -> Problem:
    """Every pair of nodes joined; edges cost for unequal classes, as redistribution does."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 4, (num_nodes, num_choices))
    distance = rng.random((4, 4))
    np.fill_diagonal(distance, 0)
    edges = {
        (i, j): rng.random() * distance[classes[i]][:, classes[j]]
        for i in range(num_nodes)
        for j in range(i + 1, num_nodes)
    }
    return Problem([rng.random(num_choices) * node_scale_s for _ in range(num_nodes)], edges)
