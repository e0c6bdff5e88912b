"""Local search over a schedule's orders by moving single actions, under a memory cap.

In: a compute-only schedule, its costs and caps. Out: a schedule that is never longer. It is
simulated annealing with one move: reinsert an action a few places away in its device's list.
Micro-batches are interchangeable, so actions of one kind and stage keep their order, which excludes
moves that only rename micro-batches. Its user is `autopar.schedules.generators.search`.
"""

import math
import random
from collections.abc import Sequence

from autopar.schedules.generators.fixed_order import DEADLOCK, FixedOrder, Orders

_REACH = 12
_HEAT = 0.008


def improve(
    costs: FixedOrder,
    orders: Orders,
    max_bytes: Sequence[float],
    *,
    num_moves: int,
    seed: int = 0,
    lower_bound_s: float = 0.0,
) -> Orders:
    """The best orders found in ``num_moves`` moves; stops early at the lower bound.

    Deterministic for a seed. The given orders must fit ``max_bytes``.
    """
    rng = random.Random(seed)
    current = best = [list(order) for order in orders]
    current_s = best_s = costs.seconds(orders)
    heat_s = _HEAT * best_s
    for move in range(num_moves):
        if best_s <= lower_bound_s * (1 + 1e-9):
            break
        device = rng.randrange(len(current))
        changed = _moved(costs, current[device], rng)
        if changed is None or costs.peak_bytes(device, changed) > max_bytes[device] * (1 + 1e-9):
            continue
        trial = [*current[:device], changed, *current[device + 1 :]]
        trial_s = costs.seconds(trial)
        if trial_s == DEADLOCK:
            continue
        heat = heat_s * (1.0 - move / num_moves) ** 2
        worse = trial_s - current_s
        if worse <= 0 or (heat > 0 and rng.random() < math.exp(-worse / heat)):
            current, current_s = trial, trial_s
            if current_s < best_s:
                best, best_s = current, current_s
    return best


def _moved(costs: FixedOrder, order: Sequence[int], rng: random.Random) -> list[int] | None:
    """The order with one action moved, or None if that changes nothing or breaks a dependency."""
    place = rng.randrange(len(order))
    shift = rng.randint(1, _REACH) * rng.choice((-1, 1))
    target = min(max(place + shift, 0), len(order) - 1)
    if target == place:
        return None
    number = order[place]
    passed = order[place + 1 : target + 1] if target > place else order[target:place]
    action = costs.actions[number]
    for other in passed:
        passing = costs.actions[other]
        if passing.kind is action.kind and passing.stage == action.stage:
            if passing.replica == action.replica:
                return None
        elif passing.microbatch == action.microbatch and passing.stage == action.stage:
            return None
    changed = list(order)
    del changed[place]
    changed.insert(target, number)
    return changed
