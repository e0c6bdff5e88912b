"""Checks that a user's state fits the compiled model, before any of it is loaded.

In: the state, and that of the program or the optimizer. Out: nothing, or an InputError. A rank that
failed half-way would leave the others waiting, and the state half-written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import InputError
from autopar.lowering.types import RankProgram

_OPTIMIZER_FIX = (
    "Pass what compiled.optimizer_state_dict() gave: {'state': {'head.weight': {...}}, "
    "'param_groups': [{'params': ['head.weight'], ...}]}"
)


def check_state(
    state: Any,
    keys: Sequence[tuple[str, str]],
    program: RankProgram,
    needed: Sequence[str] | None = None,
) -> None:
    """Raise InputError unless ``state`` has exactly the model's own keys and shapes.

    With ``needed`` keys other than these may be missing.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"the state is a {type(state).__name__}, not a mapping of names to tensors; load the "
            "state_dict() of the same model"
        )
    expected = dict(keys)
    wanted = expected.keys() if needed is None else set(needed)
    missing, unknown = sorted(wanted - state.keys()), sorted(state.keys() - expected, key=str)
    if missing or unknown:
        raise InputError(
            f"the state does not fit the model: missing {missing[:5]}, unknown {unknown[:5]} "
            f"({len(missing)} and {len(unknown)} in all). Load the state_dict() of the same model"
        )
    shapes = {p.name: p.shape for p in program.parameters}
    shapes.update((b.name, b.shape) for b in program.buffers)
    for key, name in keys:
        if key not in state:
            continue
        if not isinstance(state[key], Tensor):
            raise InputError(
                f"{key!r} is a {type(state[key]).__name__}, not a tensor; load the state_dict() of "
                "the same model"
            )
        if state[key].is_meta:
            raise InputError(
                f"{key!r} is on the meta device, which holds no numbers; load the state_dict() of "
                "a model with data"
            )
        if tuple(state[key].shape) != shapes[name]:
            raise InputError(
                f"{key!r} has shape {tuple(state[key].shape)}; the compiled model's is "
                f"{shapes[name]}. Load the state_dict() of the same model"
            )


