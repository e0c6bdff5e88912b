"""The fault of each number: launcher, plan, place, kind, victim and moment, drawn from the number.

Consecutive numbers form a lane: one launcher and plan, and one checkpoint that each launch resumes
from, so that a launch checks what the fault before it has left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LANE = 8
"""The number of injections in one lane."""
LAUNCHERS = {"plain": 0.62, "local": 0.32, "torchrun": 0.06}
"""Unsupervised processes with RANK and WORLD_SIZE; local workers of one process; torchrun."""
PLANS = {
    "data_parallel": 3,
    "zero3": 2,
    "tensor_parallel": 2,
    "micro_batches": 2,
    "1f1b": 2,
    "zb_h1": 2,
    "chimera": 2,
    "conventional": 1,
    "reverse_first_k": 2,
    "data x 1f1b": 1,
}
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
OP_FAULTS = ("op raises", "op hangs", "op exits")
"""In the middle of a block, on one rank."""
SCRIPT_FAULTS = ("script raises", "script exits", "script leaves")
"""In the user's own code between two calls, on one rank."""
PLACES = {
    "step": 0.40,
    "first step": 0.10,
    "between steps": 0.18,
    "evaluation": 0.08,
    "save": 0.08,
    "load": 0.04,
    "compile": 0.08,
    "close": 0.04,
}
ACTIONS = {
    "1f1b": (r"F\d", r"B\d", r"SEND_[FB]", r"RECV_[FB]", "the update"),
    "zb_h1": (r"F\d", r"I\d", r"W\d", r"SEND_[FB]", "the update"),
    "chimera": (r"F\d", r"B\d", r"SEND_[FB]", "the reductions"),
    "conventional": (r"F\d", r"B\d", r"\dG", r"\dU"),
    "reverse_first_k": (r"F\d", r"W\d|B\d", r"\dG", r"\dU"),
}
PLAIN_ACTIONS = (r"F\d", r"B\d", "the update", "the reductions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault. ``victim`` is a rank; -1 is the parent of local workers."""

    number: int
    launcher: str
    plan: str
    place: str
    kind: str
    victim: int
    action: str
    delay_s: float

    @property
    def num_ranks(self) -> int:
        return 4 if self.plan == "data x 1f1b" else 2

    @property
    def lane(self) -> int:
        return self.number // LANE

    def __str__(self) -> str:
        where = f" at {self.action!r}" if self.place == "step" and self.kind in SIGNALS else ""
        return (
            f"{self.number}: {self.launcher}, {self.plan}: {self.kind} of rank {self.victim} "
            f"in {self.place}{where}, after {self.delay_s:.2f} s"
        )


def draw(number: int) -> Injection:
    of_lane = random.Random(f"lane {number // LANE}")
    launcher = _one(of_lane, LAUNCHERS)
    plan = _one(of_lane, PLANS)
    if launcher != "plain" and plan == "data x 1f1b":
        plan = "1f1b"
    generator = random.Random(number)
    place = _one(generator, PLACES)
    kind = generator.choice(_kinds(launcher, place))
    num_ranks = 4 if plan == "data x 1f1b" else 2
    victim = generator.randrange(num_ranks)
    if launcher == "local" and kind == "SIGKILL" and generator.random() < 0.15:
        victim = -1
    return Injection(
        number=number,
        launcher=launcher,
        plan=plan,
        place=place,
        kind=kind,
        victim=victim,
        action=generator.choice(ACTIONS.get(plan, PLAIN_ACTIONS)),
        delay_s=generator.uniform(0.0, 0.3 if place != "compile" else 1.5),
    )


def _kinds(launcher: str, place: str) -> tuple[str, ...]:
    if place in ("step", "first step"):
        return (*SIGNALS, *SIGNALS, *OP_FAULTS)
    if place == "between steps" and launcher != "local":
        return (*SIGNALS, *SCRIPT_FAULTS)
    return SIGNALS


def _one(generator: random.Random, weights: dict[str, float] | dict[str, int]) -> str:
    return generator.choices(list(weights), list(weights.values()))[0]
