"""The gradient check: a captured graph must compute what the user's model does, gradients included.

Exporting a model, and every rewrite after it, can lose a gradient silently: an operator with a
wrong derivative in torch, a region hidden from autograd. So before anything is built on a graph,
one of its steps is run on the example inputs and compared with a step of the model itself in eager
mode: loss, outputs, buffers and the gradient of every parameter. Input: the capture and its model.
Output: nothing, or a `GradientError` that names the first operator that differs.

Both run on one device, forward and backward, without an update, and the model runs forward twice
more, for the state that a call leaves in Python objects: less than three eager steps. Where its
memory does not suffice, a smaller batch is captured for the check, and where the gradients do
not fit, those of the first blocks are checked.
"""

from __future__ import annotations

import collections
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError, GradientError, InputError
from autopar.base.free_memory import free_bytes
from autopar.base.torch_private import pytree, returns_views
from autopar.frontend.capture import Captured, capture, split_inputs
from autopar.frontend.checking.difference import first_difference
from autopar.frontend.checking.failing import failure_of
from autopar.frontend.checking.trial import Numbers, Trial, norm_of, off_by
from autopar.frontend.full_masks import with_full_masks
from autopar.frontend.signature import Arguments
from autopar.frontend.targets import LossFn
from autopar.ir.graph import Graph, ValueKind

_log = logging.getLogger(__name__)

_SHARE_OF_MEMORY = 0.5
"""The share of free memory used; the rest is for kernels' workspaces and other processes."""
_FLOOR = 32
"""Tolerance of one gradient, in roundings of the norm of all gradients: some are zero but for
rounding errors (a bias before a batch norm, or that of an attention's keys)."""
_NOISE = 10
"""Tolerance of the capture, in multiples of the effect of each parameter's last digit."""
_RUNS_OF_A_MODEL_THAT_DRAWS = 3


