"""Tables of a program that every step of one device reads, made once.

In: a program and a device's route through it. Out: for each block the values that it reads and
makes, and where the arguments of its backward graphs come from; for gradients, how many
contributions complete each, and which are scattered or shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from autopar.lowering.arrivals import contributions_of_round, rounds_in_flight, scattered
from autopar.lowering.route import Route
from autopar.lowering.types import BlockInterface, BlockProgram, Kernel, RankProgram


class Origin(IntEnum):
    """Where an argument of a backward graph comes from: a value that the block kept of its inputs,
    a parameter, what F saved, a cotangent, or what I hands to W."""

    OPERAND = 0
    PARAMETER = 1
    SAVED = 2
    COTANGENT = 3
    HANDED = 4


Argument = tuple[Origin, int]
"""An argument of a backward graph: a position, or the value of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """One block: its kernel and interface, the ``kept`` positions of its inputs, the arguments of I
    and W, the inputs that I gives gradients of, and the parameters that W does."""

    kernel: Kernel
    interface: BlockInterface
    kept: tuple[int, ...]
    input_arguments: tuple[Argument, ...]
    weight_arguments: tuple[Argument, ...]
    differentiated: tuple[int, ...]
    graded: tuple[int, ...]

    @classmethod
    def of(cls, program: RankProgram, block: BlockProgram) -> BlockTable:
        kernel, interface = program.kernels[block.kernel], block.interface
        num_inputs = len(interface.inputs)
        sources = (*kernel.input_sources, *kernel.weight_sources)
        activations = {i for kind, i in sources if kind == "operand" and i < num_inputs}

        def arguments(found: Sequence[tuple[str, int]]) -> tuple[Argument, ...]:
            return tuple(
                (Origin.PARAMETER, interface.parameters[i - num_inputs])
                if kind == "operand" and i >= num_inputs
                else (Origin[kind.upper()], i)
                for kind, i in found
            )

        return cls(
            kernel=kernel,
            interface=interface,
            kept=tuple(sorted(activations)),
            input_arguments=arguments(kernel.input_sources),
            weight_arguments=arguments(kernel.weight_sources),
            differentiated=tuple(interface.inputs[i] for i in kernel.input_grads),
            graded=tuple(interface.parameters[i - num_inputs] for i in kernel.weight_grads),
        )


class StepTables:
    """The tables of one device; ``is_plain`` if its blocks read all parameters as they are stored,
    so that none is gathered or released."""

    def __init__(self, program: RankProgram, route: Route) -> None:
        self.program = program
        self.route = route
        self.blocks = tuple(BlockTable.of(program, block) for block in program.blocks)
        self.parameter_of = {p.value: p for p in program.parameters}
        self.is_plain = all(p.kernel is None for p in program.parameters)
        self.contributions = contributions_of_round(program, route)
        self.scattered = scattered(program)
        self.shared = frozenset(p.value for found in route.summed.values() for p in found)
        self.num_in_flight = rounds_in_flight(program.device_type, program.mesh.num_devices)
