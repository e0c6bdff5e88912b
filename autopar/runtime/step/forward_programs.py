"""Forward passes of a compiled model: one program per mode and kind of call, lowered on demand.

In: calls of the model in train or eval mode, with any batch size, with labels or without. Out: what
the model itself returns. A call like those trained with runs the training strategy's forward pass;
for any other one the model is captured again in that mode, planned on the same mesh with parameters
as training stores them, where each rank passes its shard also with inputs split as there, and
lowered. All programs read the runtime's present parameters and buffers; none changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.base.torch_private import pytree
from autopar.frontend.capture import Captured, capture
from autopar.frontend.full_masks import has_full_masks
from autopar.frontend.signature import Arguments, CallKey, Signature, call_key
from autopar.frontend.targets import without_targets
from autopar.ir.placement import Placements
from autopar.lowering.types import RankProgram
from autopar.runtime.step.begun_call import BegunCall
from autopar.runtime.step.local_calls import LocalCall, local_call, local_signature
from autopar.runtime.step.program_cache import ProgramCache

MAX_PROGRAMS = 8
"""How many forward programs are kept; a new one replaces the least recently used."""

LowerForward = Callable[[Captured, Mapping[int, Placements]], RankProgram]
"""Plans and lowers a forward pass, given the placements of values stored already."""


class ForwardRunner(Protocol):
    """Runs forward programs, each in a slot, where it replaces an earlier one."""

    def set_forward_program(self, slot: int, program: RankProgram) -> None: ...

    def begin_call(self, begun: BegunCall) -> bool: ...

    def forward(
        self,
        slot: int,
        tensors: Sequence[Tensor],
        *,
        local: bool = False,
        as_training_pass: bool = False,
    ) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """The program in ``slot``, and the calls that it serves."""

    slot: int
    takes_targets: bool
    signature: Signature
    local_signature: Signature


class _Key(NamedTuple):
    """The calls that one program serves; ``with_inputs``: inputs are split as in training."""

    training: bool
    with_inputs: bool
    has_full_masks: bool
    called: CallKey


class ForwardPrograms:
    """The forward programs of one compiled model.

    ``lower_own`` lowers the training strategy's own forward pass, ``lower_other`` any other one.
    ``model`` and ``loss_fn`` are captured from, and need no data.
    """

    def __init__(
        self,
        *,
        captured: Captured,
        program: RankProgram,
        model: nn.Module,
        loss_fn: Any,
        lower_own: Callable[[], RankProgram],
        lower_other: LowerForward,
        runner: ForwardRunner,
    ) -> None:
        self._signature = captured.signature
        self._precision = captured.precision
        self._own_key = captured.signature.key()
        self._program = program
        self._was_training = model.training
        self._model, self._loss_fn = model, loss_fn
        self._lower_own = lower_own
        self._lower_other = lower_other
        self._runner = runner
        self._cache: ProgramCache[_Forward] = ProgramCache(MAX_PROGRAMS)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        training: bool,
        local: bool,
        as_training_pass: bool = False,
    ) -> Any:
        """The whole output of the model for this call in this mode.

        ``as_training_pass``: random operators draw what the next training pass will.
        """
        example = Arguments(args, kwargs)
        if local:
            example = self._local_call(args, kwargs).whole.example()
        shapes = [
            tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        ]
        mode = "train" if training else "eval"
        full_masks = self._signature.full_masks
        begun = BegunCall(
            shapes=f"{shapes} in {mode} mode",
            local=local,
            in_each=local or bool(full_masks),
            has_full_masks=has_full_masks(full_masks, args, kwargs),
        )
        is_full = self._runner.begin_call(begun)
        forward = self._forward(example, training, local, is_full)
        if not forward.takes_targets:
            args, kwargs = self._without_targets(args, kwargs)
        signature = forward.local_signature if local else forward.signature
        tensors = signature.flatten(args, kwargs)
        found = self._runner.forward(
            forward.slot, tensors, local=local, as_training_pass=as_training_pass
        )
        return forward.signature.output_of(found)

    def _local_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LocalCall:
        """A call of all ranks, each of which passes its own shard."""
        try:
            return local_call(self._signature, self._program, args, kwargs)
        except InputError as error:
            raise InputError(
                "with local=True each rank passes its own part of a call like those that are "
                f"trained with: {error}. For any other call pass the global batch, without "
                "local=True"
            ) from error

    def _forward(self, call: Arguments, training: bool, local: bool, is_full: bool) -> _Forward:
        called = call_key(*call)
        is_own = called == self._own_key
        key = _Key(training, local or is_own, is_full, called)
        masked = key._replace(has_full_masks=False)
        if masked in self._cache and not is_own:  # it serves full masks as well
            key = masked
        if key not in self._cache:
            self._cache.add(key, lambda slot: self._make(call, key, slot))
        return self._cache[key]

    def _make(self, call: Arguments, key: _Key, slot: int) -> _Forward:
        is_own = key.called == self._own_key and key.has_full_masks
        if is_own and key.training == self._was_training:
            signature, program = self._signature, self._lower_own()
        else:
            captured = self._captured(call, key)
            signature, with_inputs = captured.signature, key.with_inputs
            program = self._lower_other(captured, self._held(captured, with_inputs=with_inputs))
        self._runner.set_forward_program(slot, program)
        return _Forward(
            slot=slot,
            takes_targets=signature is self._signature,
            signature=signature,
            local_signature=local_signature(signature, program),
        )

    def _captured(self, call: Arguments, key: _Key) -> Captured:
        try:
            return capture(
                self._model,
                Arguments(*self._without_targets(*call)),
                training=None if key.training == self._was_training else key.training,
                differentiable=False,
                precision=self._precision,
                full_masks=self._signature.full_masks if key.has_full_masks else (),
            )
        except InputError as error:
            if self._loss_fn is None or call_key(*call)[0] == self._own_key[0]:
                raise
            raise InputError(
                f"a call unlike those that are trained with ({self._signature.describe()}) runs "
                f"the model without its loss_fn: {error}{self._signature.hint(*call)}"
            ) from error

    def _without_targets(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The model's own arguments; a call like those trained with also has the loss's targets."""
        if self._loss_fn is None or call_key(args, kwargs)[0] != self._own_key[0]:
            return args, kwargs
        return without_targets(self._loss_fn, self._model, args, kwargs)

    def _held(self, captured: Captured, *, with_inputs: bool) -> dict[int, Placements]:
        """The placements as in training, of parameters and ``with_inputs`` of inputs."""
        graph = captured.graph
        stored = {p.name: p.stored for p in self._program.parameters}
        held = {v.index: stored[v.target or v.name] for v in graph.parameters}
        if with_inputs:
            inputs = zip(self._signature.input_names, self._program.inputs)
            placements = {name: i.placements for name, i in inputs}
            names = captured.signature.input_names
            held |= {i: placements[name] for name, i in zip(names, graph.inputs)}
        return held