def compare_with_eager(
    captured: Captured,
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise GradientError where the graph and the model differ by more than rounding.

    ``device``: where both run, by default where the model's parameters are. A model on the meta
    device or without a loss is not checked, nor one whose check does not fit the memory; all but a
    missing loss are logged. Raises InputError where the model itself fails on the example inputs.
    """
    if captured.graph.loss is None:
        return
    call = Arguments(*split_inputs(example_inputs))
    call = with_full_masks(call, captured.signature.full_masks)
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(tuple(call))]
    devices = {x.device for x in tensors if isinstance(x, Tensor)}
    if any(d.type == "meta" for d in devices):
        _log.info("the gradient check was left out: there is no data on the meta device")
        return
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    trial = _fitting(captured, model, loss_fn, call, device)
    if trial is None:
        return
    try:
        expected = trial.eager()
    except Exception as error:
        if failed := failure_of(lambda last: trial.eager(recording=last, warns=True)):
            raise failed from error
        _log.warning(
            "the gradient check was left out: the model did not run, and then did: %s: %s",
            type(error).__name__, error,
        )  # fmt: skip
        return
    _check_state(trial, expected)
    _compare(trial, expected)


def _check_state(trial: Trial, expected: Numbers) -> None:
    """Raise GradientError where a call depends on what an earlier one left in Python objects."""
    try:
        again, changed = trial.second_call()
    except Exception as error:
        raise GradientError(
            f"the model runs once and not a second time: {type(error).__name__}: {error}. A "
            "compiled model repeats what the first call did; keep what changes from call to call "
            "in buffers"
        ) from error
    wrong = list(_differences(again, expected, trial.graph))
    attributes = f" (attribute {', '.join(map(repr, changed))})" if changed else ""
    if wrong and not expected.loss.isfinite():
        raise InputError(
            f"the loss of the example inputs is {expected.loss.item()} in eager mode, so nothing "
            "can be compared with it; pass example inputs with a finite loss (an empty batch has "
            "none), or check_gradients=False"
        )
    if wrong and not trial.draws_elsewhere:
        raise GradientError(
            f"the model keeps state outside of its parameters and buffers{attributes}: {wrong[0]} "
            "in a second call with the same inputs, parameters, buffers and random numbers. A "
            "compiled model repeats what the first call did. Register such state as a buffer, "
            "change it by tensor operations, and choose by torch.where"
        )
    if changed:
        warnings.warn(
            f"a call of the model changes a number that it keeps in Python{attributes}, which a "
            "compiled step does not: it repeats what the first call did. Where later steps should "
            "depend on that number, register it as a buffer",
            stacklevel=2,
        )


def check_trainable(graph: Graph) -> None:
    """Raise InputError for a loss that depends on no trainable parameter."""
    if graph.loss is None or graph.values[graph.loss].differentiable:
        return
    frozen = not any(p.differentiable for p in graph.parameters)
    reason = "none of its parameters requires a gradient"
    fix = "set requires_grad=True on those that shall be trained: model.requires_grad_()"
    if not frozen:
        reason = "the loss depends on no parameter that requires a gradient"
        fix = "look for detach(), torch.no_grad() or rounding on the way to the loss"
    raise InputError(f"the model cannot be trained: {reason}; {fix}. To run it only, leave out "
                     "optimizer=")  # fmt: skip


def _compare(trial: Trial, expected: Numbers) -> None:
    if trial.draws_elsewhere:
        _check_repeats(trial, expected, _RUNS_OF_A_MODEL_THAT_DRAWS)
    try:
        got = trial.of_graph()
    except Exception as error:
        raise GradientError(
            f"the captured graph fails where the model runs: {type(error).__name__}: {error}"
        ) from error
    wrong = list(_differences(got, expected, trial.graph))
    if not wrong:
        return
    _check_repeats(trial, expected, 1)
    wrong = list(_differences(got, expected, trial.graph, _noise(trial, expected)))
    if not wrong:
        return
    raise GradientError(
        "the captured graph does not compute what the model does in eager mode: "
        f"{wrong[0]}{_others(wrong)}.\n{first_difference(trial)}.\n"
        "How to fix it: write what is computed there with other operators (out of place, without "
        "strides or hooks of your own), and report it. check_gradients=False trains the graph as "
        "it was captured, differences and all"
    )


def _check_repeats(trial: Trial, expected: Numbers, num_runs: int) -> None:
    """Raise GradientError where a second run of the model itself computes something else."""
    for _ in range(num_runs):
        again = list(_differences(trial.eager(), expected, trial.graph))
        if again:
            raise GradientError(
                f"the model computes another result each time: {again[0]}, between two runs with "
                "the same random numbers of torch. A captured model would always do what it did "
                "when it was captured. Draw with torch instead of random or numpy, choose by "
                "torch.where, and keep what changes from step to step in buffers"
            )


def _others(wrong: Sequence[str]) -> str:
    return f", and {len(wrong) - 1} more differences" if len(wrong) > 1 else ""


def _quantities(numbers: Numbers) -> Iterator[tuple[str, Tensor | None]]:
    yield "the loss", numbers.loss
    for index, output in enumerate(numbers.outputs):
        yield f"output {index}", output
    for name, buffer in numbers.buffers.items():
        yield f"the buffer {name!r} after a step", buffer
    for name, gradient in numbers.gradients.items():
        yield f"the gradient of {name!r}", gradient


def _differences(
    got: Numbers, expected: Numbers, graph: Graph, noise: Mapping[str, float] | None = None
) -> Iterator[str]:
    """Texts on what differs by more than rounding, or than ``noise``."""
    eps = _rounding(graph)
    tolerance = eps**0.5
    given = [g for g in expected.gradients.values() if g is not None]
    all_gradients = sum(norm_of(g) ** 2 for g in given) ** 0.5
    theirs = dict(_quantities(expected))
    for what, ours in _quantities(got):
        if what not in theirs:
            continue
        off, size = off_by(ours, theirs[what])
        is_gradient = what.startswith("the gradient")
        allowed = tolerance * size + _FLOOR * eps * (all_gradients if is_gradient else size)
        if noise is not None:
            allowed = max(allowed, _NOISE * noise[what])
        if not off <= allowed:
            relative = off / size if size else float("inf")
            yield (
                f"{what} is off by {off:.3g} ({relative:.2g} of its norm {size:.3g}, where "
                f"{allowed:.2g} is rounding)"
            )


def _rounding(graph: Graph) -> float:
    """The coarsest rounding of any value that a gradient flows through."""
    dtypes = {v.dtype for v in graph.values if v.differentiable}
    dtypes |= {graph.values[graph.loss].dtype} if graph.loss is not None else set()
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _noise(trial: Trial, expected: Numbers) -> dict[str, float]:
    """How much each quantity changes with the last digit of all parameters."""
    eps = _rounding(trial.graph)
    found: dict[str, float] = collections.defaultdict(float)
    for seed in range(2):
        generator = torch.Generator(trial.device).manual_seed(seed)

        def change(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            if not (x.is_floating_point() or x.is_complex()):
                return x
            draws = torch.rand(x.shape, generator=generator, device=x.device)
            return x * (1 + eps * (draws < 0.5).to(x.dtype))

        changed = dict(_quantities(trial.eager(change)))
        for what, theirs in _quantities(expected):
            found[what] = max(found[what], off_by(changed.get(what), theirs)[0])
    return found


def _fitting(
    captured: Captured,
    model: nn.Module,
    loss_fn: LossFn | None,
    call: Arguments,
    device: torch.device,
) -> Trial | None:
    """The whole batch and all gradients, or as much of both as fits the device."""
    limit = _SHARE_OF_MEMORY * free_bytes(device)
    trainable = [str(p.target) for p in captured.graph.parameters if p.differentiable]
    trainable = trainable or [n for n, p in model.named_parameters() if p.requires_grad]
    rows = _num_rows(call)
    while _needed_bytes(captured.graph, model, trainable) > limit and rows > 1:
        rows //= 2
        smaller = _first_rows(call, rows)
        try:
            captured = capture(
                model, smaller, loss_fn=loss_fn, precision=captured.precision,
                full_masks=captured.signature.full_masks,
            )  # fmt: skip
        except AutoparError as error:
            _log.info("a batch of %d rows cannot be captured for the check: %s", rows, error)
            break
        call = smaller
    while _needed_bytes(captured.graph, model, trainable) > limit and len(trainable) > 1:
        trainable = trainable[: len(trainable) // 2]
    if _needed_bytes(captured.graph, model, trainable) > limit:
        _log.warning("the gradient check was left out: %s has no room for one batch", device)
        return None
    return Trial(captured, model, loss_fn, call, device, trainable)


def _needed_bytes(graph: Graph, model: nn.Module, trainable: Sequence[str]) -> int:
    """Bytes of a copy of the model, both sides' gradients, and all activations of one side."""
    named = dict(model.named_parameters())
    state = sum(x.nbytes for x in (*named.values(), *model.buffers()))
    gradients = sum(named[name].nbytes for name in trainable if name in named)
    views = {o for op in graph.ops if returns_views(op.target) for o in op.outputs}
    activations = sum(
        v.size_bytes for v in graph.values
        if v.kind is ValueKind.ACTIVATION and v.index not in views
    )  # fmt: skip
    return state + 2 * gradients + activations


def _num_rows(call: Arguments) -> int:
    """The most common first size of the inputs; 0 without any."""
    leaves = pytree.tree_leaves(tuple(call))
    sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()]
    return collections.Counter(sizes).most_common(1)[0][0] if sizes else 0


def _first_rows(call: Arguments, rows: int) -> Arguments:
    whole = _num_rows(call)

    def cut(x: Tensor) -> Tensor:
        return x[:rows] if x.dim() and x.shape[0] == whole else x

    return Arguments(*pytree.tree_map_only(Tensor, cut, tuple(call)))
