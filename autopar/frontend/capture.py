"""Capture: an ordinary ``nn.Module`` and example inputs become a `Graph`.

``torch.export`` (non-strict) runs the model's own Python once over fake CPU tensors, so nothing is
allocated and parameters may be on the meta device. The exported graph is made functional, then read
into autopar's own frozen types: metadata checks and tuple indexing disappear, tied parameters get
one name, everything that depends on neither parameters nor inputs (masks, positions) moves to the
front, and the rest is cut into blocks by module path.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.base.accelerators import cpu_by_default
from autopar.base.errors import CaptureError, InputError
from autopar.base.exclusive import in_turn
from autopar.base.gc_pause import collector_paused
from autopar.base.source_files import is_users
from autopar.base.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    data_dependent_errors,
    keyed_leaves,
    pytree,
    without_detected_masks,
    without_generated_code,
    without_logs_of_missing_data,
)
from autopar.frontend.assignments import HeldTensors
from autopar.frontend.attention_masks import masks_of_eager_mode
from autopar.frontend.autocast import refuse_autocast
from autopar.frontend.checking.failing import failure_of, first_line
from autopar.frontend.copies import copy_with
from autopar.frontend.decomposition import decomposed
from autopar.frontend.full_masks import FullMasks, full_masks_of
from autopar.frontend.low_precision import call_model, in_single
from autopar.frontend.overlaps import refuse_overlaps
from autopar.frontend.reader import DATA_DEPENDENT_FIX, ProgramReader
from autopar.frontend.rewrites.counting_indices import free_counted_dimensions
from autopar.frontend.rewrites.custom_functions import functions_as_operators
from autopar.frontend.rewrites.data_dependent import isolate_composites, isolate_regions
from autopar.frontend.rewrites.disabled_dropout import leave_out_disabled_dropout
from autopar.frontend.rewrites.hidden_writes import show_hidden_writes
from autopar.frontend.rewrites.loss_offsets import offsets_as_tensors
from autopar.frontend.rewrites.masked_writes import select_by_masks
from autopar.frontend.rewrites.no_grad_regions import (
    detach_at_once,
    detach_what_leaves,
    inline_no_grad_regions,
)
from autopar.frontend.rewrites.random_slopes import draw_slopes
from autopar.frontend.rewrites.selected_losses import sum_losses_by_rows
from autopar.frontend.rewrites.strided_access import index_strided_access
from autopar.frontend.signature import Arguments, InputSlot, Signature
from autopar.frontend.targets import (
    LossFn,
    Targets,
    check_loss_fn,
    check_takes,
    checked_loss,
    find_targets,
)
from autopar.frontend.untraced import (
    refuse_averages_over_all_batches,
    refuse_hooks,
    refuse_packed,
    refuse_running_statistics,
    untraced_calls,
)
from autopar.ir.graph import Graph, verify
from autopar.ir.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A graph, the signature of the model it was captured from, and its mixed precision."""

    graph: Graph
    signature: Signature
    precision: Precision | None = None


class _OutputNote:
    """The structure of the model's output, noted while it is traced.

    torch.export reverts what tracing changes on a module, but not on an object that it holds.
    """

    def __init__(self) -> None:
        self.spec: Any = None
        self.leaves: tuple[Any, ...] = ()


