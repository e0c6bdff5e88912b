"""Drawn steps and drawn pinning problems, small enough for brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator

from autopar.movement.lifetimes import Lifetime, StepLifetimes, step_of
from autopar.movement.pinning.problem import PinningProblem, Window


def drawn_step(draw: random.Random) -> StepLifetimes:
    """Up to 12 operations and 6 tensors, persistent ones among them."""
    num_ops = draw.randint(1, 12)
    tensors = []
    for number in range(draw.randint(1, 6)):
        uses = tuple(sorted(draw.sample(range(num_ops), min(num_ops, draw.randint(1, 3)))))
        persistent = draw.random() < 0.4
        tensors.append(
            Lifetime(
                name=f"t{number}",
                category="activations",
                size_bytes=draw.randint(0, 9),
                uses=uses,
                writes=tuple(
                    op
                    for i, op in enumerate(uses)
                    if (not i and not persistent) or draw.random() < 0.3
                ),
                persistent=persistent,
            )
        )
    return step_of(num_ops, tensors, [draw.choice([0, 0, 2]) for _ in range(num_ops)])


def drawn_problem(draw: random.Random) -> PinningProblem:
    """Up to 9 items in up to 7 windows."""
    num_items = draw.randint(1, 9)
    sizes = tuple(draw.randint(0, 12) for _ in range(num_items))
    windows = tuple(
        Window(
            items=tuple(i for i in range(num_items) if draw.random() < 0.4),
            reserved_bytes=draw.choice([0, 0, 3]),
        )
        for _ in range(draw.randint(1, 7))
    )
    return PinningProblem(
        sizes=sizes,
        savings=tuple(size * draw.randint(0, 4) for size in sizes),
        windows=windows,
        num_held=draw.choice([1, 2]),
        capacity_bytes=draw.randint(0, sum(sizes) + 10),
    )


def subsets(num_items: int) -> Iterator[list[int]]:
    for mask in range(1 << num_items):
        yield [i for i in range(num_items) if mask >> i & 1]
