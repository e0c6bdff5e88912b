"""Which arguments of a call belong to the loss function rather than to the model.

Input: ``loss_fn``, the model, and the arguments of one call. Output: `Targets`, which separates
them. Arguments are bound as Python binds them: required arguments of ``loss_fn`` come from the
keyword inputs of the same name and the last positional inputs; optional ones (with defaults) from
the arguments that the model itself does not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean

LossFn = Callable[..., Tensor]


def check_loss_fn(loss_fn: Any) -> None:
    """Raise InputError for a loss that cannot be called with an output and its targets, or that
    has parameters to train."""
    if isinstance(loss_fn, nn.Module):
        for name, parameter in loss_fn.named_parameters():
            if parameter.requires_grad:
                raise InputError(
                    f"loss_fn has the trainable parameter {name!r}, and only the model's are "
                    "trained: make loss_fn a part of the model, whose forward() then returns the "
                    "loss, or freeze it by loss_fn.requires_grad_(False)"
                )
    if loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, type)):
        return
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise InputError(f"loss_fn is the class {name}; pass an instance: loss_fn={name}()")
    raise InputError(
        f"loss_fn is {loss_fn!r}; it must be a function of the model's output and its targets, "
        "such as loss_fn=torch.nn.functional.cross_entropy"
    )


def checked_loss(loss: Any, *, of: str) -> Tensor:
    """``loss`` if it is one floating-point number; raises InputError otherwise."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    got = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        got = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}"
    raise InputError(
        f"{of} is {got}; a model is trained on one floating-point number: the mean or sum of its "
        "losses, as in loss_fn=lambda output, target: "
        "torch.nn.functional.cross_entropy(output, target, reduction='none').mean()"
    )


@dataclass(frozen=True, slots=True)
class Targets:
    """The arguments of a call that go to ``loss_fn``: the last positional ones and these keywords.

    ``names``: the parameters of ``loss_fn``, in order, that get an argument by position or name;
    ``filled``: those that the positional targets fill. Any more positional targets follow them.
    """

    num_positional: int
    keywords: tuple[str, ...]
    names: tuple[str, ...]
    filled: tuple[str, ...]

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[tuple[Any, ...], dict[str, Any]]]:
        """The model's positional and keyword arguments, and those of ``loss_fn``."""
        cut = len(args) - self.num_positional
        values = {name: kwargs[name] for name in self.keywords}
        values.update(zip(self.filled, args[cut:]))
        leading = []
        for name in self.names:
            if name not in values:
                break
            leading.append(values.pop(name))
        further = args[cut + len(self.filled) :]
        rest = {k: v for k, v in kwargs.items() if k not in self.keywords}
        return args[:cut], rest, ((*leading, *further), values)


def find_targets(
    loss_fn: LossFn, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Targets:
    """The split of a call's arguments; raises InputError where ``loss_fn`` lacks one."""
    positional, named, takes_more = _parameters(loss_fn)
    model_names, model_room = _room(model)
    needed = [p.name for p in (*positional, *named) if p.default is p.empty]
    keywords = tuple(
        p.name
        for p in (*positional, *named)
        if p.name in kwargs and p.kind is not p.POSITIONAL_ONLY
        if p.name in needed or not (model_names is None or p.name in model_names)
    )
    open_names = [p.name for p in positional if p.name not in keywords]
    num_needed = sum(name in needed for name in open_names)
    lacking = [p.name for p in named if p.name in needed and p.name not in keywords]
    if num_needed > len(args) or lacking:
        raise InputError(
            f"loss_fn takes {len(needed)} targets {needed} but the inputs hold only {len(args)} "
            f"positional values and keywords {sorted(kwargs)}; pass "
            "example_inputs=(*model_inputs, *targets)"
        )
    spare = 0 if model_room is None else max(len(args) - num_needed - model_room, 0)
    num = num_needed + (spare if takes_more else min(spare, len(open_names) - num_needed))
    return Targets(num, keywords, tuple(p.name for p in positional), tuple(open_names[:num]))


def check_takes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Targets | None
) -> None:
    """Raise InputError if the call has more arguments than the model takes, such as targets, or if
    ``loss_fn`` takes one that the model lacks."""
    num_given = len(args)
    if targets is not None:
        args, kwargs, _ = targets.take(args, dict(kwargs))
        if lacking := _lacking(model, args, kwargs):
            taken = f"the inputs are keywords {sorted(kwargs)}"
            if targets.filled:
                taken = (
                    f"loss_fn takes the last {len(targets.filled)} of the {num_given} positional "
                    f"values as {', '.join(map(repr, targets.filled))}"
                )
            raise InputError(
                f"{type(model).__name__}.forward lacks {', '.join(map(repr, lacking))}: {taken}; "
                "pass example_inputs=(*model_inputs, *targets), or both by name"
            )
    names, room = _room(model)
    spare = [] if room is None else [f"positional value {i + 1}" for i in range(room, len(args))]
    unknown = [] if names is None else [name for name in kwargs if name not in names]
    if not spare and not unknown:
        return
    what = f"{type(model).__name__}.forward takes no {' and no '.join([*spare, *unknown])}"
    if targets is None:
        fix = (
            "If these are targets, pass what computes the loss: "
            "loss_fn=torch.nn.functional.cross_entropy, with example_inputs=(inputs, targets)"
        )
    else:
        num = targets.num_positional
        fix = f"loss_fn takes {num} of the positional values as targets; leave these out"
    hint = "".join(did_you_mean(name, names or ()) for name in unknown[:1])
    raise InputError(f"{what}{hint or '.'} {fix}")


def without_targets(
    loss_fn: LossFn, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's own arguments of a call whose targets go to ``loss_fn``."""
    args, kwargs, _ = find_targets(loss_fn, model, args, kwargs).take(args, dict(kwargs))
    return args, kwargs


def _parameters(
    loss_fn: LossFn,
) -> tuple[list[inspect.Parameter], list[inspect.Parameter], bool]:
    """The parameters after the output, by position and by keyword, and whether it takes more."""
    call = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        found = list(inspect.signature(call).parameters.values())
    except ValueError as error:
        name = getattr(loss_fn, "__name__", "f")
        raise InputError(
            f"loss_fn={name} has no signature that Python can read; write "
            f"loss_fn=lambda output, target: {name}(output, target)"
        ) from error
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    named = [p for p in found if p.kind is p.KEYWORD_ONLY]
    return positional, named, any(p.kind is p.VAR_POSITIONAL for p in found)


def _taken_by(model: nn.Module) -> list[inspect.Parameter] | None:
    """The parameters of the model's forward; None if Python cannot read them."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except ValueError:
        return None


def _lacking(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The required parameters of the model's forward that a call does not give."""
    taken = _taken_by(model) or []
    positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in taken if p.kind is p.KEYWORD_ONLY]
    open_ones = [*positional[len(args) :], *named]
    return [p.name for p in open_ones if p.default is p.empty and p.name not in kwargs]


def _room(model: nn.Module) -> tuple[frozenset[str] | None, int | None]:
    """The keywords and number of positional arguments that a model takes; None for any."""
    found = _taken_by(model)
    if found is None:
        return None, None
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in found}
    names = frozenset(p.name for p in found)
    return (
        None if inspect.Parameter.VAR_KEYWORD in kinds else names,
        None if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional),
    )
