"""Models that check tensor values, apart from their tests, whose asserts pytest rewrites."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Check = Callable[[Tensor], object]


class Checked(nn.Module):
    """A linear layer behind a check of its input."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.linear(x).square().mean()


class Decided(nn.Module):
    """A linear layer of an input that a decision by its values may change."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.decide(x)).square().mean()


def asserted(x: Tensor) -> None:
    assert torch.isfinite(x).all(), f"{x.max()}"


def asserted_not(x: Tensor) -> None:
    assert not torch.isnan(x).any()


def asserted_several(x: Tensor) -> None:
    assert x.dim() == 2 and (  # noqa: PT018
        x.abs() < 1e9
    ).all() and not (x.isnan().any() or x.isinf().any())  # fmt: skip


def asserted_item(x: Tensor) -> None:
    assert torch.all(x < 1e9).item()


def asserted_of_each(x: Tensor) -> None:
    assert all(bool((column < 1e9).all()) for column in x.unbind(1))
    assert not any((column > 1e9).any() for column in x.unbind(1))


def asserted_equal(x: Tensor) -> None:
    assert torch.allclose(x, x + 0) and torch.equal(x, x)  # noqa: PT018


def asserted_among(x: Tensor) -> None:
    assert (x * 0).sum() in (0, 1)
    assert x.sum() not in (1e9, 2e9)


def raised(x: Tensor) -> None:
    if torch.isnan(x).any() or not (x < 1e9).all():
        message = "there are large numbers"
        raise ValueError(message)


CHECKS = [
    asserted, asserted_not, asserted_several, asserted_item, asserted_of_each, asserted_equal,
    asserted_among, raised,
]  # fmt: skip


def branched(x: Tensor) -> Tensor:
    return 2 * x if (x > 0).all() else x


def assigned(x: Tensor) -> Tensor:
    is_large = bool((x > 0).any())
    assert isinstance(is_large, bool)
    return 2 * x if is_large else x


def caught(x: Tensor) -> Tensor:
    try:
        if (x > 0).any():
            raise ValueError
        assert (x < 1).all()
    except (ValueError, AssertionError):
        return 2 * x
    return x


def compared(x: Tensor) -> Tensor:
    assert int(x.abs().max()) < 1e9
    return x


def told_apart(x: Tensor) -> Tensor:
    wanted = False
    assert wanted is bool((x > 1e9).any())
    return x


DECISIONS = [branched, assigned, caught, compared, told_apart]