class Step(nn.Module):
    """The model together with its loss: returns (loss or None, flat output tensors).

    ``within`` is entered around each call of the model and its loss. ``full`` is told of each call
    that is traced.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        targets: Targets | None,
        *,
        with_loss: bool,
        within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        precision: Precision | None = None,
        full: FullMasks | None = None,
    ) -> None:
        super().__init__()
        self.within = within
        self.full = full
        self.with_loss = with_loss
        self.precision = precision
        self.model = model
        self.loss_fn = loss_fn
        self.targets = targets
        self.output = _OutputNote()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        target_args: tuple[Any, ...] = ()
        target_kwargs: dict[str, Any] = {}
        if self.full is not None:
            self.full.trace(args, kwargs)
        if self.targets is not None:
            args, kwargs, (target_args, target_kwargs) = self.targets.take(args, kwargs)
        held = HeldTensors(self) if torch.compiler.is_exporting() else None
        with self.within(), _without_printed_graphs():
            output = call_model(self.model, args, kwargs, self.precision)
            loss = self._loss(output, target_args, target_kwargs) if self.with_loss else None
        leaves, self.output.spec = pytree.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if held is not None:
            tensors = held.write_assigned(tensors)
        kept = iter(range(len(tensors)))
        self.output.leaves = tuple(
            InputSlot(next(kept)) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves
        )
        return (loss, *tensors)

    def _loss(self, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        if self.loss_fn is None:
            loss: Tensor | None = in_single(find_loss(output), self.precision)
            return loss
        output = in_single(output, self.precision)
        return checked_loss(self.loss_fn(output, *args, **kwargs), of="what loss_fn returns")


class _NeedsData(RuntimeError):
    """A trace that fails for lack of data, under a message for which torch prints no graph."""


@contextlib.contextmanager
def _without_printed_graphs() -> Iterator[None]:
    try:
        yield
    except data_dependent_errors() as error:
        if not torch.compiler.is_exporting():
            raise
        raise _NeedsData("a value is read") from error


def _plain(leaf: Any) -> Any:
    """Constants among the outputs are kept; other objects (caches) become None."""
    return leaf if isinstance(leaf, int | float | str | bool | type(None)) else None


def find_loss(output: Any) -> Tensor | None:
    """The loss in what a model returns, None if there is none."""
    if isinstance(output, Tensor):
        return output if output.numel() == 1 and output.is_floating_point() else None
    if isinstance(output, tuple | list) and output and not hasattr(output, "loss"):
        return find_loss(output[0]) if isinstance(output[0], Tensor) else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return checked_loss(loss, of="the model's .loss") if isinstance(loss, Tensor) else None


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a tuple, a mapping or a single tensor."""
    if isinstance(example_inputs, Arguments):
        return tuple(example_inputs.args), dict(example_inputs.kwargs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    raise InputError(
        "example_inputs must be a tuple (positional), a mapping (keyword) or one tensor, got "
        f"{type(example_inputs).__name__}; write example_inputs=(x, y)"
    )


def check_model(model: Any) -> None:
    """Raise InputError for anything but a module."""
    if not isinstance(model, nn.Module):
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise InputError(f"model is the class {model.__name__}; pass an instance of it")
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")


@in_turn()
@collector_paused()
@cpu_by_default()
def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    training: bool | None = None,
    differentiable: bool = True,
    precision: Precision | None = None,
    full_masks: Collection[str] | None = None,
) -> Captured:
    """Capture one call of ``model`` on the global batch; the model itself is not changed.

    It is captured in its current mode, module by module, or as after ``model.train(training)``.
    With ``differentiable`` off only its forward pass is captured: the graph has no loss, and no
    gradient flows through any value. With a ``precision`` the graph begins with the casts of
    parameters and inputs (see `autopar.ir.precision`). The graph may depend on the inputs named in
    ``full_masks`` being all ones, by default those of the example inputs that are; the signature
    names those that it depends on (see `autopar.frontend.full_masks`).

    Raises CaptureError with the user's file and line where the model cannot be captured, and
    InputError for inputs that do not fit.
    """
    check_model(model)
    check_loss_fn(loss_fn)
    refuse_autocast("cpu", "the model is captured")
    refuse_packed(example_inputs)
    args, kwargs = split_inputs(example_inputs)
    targets = None if loss_fn is None else find_targets(loss_fn, model, args, kwargs)
    full = FullMasks(full_masks_of(args, kwargs) if full_masks is None else full_masks)

    def stepped(make: Callable[[Tensor], Tensor]) -> Step:
        memo: dict[int, Any] = {}
        made = Step(
            copy_with(make, model, memo),
            copy_with(make, loss_fn, memo),
            targets,
            with_loss=differentiable,
            within=untraced_calls,
            precision=precision,
            full=full,
        )
        return made if training is None else made.train(training)

    # A call under no_grad or inference_mode must give the same graph as any other.
    with torch.inference_mode(False), torch.enable_grad():
        if differentiable:
            refuse_hooks(model)
        step, program = _exported(stepped, args, kwargs, full)
    graph = ProgramReader(model, program, differentiable=differentiable).read()
    verify(graph)
    refuse_running_statistics(graph)
    refuse_overlaps(model, loss_fn, graph, program.constants)
    signature = _signature(step, graph, args, kwargs, full)
    return Captured(graph=graph, signature=signature, precision=precision)


def _exported(
    stepped: Callable[[Callable[[Tensor], Tensor]], Step], args: Any, kwargs: Any, full: FullMasks
) -> tuple[Step, Any]:
    """The model with its loss over fake tensors, and its exported program.

    ``stepped`` makes the model with its loss over other tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=False)

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    step = stepped(fake)
    refuse_averages_over_all_batches(step.model)
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs))
    with (
        without_generated_code(),
        without_logs_of_missing_data(),
        without_detected_masks(),
        masks_of_eager_mode(full),
    ):
        try:
            return step, _export(step, fake_args, fake_kwargs)
        except (CaptureError, InputError):
            raise
        except Exception as raised:
            error = raised.__cause__ if isinstance(raised, _NeedsData) else raised
            assert isinstance(error, Exception)
            with mode:  # which makes the tensors of its code fake too
                failed = _fails_without_data(stepped(fake), fake_args, fake_kwargs)
            if failed is not None:
                failed = _fails_itself(stepped, failed, (args, kwargs))
            if failed is not None and isinstance(failed.__cause__, TypeError):
                check_takes(step.model, args, kwargs, step.targets)
            raise failed or CaptureError(_explain(error)) from error


def _export(step: Step, args: Any, kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # For a forward pass alone, the recorded operators are all that is needed.
        with functions_as_operators() if step.with_loss else contextlib.nullcontext():
            exported = torch.export.export(step, args, kwargs, strict=False)
        _show_gradients(exported.graph_module)
        sum_losses_by_rows(exported.graph_module)
        isolate_composites(exported.graph_module)
        program = decomposed(exported)
        select_by_masks(program.graph_module)
        isolate_regions(program.graph_module)
        free_counted_dimensions(program.graph_module)
        offsets_as_tensors(program.graph_module)
        index_strided_access(program.graph_module)
        draw_slopes(program.graph_module)
        return program


def _show_gradients(program: fx.GraphModule) -> None:
    """Make explicit where no gradient flows, and where writes in place leave it unchanged."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule):
            without = inline_no_grad_regions(module)
            detach_at_once(module)
            leave_out_disabled_dropout(module)
            show_hidden_writes(module, without)
            detach_what_leaves(module, without)
            if module is not program:  # whose graph alone is read
                module.recompile()


