"""The mover where copies end late, as on an accelerator's streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.movement.execution import Movement, Run, Update
from autopar.movement.plan import MovementPlan, Transfer, Way
from autopar.runtime.machine import mover as mover_module
from autopar.runtime.machine.mover import Mover

NUM = 64
PLACES = (Run("F", 0, 0), Update((0,)), Run("F", 1, 0))


class Latest:
    """Copies to the host at once, and from the host as late as a stream may: when it is waited
    for. Memory that was not yet copied into has other contents."""

    def host_memory(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def to_host(self, host: Tensor, device: Tensor) -> Callable[[], None]:
        host.copy_(device)
        return lambda: None

    def from_host(self, device: Tensor, host: Tensor) -> Callable[[], None]:
        device.fill_(255)
        kept = host.clone()

        def wait() -> None:
            device.copy_(kept)

        return wait


def in_and_out(leaves: Way) -> Movement:
    """An optimizer state comes for its update and leaves behind it."""
    transfers = (
        Transfer(tensor="state", way=Way.FROM_HOST, after=0, before=1),
        Transfer(tensor="state", way=leaves, after=1),
    )
    return Movement(
        plan=MovementPlan(num_ops=len(PLACES), transfers=transfers, starts_on_host=("state",)),
        places=PLACES,
        made={},
        stored={"state": (0, 0)},
    )


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(mover_module, "_copies_of", lambda device: Latest())
    return torch.arange(NUM, dtype=torch.float32)


def run(mover: Mover, state: Tensor, *, updates: bool) -> None:
    """One step; an update adds 1."""
    mover.begin_step()
    for place in PLACES:
        if isinstance(place, Update) and not updates:
            continue
        mover.before(place)
        if isinstance(place, Update):
            state += 1
        mover.after()
    mover.end_step()


@pytest.mark.parametrize("leaves", [Way.TO_HOST, Way.DROP])
def test_a_state_survives_updates_that_are_left_out(state: Tensor, leaves: Way) -> None:
    expected = state.clone()
    mover = Mover(in_and_out(leaves), torch.device("cpu"), lambda place: state)
    for _ in range(2):
        run(mover, state, updates=False)
    mover.bring_back()
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_a_state_survives_a_pass_that_updates_nothing(state: Tensor) -> None:
    expected = state + 1
    mover = Mover(in_and_out(Way.TO_HOST), torch.device("cpu"), lambda place: state)
    mover.begin_step()
    mover.before(PLACES[0])
    mover.after()
    mover.begin_again()
    for place in PLACES:
        mover.before(place)
        if isinstance(place, Update):
            state += 1
        mover.after()
    mover.end_step()
    mover.bring_back()
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
