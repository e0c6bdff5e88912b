"""``Array``: several models trained as one, each with the result of training alone.

Input: the models, how each is trained, and example inputs. Output: a handle that trains all of them
in one step and returns each one separately. The graph of all models (`autopar.fusion.fuse`) is
planned, lowered and run like that of a single model; when a model leaves, the rest are compiled as
a smaller array.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.base.closing import Closing
from autopar.base.errors import InputError, NonFiniteError
from autopar.frontend.alike import capture_key
from autopar.frontend.capture import Captured, Step, capture, split_inputs
from autopar.frontend.copies import copy_with
from autopar.frontend.targets import find_targets
from autopar.frontend.untraced import refuse_hooks
from autopar.fusion.fuse import LOSSES, Fused, fuse
from autopar.fusion.members import Member, batches_of, has_batches
from autopar.fusion.snapshot import Saved, Snapshot, load_array, save_array
from autopar.fusion.stacked import StackedModels, rows_of, state_of
from autopar.runtime.compiled import Compiled
from autopar.runtime.profile import Profile
from autopar.runtime.runners.spmd import from_first_rank
from autopar.runtime.state.checks import check_plain_state
from autopar.runtime.state.model_optimizers import ModelState
from autopar.runtime.state.model_options import ArrayOptions, ModelOptions, RowRef
from autopar.runtime.state.schedulers import checked_scheduler
from autopar.runtime.step.array import LOSS, NORM, UPDATED

Start: TypeAlias = Callable[
    [StackedModels, Captured, tuple[Tensor, ...], ArrayOptions, bool], Compiled
]
"""Plans, lowers and starts the graph of an array; the last argument says whether it is checked."""

Call: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional and the keyword arguments of a call."""