def _fails_without_data(step: Step, args: Any, kwargs: Any) -> InputError | None:
    """The error of a model that fails without any capture, but for a lack of values."""
    failed = failure_of(lambda last: _run(step, args, kwargs, last))
    causes = DataDependentOutputException, DynamicOutputShapeException
    return None if failed is None or isinstance(failed.__cause__, causes) else failed


def _fails_itself(
    stepped: Callable[[Callable[[Tensor], Tensor]], Step],
    failed: InputError,
    call: tuple[Any, Any],
) -> InputError | None:
    """The error of a model that ``failed`` without data, if it fails on its own tensors too, where
    it has any: a lack of data may be what it failed on."""
    step = stepped(_cloned)
    tensors = [*step.parameters(), *step.buffers(), *pytree.tree_leaves(call)]
    if any(isinstance(x, Tensor) and x.is_meta for x in tensors):
        return failed
    args, kwargs = pytree.tree_map_only(Tensor, _cloned, call)
    with torch.random.fork_rng():
        own = failure_of(lambda last: _run(step, args, kwargs, last))
        if own is None or step.precision is None:
            return own
        alone = stepped(_cloned)
        alone.precision = None
        if failure_of(lambda last: _run(alone, args, kwargs, last)) is not None:
            return own
        return failure_of(
            lambda last: _run(step, args, kwargs, last),
            f"the model fails with precision={step.precision.compute!r}, and not without it",
            _PRECISION_FIX,
        )


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


_PRECISION_FIX = (
    ". Parameters and inputs are cast to the low precision, buffers and constants are not: cast "
    "what they meet, such as self.scale.to(x.dtype), or write torch.autocast into forward"
)


def _run(step: Step, args: Any, kwargs: Any, within: Any) -> None:
    step.within = contextlib.nullcontext  # as without capture: a mode of ours changes ``.data``
    with within:
        step(*args, **kwargs)


_OUTPUT_TYPE = (
    "Return tensors, tuples, dicts or dataclasses registered with torch.export:\n"
    "    torch.export.register_dataclass(MyOutput)"
)
_GENERIC = (
    "Check it with\n    torch.export.export(model, args, kwargs, strict=False)\n"
    "and see the reasons it names."
)


def _explain(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if re.search(r"data.?dependent|unbacked|GuardOnData|_local_scalar_dense|nonzero", text, re.I):
        hint = DATA_DEPENDENT_FIX
    elif "output" in text and "type" in text:
        hint = _OUTPUT_TYPE
    else:
        hint = _GENERIC
    head = f"the model cannot be captured as one graph{_where(error)}"
    return f"{head}\n{type(error).__name__}: {first_line(error)}\nHow to fix it: {hint}"


def _where(error: BaseException) -> str:
    """The last frame outside torch, autopar and this module, as `` at file:line (code)``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    user = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\s+(.*)', str(error))
    user = [u for u in user if is_users(u[0])]
    if frames:
        last = frames[-1]
        return f" at {last.filename}:{last.lineno} in {last.name}: {last.line}"
    if user:
        file, line, name, code = user[-1]
        return f" at {file}:{line} in {name}: {code}"
    return ""


def _signature(step: Step, graph: Graph, args: Any, kwargs: Any, full: FullMasks) -> Signature:
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    names = keyed_leaves((tuple(args), dict(kwargs)))
    slots: list[Any] = []
    tensors: list[tuple[str, Tensor]] = []
    for leaf, name in zip(leaves, names):
        if isinstance(leaf, Tensor):
            slots.append(InputSlot(len(tensors)))
            tensors.append((name, leaf))
        else:
            slots.append(leaf)
    return Signature(
        in_spec=in_spec,
        leaves=tuple(slots),
        input_names=tuple(name for name, _ in tensors),
        input_shapes=tuple(tuple(t.shape) for _, t in tensors),
        input_dtypes=tuple(t.dtype for _, t in tensors),
        out_spec=step.output.spec,
        out_leaves=step.output.leaves,
        full_masks=tuple(name for name in names if name in full.used),
    )