def check_optimizer_state(
    state: Any,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise InputError unless ``state`` fits an optimizer whose own state is materialized.

    ``names`` has the name of each parameter by its id, ``shapes`` the whole shape by name.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        has = sorted(state, key=str) if isinstance(state, Mapping) else type(state).__name__
        raise InputError(
            f"the optimizer state has {has}, but needs 'state' and 'param_groups'. {_OPTIMIZER_FIX}"
        )
    expected = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    _check_groups(state["param_groups"], expected)
    for group, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
        _check_options(given, group)
    entries: Any = state["state"]
    known = {name for group in expected for name in group}
    if not isinstance(entries, Mapping) or not entries.keys() <= known:
        others = (
            sorted(entries.keys() - known, key=str) if isinstance(entries, Mapping) else entries
        )
        raise InputError(
            f"the optimizer state has entries for {others!r}, which are no parameters of this "
            f"optimizer. {_OPTIMIZER_FIX}"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in entries:
                held = optimizer.state.get(parameter, {})
                _check_entries(name, entries[name], held, parameter.shape, shapes[name])


def without_parameters(state: Any, names: Collection[str]) -> Any:
    """An optimizer's state dict without some parameters; anything else is returned as it is."""
    if not names or not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        return state
    entries, groups = state["state"], state["param_groups"]
    if isinstance(entries, Mapping):
        entries = {name: entry for name, entry in entries.items() if name not in names}
    if isinstance(groups, Sequence) and all(isinstance(g, Mapping) for g in groups):
        groups = [
            {**group, "params": [n for n in group.get("params", ()) if n not in names]}
            for group in groups
        ]
    return {**state, "state": entries, "param_groups": groups}


def check_plain_state(given: Any, held: Mapping[str, Any], place: str) -> None:
    """Raise InputError unless a schedule's state has the entries of ``held``, of their kinds."""
    if not isinstance(given, Mapping) or given.keys() != held.keys():
        has = sorted(given, key=str) if isinstance(given, Mapping) else type(given).__name__
        raise InputError(
            f"the checkpoint file {place!r} does not fit: its learning-rate schedule has "
            f"{_short(has)}, this one {_short(sorted(held))}. Compile with the lr_scheduler= that "
            "was saved"
        )
    for key, value in held.items():
        if _plain_kind(given[key]) not in (_plain_kind(value), "none") and value is not None:
            raise InputError(
                f"the checkpoint file {place!r} does not fit: {key!r} of its learning-rate "
                f"schedule is {_short(given[key])}; it must be of the kind of {_short(value)}"
            )


def _plain_kind(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool | str):
        return type(value).__name__
    if isinstance(value, int | float | Tensor):
        return "number"
    return "list" if isinstance(value, list | tuple) else "mapping"


def _check_groups(given: Any, expected: Sequence[Sequence[str]]) -> None:
    is_list = isinstance(given, Sequence) and all(isinstance(g, Mapping) for g in given)
    found = [list(group.get("params", ())) for group in given] if is_list else given
    if found != expected:
        raise InputError(
            f"the optimizer state is of other parameter groups: {_short(found)} instead of "
            f"{_short(expected)}; build the optimizer with the same groups as when the state was "
            f"saved. {_OPTIMIZER_FIX}"
        )


_OF_SCHEDULES = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Options that a learning-rate schedule adds to a group: there with it, gone without it."""


def _check_options(given: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """The options of this optimizer, no others, each of its kind; None is an unset flag."""
    unlike = (given.keys() ^ held.keys()) - _OF_SCHEDULES
    if unlike:
        added = sorted(map(str, unlike & given.keys()))
        lacking = sorted(unlike & held.keys())
        raise InputError(
            f"a group of the optimizer state has the options {_short(added)} that this optimizer "
            f"lacks, and lacks {_short(lacking)} that it has; load the state of an optimizer of "
            f"the same kind. {_OPTIMIZER_FIX}"
        )
    for key, value in held.items():
        if key == "params" or key not in given:
            continue
        numbers = _num_numbers(value)
        is_flag = value is None or isinstance(value, bool)
        wrong_flag = is_flag and not (given[key] is None or isinstance(given[key], bool))
        if wrong_flag or (numbers and _num_numbers(given[key]) != numbers):
            raise InputError(
                f"{key!r} of a group of the optimizer state is {given[key]!r}; it must be of the "
                f"kind of {value!r}. {_OPTIMIZER_FIX}"
            )


def _num_numbers(value: Any) -> int:
    """How many numbers an option consists of; 0 for flags and None."""
    items = value if isinstance(value, tuple | list) else (value,)
    numbers = [isinstance(v, int | float | Tensor) and not isinstance(v, bool) for v in items]
    return len(items) if all(numbers) else 0


def _check_entries(
    name: str,
    given: Any,
    held: Mapping[str, Any],
    local_shape: torch.Size,
    whole_shape: tuple[int, ...],
) -> None:
    if not isinstance(given, Mapping) or not held.keys() <= given.keys():
        has = sorted(given, key=str) if isinstance(given, Mapping) else type(given).__name__
        raise InputError(
            f"the optimizer state of {name!r} has {has}, but this optimizer keeps {sorted(held)}; "
            "load the state of an optimizer of the same kind"
        )
    for key, value in held.items():
        like_parameter = isinstance(value, Tensor) and value.dim() and value.shape == local_shape
        shape = tuple(given[key].shape) if isinstance(given[key], Tensor) else None
        if like_parameter and shape != whole_shape:
            raise InputError(
                f"{key!r} in the optimizer state of {name!r} has shape {shape}; it must be a whole "
                f"tensor of shape {whole_shape}, like its parameter. {_OPTIMIZER_FIX}"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."