class Array(Closing):
    """Models that train together, each with the result of training alone.

    Made by ``autopar.compile([model_0, ..., model_n], ...)``. A model's number is its position in
    that list, from 0. A model that has left keeps its number and its last state.

    Attributes: ``active``, the numbers of the models that still train; ``num_skipped_steps``, for
    every model the steps skipped for a loss or gradient that was not finite; ``grad_norms``, the
    2-norm of the last step's gradients of each active model, ``[num_active]``, None before the
    first step.
    """

    def __init__(
        self,
        members: Sequence[Member],
        example_inputs: Any,
        start: Start,
        *,
        nonfinite_leaves: bool = False,
        raises: bool = True,
    ) -> None:
        self._start = start
        self._nonfinite_leaves = nonfinite_leaves
        self._raises = raises
        self._batches, self.shares_batch = batches_of(example_inputs, len(members))
        self._captures = _captures_of(members, self._batches)
        self.members = tuple(member.apart() for member in members)
        self._steps = [_step_of(m, inputs) for m, inputs in zip(self.members, self._batches)]
        self._states: dict[int, dict[str, Tensor]] = {}
        self._training: dict[int, ModelState] = {}
        self.active: tuple[int, ...] = tuple(range(len(members)))
        self.num_skipped_steps = [0] * len(members)
        self.grad_norms: Tensor | None = None
        states = [
            {k: v.detach() for k, v in state_of(m.model, m.loss_fn).items()} for m in self.members
        ]
        self._compiled = self._made(dict(enumerate(states)), checks=True)

    def __repr__(self) -> str:
        return f"<Array of {len(self.members)} models, {len(self.active)} of them training>"

    def _made(self, states: Mapping[int, Mapping[str, Tensor]], *, checks: bool) -> Compiled:
        """Compile the active models, starting from these states. The graph is compared with eager
        mode only if it ``checks``: with later weights the example's loss need not be finite."""
        active = self.active
        captures = [self._captures[i] for i in active]
        own = [states[i] for i in active]
        self.fused: Fused = fuse(captures, own, shares_batch=self.shares_batch)
        stacked = StackedModels(
            self.fused,
            [self._steps[i] for i in active],
            [c.signature for c in captures],
            own,
        )
        example = self._tensors([split_inputs(self._batches[i]) for i in active])
        inputs = tuple(example)
        return self._start(stacked, self.fused.captured, inputs, self._options(), checks)

    def _options(self) -> ArrayOptions:
        models = []
        for place, index in enumerate(self.active):
            member, capture_ = self.members[index], self._captures[index]
            slices = {part.target: part for part in self.fused.slices[place]}
            by_name = {str(v.target): v for v in capture_.graph.parameters if v.differentiable}
            reached = capture_.graph.reached
            names = state_of(member.model, member.loss_fn)
            trained = [by_name[name] for name in names if name in by_name]
            models.append(
                ModelOptions(
                    trained=tuple(
                        RowRef(name=slices[str(v.target)].name, row=slices[str(v.target)].row)
                        for v in trained
                    ),
                    buffers=tuple(
                        RowRef(name=s.name, row=s.row)
                        for s in slices.values()
                        if not s.is_parameter
                    ),
                    optimizer=member.optimizer,
                    without_gradient=frozenset(
                        number for number, v in enumerate(trained) if v.index not in reached
                    ),
                    lr_scheduler=checked_scheduler(member.lr_scheduler),
                    max_grad_norm=member.max_grad_norm,
                    seed=member.seed,
                )
            )
        return ArrayOptions(models=tuple(models), losses=LOSSES)

    # --- training ------------------------------------------------------------------------------

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one training step of every active model; returns their losses, ``[num_active]``.

        Losses are in the order of ``active`` as it was before the step. With one batch, passed as
        to a model, all models train on it. With a single list that has a batch for each active
        model (a tuple of arguments, or a mapping), each model trains on its own.

        A model whose loss or gradients are not finite does not hold up the others: with
        ``nonfinite="skip"`` its update is skipped; with ``"leave"`` it leaves the array with the
        weights it had before the step. With ``"raise"``, the default, no model is updated, and
        NonFiniteError names those models.

        Raises InputError where every model has left, for a list of batches where the array was
        compiled for a shared batch, and for inputs that differ from the example in structure, shape
        or dtype.
        """
        if not self.active:
            raise InputError("every model has left this array, so there is nothing to train")
        tensors = self._call_tensors(args, kwargs)
        rows = self._compiled.train_step(*tensors)
        self.grad_norms = rows[NORM]
        losses, updated = rows[LOSS], rows[UPDATED].bool().tolist()
        wrong = [index for index, took in zip(self.active, updated) if not took]
        if wrong and self._raises:
            bad = [i for i, norm, loss in zip(self.active, rows[NORM], losses)
                   if not (norm.isfinite() and loss.isfinite())]  # fmt: skip
            raise NonFiniteError(
                f"the loss or a gradient of model {', '.join(map(str, bad))} is not finite; "
                "nothing has changed for any model. Let it leave the array with array.leave(i) and "
                "go on, or compile with nonfinite='leave' or 'skip', by which no model holds up "
                "another"
            )
        for index in wrong:
            self.num_skipped_steps[index] += 1
        if wrong and self._nonfinite_leaves:
            self.leave(*wrong)
        return losses.to(self.fused.loss_dtype)

    def _call_tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        num = len(self.active)
        is_own = len(args) == 1 and not kwargs and has_batches(args[0], num, "the argument")
        if is_own and self.shares_batch:
            raise InputError(
                "this array was compiled for one batch that all models share, and is given a list "
                "of batches; compile it with example_inputs=[batch_0, ..., batch_n], a batch for "
                "each model, in which case train_step takes both"
            )
        return self._tensors(
            [split_inputs(batch) for batch in args[0]] if is_own else [(args, kwargs)] * num
        )

    def _tensors(self, calls: Sequence[Call]) -> list[Tensor]:
        """The inputs of the array, from the arguments of a call of each active model."""
        signatures = [self._captures[i].signature for i in self.active]
        if self.shares_batch:
            return signatures[0].flatten(*calls[0])
        flat = [s.flatten(*call) for s, call in zip(signatures, calls)]
        return [torch.stack(list(tensors)) for tensors in zip(*flat)]

    def leave(self, *numbers: int) -> None:
        """Remove models from training; each keeps its state, and the others continue unchanged.

        The memory of the removed models is freed: the rest are compiled as a smaller array. If that
        fails, every model leaves, each with its state. Raises InputError for a model that is not
        active, and without numbers.
        """
        if not numbers:
            raise InputError("no model is named; pass the numbers of those that leave: leave(0, 2)")
        numbers = tuple(self._active_number(index) for index in numbers)
        states = {i: self._state(i) for i in self.active}
        training = dict(zip(self.active, self._compiled.model_states()))
        self._states |= states
        self._training |= training
        self._compiled.close()
        staying = tuple(i for i in self.active if i not in numbers)
        self.active = staying
        if not staying:
            return
        try:
            self._compiled = self._made(states, checks=False)
            self._compiled.load_model_states([training[i] for i in staying])
        except BaseException as error:
            self.active = ()
            error.add_note(
                "Every model has left the array, each with its last state: array.model(i), or "
                "array.snapshot(i) to restore it in an array that is compiled anew"
            )
            raise
        for index in staying:
            del self._states[index], self._training[index]

    # --- state ---------------------------------------------------------------------------------

    def _state(self, index: int) -> dict[str, Tensor]:
        """A model's tensors, by their names in its graph."""
        return self._state_of(self.active.index(index), self._compiled.full_state_dict())

    def _state_of(self, place: int, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `_state`, of the model in a place of the array, from its whole state."""
        rows = rows_of(self.fused.slices[place], held)
        return {name: tensor.clone() for name, tensor in rows.items()}

    def state_dict(self, index: int) -> dict[str, Tensor]:
        """A model's current weights and buffers, under the keys of its own ``state_dict()``.

        Raises InputError for a number that is not in the array.
        """
        return self.model(index).state_dict()

    def model(self, index: int) -> nn.Module:
        """A copy of a model with its current weights and buffers.

        Raises InputError for a number that is not in the array.
        """
        index = self._number(index)
        state = self._state(index) if index in self.active else self._states[index]
        model = copy_with(lambda x: x.detach().clone(), self.members[index].model, {})
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in state:
                    tensor.copy_(state[name])
        return model

    def optimizer_state_dict(self, index: int) -> dict[str, Any]:
        """The state of a model's optimizer, as its own ``state_dict()`` would return it.

        Raises InputError for a number that is not in the array.
        """
        index = self._number(index)
        if index in self.active:
            training = self._compiled.model_states()[self.active.index(index)]
        else:
            training = self._training[index]
        return training.optimizer

    def snapshot(self, index: int) -> Snapshot:
        """All state needed to resume a model's training, for `restore` in this array or another.

        Raises InputError for a number that is not in the array.
        """
        number = self._number(index)
        return self.snapshots([number])[number]

    def snapshots(self, indices: Iterable[int] | None = None) -> dict[int, Snapshot]:
        """The snapshots of several models, by default of all, by number; see `snapshot`.

        Raises InputError for a number that is not in the array.
        """
        given = range(len(self.members)) if indices is None else indices
        wanted = [self._number(index) for index in given]
        found = {
            i: Snapshot(state=self._states[i], training=self._training[i])
            for i in wanted if i not in self.active
        }  # fmt: skip
        if len(found) < len(set(wanted)):
            held, training = self._compiled.full_state_dict(), self._compiled.model_states()
            for place, index in enumerate(self.active):
                if index in wanted:
                    state = self._state_of(place, held)
                    found[index] = Snapshot(state=state, training=training[place])
        return {index: found[index] for index in wanted}

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Set active models to states from `snapshot`, by number.

        Raises InputError for a model that is not active, for a snapshot of a model with other
        tensors or another kind of optimizer, and for one with another value of a buffer that the
        array holds once for all models.
        """
        _check_snapshots(snapshots)
        wanted = {self._active_number(index): given for index, given in snapshots.items()}
        held = self._compiled.full_state_dict()
        training, shared = self._compiled.model_states(), self._shared()
        for index, given in wanted.items():
            place = self.active.index(index)
            _check_optimizer(index, given.training.optimizer, training[place].optimizer)
            rows = rows_of(self.fused.slices[place], held)
            for name, tensor in rows.items():
                if name not in given.state or given.state[name].shape != tensor.shape:
                    raise InputError(
                        f"the snapshot for model {index} has no {name!r} of shape "
                        f"{tuple(tensor.shape)}: it was taken from another kind of model"
                    )
            for part in self.fused.slices[place]:
                tensor, new = rows[part.target], given.state[part.target]
                if part.name in shared and not _are_equal(tensor, new):
                    raise InputError(
                        f"{part.target!r} in the snapshot for model {index} differs from what this "
                        "array holds once for all its models, whose values were equal when it was "
                        "compiled; compile it from models that have the values of the snapshots"
                    )
                tensor.copy_(new)
            training[place] = given.training
        self._compiled.load_state_dict(held)
        self._compiled.load_model_states(training)

    def save(self, path: str | Path, *, allow_nonfinite: bool = False) -> None:
        """Write all models, also those that have left, with their optimizers, schedules and numbers
        of steps, to a folder: safetensors and plain JSON.

        An earlier checkpoint in the folder stays until this one is complete. Raises InputError if
        it cannot be written, or a weight of a model that trains is not finite, unless
        ``allow_nonfinite``.
        """
        saved = Saved(
            snapshots=self.snapshots(), active=self.active,
            num_skipped_steps=self.num_skipped_steps,
        )  # fmt: skip
        if not allow_nonfinite:
            _refuse_nonfinite(saved, path)

        def write() -> bool:
            save_array(path, saved)
            return True

        from_first_rank(write, "the checkpoint")

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote, on these devices or others; every model goes on as if it had not
        stopped.

        Models that had left when it was written leave this array too. No code in it is run. Raises
        InputError, and changes nothing, if it is damaged, of other models or optimizers, or if a
        model that trains in it has left this array.
        """
        held = self.snapshots()
        saved = from_first_rank(lambda: load_array(path, held), "the checkpoint")
        for index in saved.active:
            if index not in self.active:
                raise InputError(
                    f"model {index} trains in the checkpoint in {path!s}, and has left this "
                    "array; compile the array anew and load it there"
                )
        for index, own in held.items():
            _check_fits(path, index, saved.snapshots[index], own)
        self.restore({index: saved.snapshots[index] for index in self.active})
        self.num_skipped_steps = list(saved.num_skipped_steps)
        for index in set(held) - set(self.active):
            self._states[index] = dict(saved.snapshots[index].state)
            self._training[index] = saved.snapshots[index].training
        if gone := [index for index in self.active if index not in saved.active]:
            self.leave(*gone)

    def _shared(self) -> set[str]:
        """The tensors that the array holds once for several models, by name."""
        once = Counter(s.name for own in self.fused.slices for s in own if s.row is None)
        return {name for name, num in once.items() if num > 1}

    def _active_number(self, index: int) -> int:
        """`_number`, of a model that still trains."""
        index = self._number(index)
        if index not in self.active:
            raise InputError(
                f"model {index} does not train in this array any more; those that do are "
                f"{list(self.active)}"
            )
        return index

    def _number(self, index: int) -> int:
        """The index as an int; raises InputError where no model has it."""
        try:
            number = operator.index(index)
        except TypeError:
            number = -1
        if not 0 <= number < len(self.members):
            raise InputError(
                f"there is no model {index!r} in an array of {len(self.members)}; pass a number "
                f"from 0 to {len(self.members) - 1}, such as array.state_dict(0), and several "
                "one by one: array.leave(0, 2)"
            )
        return number

    @property
    def num_models(self) -> int:
        """The number of models compiled, including those that have left."""
        return len(self.members)

    @property
    def compiled(self) -> Compiled:
        """The compiled program of the active models."""
        return self._compiled

    @property
    def plan(self) -> Any:
        """The plan of the active models."""
        return self._compiled.plan

    def profile(self, *args: Any, num_steps: int = 10, **kwargs: Any) -> Profile:
        """Measure training steps of all active models beside the prediction; ``print`` the result.

        Takes the batch or list of batches that `train_step` takes, and trains as it does, except
        that a model whose loss or gradient is not finite is left out of a step, and stays. See
        `autopar.runtime.compiled.Compiled.profile`.
        """
        if not self.active:
            raise InputError("every model has left this array, so there is nothing to measure")
        return self._compiled.profile(*self._call_tensors(args, kwargs), num_steps=num_steps)

    def report(self) -> str:
        """A text with the fused ops, the plan, and measurements so far.

        Raises InputError if every model has left.
        """
        if not self.active:
            raise InputError("every model has left this array, so there is nothing to report")
        return f"{self.fused.describe()}\n{self._compiled.report()}"

    def figure(self, name: str = "fusion") -> tuple[Any, Any]:
        """A figure of the array and its axes, of matplotlib.

        ``name`` is "fusion", of the fused ops by model, whose numbers are
        ``autopar.fusion.figure.fusion_data(array.fused)``, or that of a figure of all active
        models, as `autopar.runtime.compiled.Compiled.figure` has. Raises InputError for another,
        and where there is nothing of it.
        """
        from autopar.fusion.figure import fusion_data, plot_fusion  # imports matplotlib

        if name == "fusion":
            return plot_fusion(fusion_data(self.fused))
        return self._compiled.measured().figure(name, others=("fusion",))

    def save_report(self, path: str | Path) -> None:
        """Write the plan's report with what was measured as one HTML file."""
        self._compiled.save_report(path)

    def _repr_html_(self) -> str | None:
        return self._compiled._repr_html_()

    def close(self) -> None:
        """Stop the workers, or leave the process group if it was joined here."""
        self._compiled.close()


def _refuse_nonfinite(saved: Saved, path: str | Path) -> None:
    for index in saved.active:
        for name, x in saved.snapshots[index].state.items():
            if x.is_floating_point() and not bool(x.isfinite().all()):
                raise InputError(
                    f"{name!r} of model {index} holds numbers that are not finite, so nothing is "
                    f"written to {path!s}: let the model leave the array, or save it all the same: "
                    "array.save(path, allow_nonfinite=True)"
                )


def _check_fits(path: str | Path, index: int, saved: Snapshot, own: Snapshot) -> None:
    """Raise InputError for a saved model with other tensors or another schedule."""
    shapes, found = ({n: tuple(x.shape) for n, x in s.state.items()} for s in (own, saved))
    if shapes != found:
        name = min(n for n in {*shapes, *found} if shapes.get(n) != found.get(n))
        raise InputError(
            f"the checkpoint in {path!s} does not fit: {name!r} of model {index} has shape "
            f"{found.get(name, 'none')} there and {shapes.get(name, 'none')} here; compile the "
            "models that were saved, in the same order"
        )
    given, held = saved.training.scheduler, own.training.scheduler
    if held is not None:
        check_plain_state(given, held, str(path))


def _check_snapshots(given: object) -> None:
    """Raise InputError unless it is a mapping to snapshots."""
    held = given.values() if isinstance(given, Mapping) else [given]
    wrong = [type(each).__name__ for each in held if not isinstance(each, Snapshot)]
    if wrong or not isinstance(given, Mapping):
        raise InputError(
            f"restore is given a {(wrong or ['Snapshot'])[0]}; pass a mapping from models' numbers "
            "to what snapshot returned: array.restore({0: array.snapshot(0)})"
        )


def _check_optimizer(index: int, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise InputError for the state of an optimizer with other options."""
    theirs, ours = ([sorted(group) for group in state["param_groups"]] for state in (given, own))
    if theirs != ours:
        raise InputError(
            f"the snapshot for model {index} is of an optimizer with other options or groups than "
            f"the one that the array was compiled with: {theirs} instead of {ours}; compile the "
            "array with the optimizer of the snapshot"
        )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether all values are equal, NaN to NaN."""
    return one.dtype == other.dtype and bool(torch.isclose(one, other, 0, 0, True).all())


def _step_of(member: Member, inputs: Any) -> Step:
    args, kwargs = split_inputs(inputs)
    targets = None
    if member.loss_fn is not None:
        targets = find_targets(member.loss_fn, member.model, args, kwargs)
    return Step(member.model, member.loss_fn, targets, with_loss=True)


def _captures_of(members: Sequence[Member], batches: Sequence[Any]) -> list[Captured]:
    """The capture of each model; models that differ only in the values of tensors share one."""
    found: list[Captured] = []
    known: dict[bytes, Captured] = {}
    for member, inputs in zip(members, batches):
        refuse_hooks(member.model)  # no key has them
        key = capture_key(member.model, member.loss_fn, inputs) if len(members) > 1 else None
        captured = None if key is None else known.get(key)
        if captured is None:
            captured = capture(member.model, inputs, loss_fn=member.loss_fn, full_masks=())
            if key is not None:
                known[key] = captured
        found.append(captured)
    return found
