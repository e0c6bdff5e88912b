"""The script of each rank in test_spmd.py: train on batches of several shapes."""

from __future__ import annotations

import torch

import autopar
from tests.runtime.test_other_shapes import (
    STRATEGIES,
    Tagger,
    adamw,
    assert_trains_as_eager,
    text,
)


def main() -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    shapes = [(8, 8), (3, 8), (8, 5), (3, 8), (8, 8)]
    batches = [text(seed, *shape) for seed, shape in enumerate(shapes)]
    compiled = autopar.compile(
        model, 2, example_inputs=batches[0], constraints=STRATEGIES["zero3"], optimizer=adamw,
        profile_limit_s=0, check_gradients=False,
    )  # fmt: skip
    with compiled:
        assert_trains_as_eager(compiled, model, batches)


if __name__ == "__main__":
    main()
