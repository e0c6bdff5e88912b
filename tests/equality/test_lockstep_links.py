"""Pipeline ranks in lockstep: message order, deadlocks, and failures of one rank."""

from __future__ import annotations

import pytest
import torch

from autopar.lowering.types import TensorMeta
from autopar.testing.lockstep_links import Deadlock, LockstepLinks, Mail, Turns

META = TensorMeta.contiguous((2,), torch.float32)


def links(num_ranks: int) -> tuple[Turns, list[LockstepLinks]]:
    turns = Turns(num_ranks)
    mail = Mail(turns)
    return turns, [LockstepLinks(mail, rank, num_ranks) for rank in range(num_ranks)]


def filled(value: float) -> list[torch.Tensor]:
    return [torch.full((2,), value)]


def test_messages_arrive_in_the_order_of_their_sends() -> None:
    turns, (first, second) = links(2)

    def send() -> list[float]:
        for value in (1.0, 2.0):
            first.send(1, [filled(value)])
        return []

    def receive() -> list[float]:
        waits = [second.receive(0, [META]) for _ in range(2)]
        return [wait().values[0][0][0].item() for wait in waits]

    assert turns.run([send, receive]) == [[], [1.0, 2.0]]


def test_a_message_is_as_it_was_sent() -> None:
    turns, (first, second) = links(2)

    def send() -> float:
        value = filled(1.0)
        first.send(1, [value])
        value[0].zero_()
        return 0.0

    def receive() -> float:
        return second.receive(0, [META])().values[0][0][0].item()

    assert turns.run([send, receive]) == [0.0, 1.0]


def test_sums_and_shared_values_are_the_same_on_all_ranks() -> None:
    turns, all_links = links(3)

    def act(rank: int) -> list[float]:
        own = all_links[rank]
        wait = own.start_sum((0, 2), [filled(rank + 1.0)]) if rank != 1 else None
        shared = own.share((1,), filled(7.0) if rank == 1 else None, META)
        return [shared[0][0].item()] + ([] if wait is None else [wait()[0][0][0].item()])

    assert turns.run([lambda r=r: act(r) for r in range(3)]) == [[7.0, 4.0], [7.0], [7.0, 4.0]]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    turns, (first, second) = links(2)
    with pytest.raises(Deadlock, match=r"rank 0 waits for message 0 from rank 1; rank 1 waits"):
        turns.run([lambda: first.receive(1, [META])(), lambda: second.receive(0, [META])()])


def test_a_message_that_nobody_sends_is_named() -> None:
    turns, (first, second) = links(2)
    with pytest.raises(Deadlock, match="rank 1 waits for message 1 from rank 0"):
        turns.run(
            [
                lambda: first.send(1, [filled(1.0)]),
                lambda: [second.receive(0, [META])() for _ in range(2)],
            ]
        )


def test_what_one_rank_raises_ends_the_others() -> None:
    turns, (_, second) = links(2)

    def fail() -> None:
        raise ZeroDivisionError("in rank 0")

    with pytest.raises(ZeroDivisionError, match="in rank 0"):
        turns.run([fail, lambda: second.receive(0, [META])()])


def test_a_message_of_another_shape_than_agreed_is_refused() -> None:
    turns, (first, second) = links(2)
    other = TensorMeta.contiguous((3,), torch.float32)
    with pytest.raises(AssertionError, match="was agreed"):
        turns.run([lambda: first.send(1, [filled(1.0)]), lambda: second.receive(0, [other])()])


def test_an_error_in_a_question_ends_every_rank() -> None:
    asked: list[int] = []

    def fails_later() -> bool:
        asked.append(1)
        return len(asked) > 1 and 1 // 0 > 0

    turns = Turns(2)
    with pytest.raises(ZeroDivisionError):
        turns.run(
            [
                lambda: turns.wait_until(fails_later, 0, "an answer"),
                lambda: turns.wait_until(lambda: False, 1, "ever"),
            ]
        )
