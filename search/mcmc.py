"""FlexFlow's Markov-chain search, a baseline for exact plans.

In: any problem. Out: the best assignment found, without a bound. As in FlexFlow (Jia, MLSys 2019),
a step proposes a random choice for a random node and accepts it with probability min(1, exp(beta
(F(x) - F(x')))), with beta raised twice. The chain starts from the warm start, or from each node's
cheapest choice, and restarts from the best known after half of its steps without improvement.
Assignments over the memory budget pay a penalty for the excess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.search.local_search import cheapest_choices
from autopar.search.problem import Array, Method, Problem
from autopar.search.solver import Capability, Options, Progress

_STEPS_PER_NODE = 3_000
_MIN_STEPS = 20_000
_CLOCK_EVERY = 1024
_SHARES = (1.0, 0.3, 0.1)  # values of 1/beta, as fractions of the mean cheapest cost of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class McmcSolver:
    """Metropolis sampling over single-node changes; equal seeds give equal answers.

    The default is 3,000 steps per node; ``Options.max_steps`` and a time limit may end it sooner.
    """

    @property
    def method(self) -> Method:
        """The name of the solver."""
        return Method.MCMC

    @property
    def capability(self) -> Capability:
        """Respects budgets, and proves nothing."""
        return Capability(memory=True, proves=False, bounds=False)

    def refuses(self, problem: Problem, options: Options) -> str | None:
        """Nothing is refused."""
        return None

    def run(self, problem: Problem, progress: Progress) -> None:
        """Walk until the steps or the time are used up."""
        progress.enter(Method.MCMC)
        num_steps = max(_MIN_STEPS, _STEPS_PER_NODE * problem.num_nodes)
        if progress.options.max_steps is not None:
            num_steps = min(num_steps, progress.options.max_steps)
        walk = _Walk(problem, progress, num_steps)
        generator = np.random.default_rng(progress.options.seed)
        for start in range(0, num_steps, _CLOCK_EVERY):
            if not problem.num_nodes or progress.remaining_s <= 0:
                break
            draws = generator.random((3, min(_CLOCK_EVERY, num_steps - start)))
            walk.go(start, draws)
        walk.offer()


class _Walk:
    """The chain with its temperatures and restarts."""

    def __init__(self, problem: Problem, progress: Progress, num_steps: int) -> None:
        self.problem = problem
        self.progress = progress
        self.num_steps = num_steps
        self.sizes = [len(cost) for cost in problem.node_costs]
        self.chain = Chain(problem, progress.assignment or cheapest_choices(problem))
        progress.offer(self.chain.assignment)
        self.unit_s = self.chain.unit_s()
        self.best_energy = self.chain.energy
        self.best: list[int] | None = None  # since the last offer
        self.since_better = 0

    def offer(self) -> None:
        """Offer the best assignment so far."""
        if self.best is not None:
            self.progress.offer(self.best)
            self.best = None

    def go(self, start: int, draws: Array) -> None:
        """Take one step per column of ``draws``."""
        chain, sizes, num_nodes = self.chain, self.sizes, len(self.sizes)
        for step, (where, what, luck) in enumerate(draws.T.tolist(), start):
            temperature = self.unit_s * _SHARES[step * len(_SHARES) // self.num_steps]
            node = int(where * num_nodes)
            choice = int(what * sizes[node])
            change = chain.change(node, choice)
            self.since_better += 1
            if change > 0 and luck >= math.exp(-change / temperature):
                continue
            chain.move(node, choice, change)
            if chain.energy < self.best_energy:
                self.best_energy, self.since_better = chain.energy, 0
                if chain.fits():
                    self.best = list(chain.assignment)
        if self.since_better > self.num_steps // 2:
            self.offer()
            if self.progress.assignment:
                self.chain = Chain(self.problem, self.progress.assignment)
                self.since_better = 0


class Chain:
    """An assignment with its energy: the cost plus a steep penalty for exceeding the budget."""

    def __init__(self, problem: Problem, assignment: tuple[int, ...]) -> None:
        self.problem = problem
        self.assignment = list(assignment)
        self.near: list[list[tuple[int, Array]]] = [[] for _ in assignment]
        for (i, j), table in problem.edge_costs.items():
            self.near[i].append((j, table))
            self.near[j].append((i, table.T))
        self.used = list(problem.memory(assignment))
        cheapest = [float(cost.min()) for cost in problem.node_costs]
        self.price = math.fsum(abs(each) for each in cheapest if each < math.inf) or 1.0
        self.energy = problem.cost(assignment) + self.price * self._over(self.used)

    def unit_s(self) -> float:
        """The mean cheapest cost of a node, the unit of 1 / beta."""
        return self.price / max(1, len(self.assignment))

    def change(self, node: int, choice: int) -> float:
        """The change in energy of the proposal; +inf if it is forbidden."""
        old = self.assignment[node]
        cost = self.problem.node_costs[node]
        after, before = cost.item(choice), cost.item(old)
        for other, table in self.near[node]:
            taken = self.assignment[other]
            after += table.item(choice, taken)
            before += table.item(old, taken)
        if after == math.inf:
            return 0.0 if before == math.inf else math.inf
        if before == math.inf:
            return -math.inf
        memory = self.problem.node_memory
        if memory is None or self.problem.budgets is None:
            return after - before
        moved = self._moved(node, choice)
        return after - before + self.price * (self._over(moved) - self._over(self.used))

    def move(self, node: int, choice: int, change: float) -> None:
        """Accept the proposal."""
        if self.used:
            self.used = self._moved(node, choice)
        self.assignment[node] = choice
        if math.isfinite(self.energy) and math.isfinite(change):
            self.energy += change
        else:
            self.energy = self.problem.cost(self.assignment) + self.price * self._over(self.used)

    def fits(self) -> bool:
        """Whether no budget is exceeded."""
        return self._over(self.used) == 0

    def _moved(self, node: int, choice: int) -> list[float]:
        memory = self.problem.node_memory
        assert memory is not None
        moved = list(self.used)
        each = memory[node]
        moved[self.problem.group(node)] += each.item(choice) - each.item(self.assignment[node])
        return moved

    def _over(self, used: list[float]) -> float:
        budgets = self.problem.budgets
        if budgets is None:
            return 0.0
        return math.fsum(
            max(0.0, u - b) / (b or 1.0) for u, b in zip(used, budgets) if b < math.inf
        )
