"""All uses of private torch API, each with the torch versions that have it.

No other module, but `autopar.base.torch_registrations`, imports a name with a leading underscore
from torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

# --- capture -------------------------------------------------------------------------------
# torch._subclasses.FakeTensorMode: tensors without data (2.11 to 2.13).
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# torch.optim.optimizer: the hooks that run around the steps of all optimizers (2.11 to 2.13).
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# torch.utils._pytree: flattening of nested arguments, as torch.export does it (2.11 to 2.13).
from torch.utils import _pytree as pytree

# torch.utils._python_dispatch: sees every operator that runs (2.11 to 2.13).
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.base.errors import CaptureError

__all__ = [
    "FUSED_KERNELS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "PeakOfNew",
    "TorchDispatchMode",
    "activation_memory_budget",
    "add_to_each",
    "allocations",
    "autograd_again",
    "body_of",
    "canonical_call",
    "clear_matmul_workspaces",
    "compile_graph",
    "copy_each",
    "custom_op_function",
    "data_dependent_errors",
    "default_store",
    "end_recording",
    "flop_formula",
    "has_backward_hooks",
    "has_gradient_hooks",
    "has_several_outputs",
    "has_step_hooks",
    "inlined_higher_order_body",
    "is_composite",
    "is_overload",
    "is_wrapped",
    "keyed_leaves",
    "largest_bytes",
    "lazy_graph_module",
    "norm_each",
    "outside_of_tracing",
    "overloads_named",
    "pytree",
    "runs_uncompiled",
    "without_detected_masks",
    "without_generated_code",
    "without_logs_of_missing_data",
    "without_patched_modules",
    "without_vmap_loops",
    "written_arguments",
]


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """The exceptions of a trace over fake tensors that would need their data.

    Also ``torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode`` (2.11 to 2.13), which
    is imported here as it brings sympy.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


F = TypeVar("F", bound=Callable[..., Any])


def keyed_leaves(tree: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """A readable name for each leaf of ``(args, kwargs)``: ``input_ids``, ``0``, ``batch.x``."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return [".".join(str(k).strip(".[]'") for k in path[1:]) for path, _ in pairs]


def inlined_higher_order_body(
    module: nn.Module, node: torch.fx.Node
) -> tuple[Any, tuple[Any, ...], bool] | None:
    """Body, operands and gradient mode of a higher-order op that only sets a mode, else None.

    ``wrap_with_set_grad_enabled(enabled, body, *operands)`` and
    ``wrap_with_autocast(device, dtype, enabled, cache, body, *operands)`` (2.11 to 2.13).
    """
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
    elif name == "wrap_with_autocast":
        enabled, (_, _, _, _, body, *operands) = True, node.args
    else:
        return None
    assert isinstance(body, torch.fx.Node)
    return getattr(module, str(body.target)), tuple(operands), bool(enabled)


# torch.fx._lazy_graph_module (2.11 to 2.13): a context in which graph modules generate their code
# on first use. Export makes dozens that never run.
def without_generated_code() -> contextlib.AbstractContextManager[None]:
    """Delay code generation of the graph modules made inside until they first run."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    made: contextlib.AbstractContextManager[None] = _use_lazy_graph_module(True)
    return made


def lazy_graph_module(root: nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph module whose code is generated when it first runs, not with each change.

    ``torch.fx._lazy_graph_module._make_graph_module`` (2.11 to 2.13).
    """
    from torch.fx._lazy_graph_module import _make_graph_module

    with without_generated_code():
        return _make_graph_module(root, graph)


# The loggers of torch._subclasses.fake_tensor, to which operators that fail without data write a
# stack of hundreds of lines before the exception, and of symbolic_shapes in
# torch.fx.experimental, which proposes checks by names of its own symbols (2.13).
@contextlib.contextmanager
def without_logs_of_missing_data() -> Iterator[None]:
    """Run without the logs of operators that fail on tensors without data."""
    names = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before):
            logger.disabled = was_disabled


# torch.nn.functional imports has_torch_function_variadic, by which a function tells a mode of its
# call; in its body there is no mode (2.11 to 2.13).
def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a function of ``torch.nn.functional``, without telling a mode of the call."""
    names = {**function.__globals__, "has_torch_function_variadic": lambda *_: False}
    body = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


# torch.nn.modules.transformer._detect_is_causal_mask (2.11 to 2.13): it compares the mask with a
# causal one only to take a faster kernel, which no graph can decide by values.
@contextlib.contextmanager
def without_detected_masks() -> Iterator[None]:
    """Have ``nn.Transformer`` and its parts use the mask that they are given, whatever its values,
    as with ``is_causal=False``."""
    from torch.nn.modules import transformer

    def told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    before = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


# torch.fx._symbolic_trace._Patcher (2.11 to 2.13): fx.Tracer.trace patches two methods of nn.Module
# and then their originals back. Each change invalidates the caches of all subclasses, and every
# fx.GraphModule is one, so that a trace takes the longer the more graphs there are.
@contextlib.contextmanager
def without_patched_modules() -> Iterator[None]:
    """Trace by ``make_fx`` without patching ``nn.Module``, whose methods it does not record.

    It applies to this thread alone: another one may trace modules.
    """
    from torch.fx._symbolic_trace import _Patcher

    here, patch_method = threading.get_ident(), _Patcher.patch_method

    def leave(patcher: Any, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        if threading.get_ident() != here:
            patch_method(patcher, cls, name, new_fn, deduplicate)

    _Patcher.patch_method = leave  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _Patcher.patch_method = patch_method  # type: ignore[method-assign]


def written_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of a call that an operator writes to, by its schema.

    ``torch._ops.OpOverload`` and its ``_schema`` (2.11 to 2.13).
    """
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def has_several_outputs(target: Any) -> bool:
    """Whether ``target`` is an operator that returns more than one value.

    ``torch._ops.OpOverload`` and its ``_schema`` (2.11 to 2.13). A list, such as a split returns,
    counts as one value.
    """
    return isinstance(target, torch._ops.OpOverload) and len(target._schema.returns) > 1


def is_composite(target: Any) -> bool:
    """Whether ``target`` is a composite operator that returns no view of its arguments.

    ``torch._C._dispatch_has_kernel_for_dispatch_key`` (2.11 to 2.13).
    """
    if not isinstance(target, torch._ops.OpOverload):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(target.name(), "CompositeImplicitAutograd") and not returns_views(target)


def returns_views(target: Any) -> bool:
    """Whether by its schema a result of ``target`` shares memory with an argument.

    ``torch._ops.OpOverload._schema`` (2.11 to 2.13).
    """
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


@contextlib.contextmanager
def autograd_again() -> Iterator[None]:
    """Re-enable autograd inside an operator's kernel, which runs below autograd in the dispatcher.

    ``torch._C._ForceDispatchKeyGuard`` and the thread's dispatch key sets (2.11 to 2.13). Autocast
    stays excluded.
    """
    included = torch._C._dispatch_tls_local_include_set()
    current = torch._C._dispatch_tls_local_exclude_set()
    excluded = current & torch._C._after_autograd_keyset
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith("Autocast") and current.has(key):
            excluded = excluded.add(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def outside_of_tracing() -> Any:
    """A context whose operators are not recorded by a surrounding trace.

    ``torch.utils._python_dispatch._disable_current_modes`` (2.11 to 2.13).
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def custom_op_function(target: Any) -> tuple[str, Any] | None:
    """Schema and Python function of an operator that ``torch.library.custom_op`` made, else None.

    ``torch._library.custom_ops.OPDEFS`` and ``CustomOpDef._init_fn``, ``._schema`` (2.11 to 2.13).
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(target.name().partition(".")[0])
    return None if definition is None else (definition._schema, definition._init_fn)


packs_sequences = torch._pack_padded_sequence
"""What ``torch.nn.utils.rnn.pack_padded_sequence`` calls (2.11 to 2.13)."""


def is_wrapped(value: Any) -> bool:
    """Whether a tensor is one of a transform of ``torch.func``, such as ``vmap``, outside of which
    nothing can be computed from it.

    ``torch._C._functorch.is_functorch_wrapped_tensor`` (2.11 to 2.13).
    """
    return isinstance(value, torch.Tensor) and bool(
        torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def in_reverse_mode() -> bool:
    """Whether this runs inside ``torch.func.grad``, ``vjp``, ``jacrev`` or ``hessian``.

    ``torch._functorch.pyfunctorch`` (2.11 to 2.13).
    """
    stack = retrieve_all_functorch_interpreters()
    return any(each.key() == torch._C._functorch.TransformType.Grad for each in stack)


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the transforms of ``torch.func`` have wrapped.

    ``torch._C._functorch`` (2.11 to 2.13).
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks on its gradient.

    ``Tensor._backward_hooks``, ``._post_accumulate_grad_hooks`` (2.11 to 2.13).
    """
    found = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return any(found)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its backward pass.

    ``Module._backward_hooks``, ``._backward_pre_hooks`` (2.11 to 2.13).
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


# --- memory --------------------------------------------------------------------------------
def is_profiling() -> bool:
    """Whether a profiler of torch records this thread: ``_profiler_enabled`` (2.11 to 2.13)."""
    return torch.autograd._profiler_enabled()


def allocations(profiler: torch.profiler.profile) -> list[int]:
    """Bytes of each allocation and (negative) release in a memory profile, in order.

    The events named ``[memory]`` of ``profile.profiler.kineto_results.events()`` (2.11 to 2.13);
    needs ``profile_memory=True`` and ``stop()``.
    """
    results: Any = profiler.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def largest_bytes(storage: torch.UntypedStorage) -> int:
    """The size of a traced storage in bytes; the upper bound of one that depends on data.

    ``SymInt.node`` and the bounds of its ``shape_env`` (2.11 to 2.13). Raises CaptureError for a
    size without a bound.
    """
    size: Any = storage.nbytes()
    if isinstance(size, int):
        return size
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    if not bound.is_Integer:
        raise CaptureError(
            f"the size of a tensor, {size} bytes, depends on data and has no upper bound, so the "
            "memory of a step is unknown; give it a fixed shape, for example by torch.where with a "
            "mask"
        )
    return int(bound)


def copy_each(into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others of their shapes, with few kernels.

    ``torch._foreach_copy_`` (2.11 to 2.13), for each dtype apart, as it then has one kernel.
    """
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(into, of, strict=True):
        targets, sources = by_dtype.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)


def norm_each(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The 2-norm of each tensor, computed in ``dtype``, with few kernels.

    ``torch._foreach_norm`` (2.11 to 2.13).
    """
    return torch._foreach_norm(list(tensors), 2, dtype=dtype)


def clear_matmul_workspaces() -> None:
    """Release what cuBLAS keeps for matrix products, on every stream; the next ones take it again.

    ``torch._C._cuda_clearCublasWorkspaces`` (2.11 to 2.13, in builds with CUDA).
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_recording(device: torch.device, pool: Any) -> None:
    """Let the allocator forget a recording of a CUDA graph that failed.

    ``torch._C._cuda_endAllocateToPool`` and ``_cuda_releasePool`` (2.11 to 2.13, in builds with
    CUDA), which ``torch.cuda.graph`` leaves out if the end of the recording raises.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):
            end(index, pool)


def activation_memory_budget(budget: float) -> contextlib.AbstractContextManager[None]:
    """Set how much of the activations ``torch.compile`` keeps inside: 1 all that it would, 0 least.

    ``torch._functorch.config.activation_memory_budget`` (2.11 to 2.13).
    """
    from torch._functorch import config

    patched: contextlib.AbstractContextManager[None] = config.patch(activation_memory_budget=budget)
    return patched


# --- compilation ---------------------------------------------------------------------------
def compile_graph(
    module: torch.fx.GraphModule, operands: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """A function of tensors with these shapes and strides, made by Inductor from a graph of ATen
    operators; its results have the strides of the graph's.

    ``torch._inductor.standalone_compile`` (2.11 to 2.13). It keeps compiled code on disk, as
    ``torch.compile`` does (``$TORCHINDUCTOR_CACHE_DIR``). Raises whatever Inductor raises.
    """
    from torch._inductor import standalone_compile

    with torch.no_grad():
        made: Callable[..., Any] = standalone_compile(
            module, [*operands], dynamic_shapes="from_example_inputs"
        )
    return made


# --- optimizers ----------------------------------------------------------------------------
def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has hooks before or after its steps (2.11 to 2.13)."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def steps_as_its_class(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` does what its class's does alone: no hooks, of its own or of all
    optimizers, no ``step`` set on it, and no ``GradScaler``'s scale (2.11 to 2.13).

    torch's schedulers set one that notes the first call; it does nothing new after that.
    """
    if has_step_hooks(optimizer) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    own = vars(optimizer)
    if "grad_scale" in own or "found_inf" in own:
        return False
    if "step" not in own:
        return True
    is_schedulers = getattr(own["step"], "__wrapped__", None) is type(optimizer).step
    return is_schedulers and getattr(optimizer, "_opt_called", False)


FUSED_KERNELS: Mapping[type[torch.optim.Optimizer], Callable[..., None]] = {
    torch.optim.SGD: torch._fused_sgd_,
    torch.optim.Adam: torch._fused_adam_,
    torch.optim.AdamW: torch._fused_adamw_,
}
"""The kernels that optimizers call with ``fused=True`` (2.11 to 2.13)."""


def add_to_each(tensors: Sequence[torch.Tensor], value: float) -> None:
    """Add a number to each tensor in place: ``torch._foreach_add_`` (2.11 to 2.13)."""
    torch._foreach_add_(list(tensors), value)


class PeakOfNew(TorchDispatchMode):
    """Peak bytes of the tensors that were created inside and not yet released (2.11 to 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            if (memory := tensor.untyped_storage().data_ptr()) not in self._live:
                self._known.add(memory)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            memory = storage.data_ptr()
            if memory not in self._known and memory not in self._live:
                self._live[memory] = storage.nbytes()
                weakref.finalize(tensor, self._live.pop, memory, None)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return result


class MatrixProducts(TorchDispatchMode):
    """The products of two matrices that are made inside: rows, inner size, columns and dtype of
    each (2.11 to 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int, int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func.overloadpacket in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
            one, other = args[-2:]
            made = (*one.shape[-2:], other.shape[-1], one.dtype)
            self.products += [made] * (one.shape[0] if one.dim() == 3 else 1)
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# --- rules ---------------------------------------------------------------------------------
def is_overload(target: Any) -> bool:
    """Whether ``target`` is one overload of an operator: ``torch._ops.OpOverload`` (2.11-2.13)."""
    return isinstance(target, torch._ops.OpOverload)


def flop_formula(target: Any) -> Callable[..., int] | None:
    """The function that counts the operations of a call to an overload, None if there is none.

    ``torch.utils.flop_counter.flop_registry`` by ``OpOverload._overloadpacket`` (2.11 to 2.13).
    """
    from torch.utils.flop_counter import flop_registry

    found: Callable[..., int] | None = flop_registry.get(target._overloadpacket)
    return found


def overloads_named(name: str) -> list[str]:
    """Qualified names of the functional overloads of ATen operator ``name``; none if it is unknown.

    ``OpOverload._schema.is_mutable`` (2.11 to 2.13).
    """
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    return [f"torch.ops.{o}" for o in overloads if not o._schema.is_mutable]


def canonical_call(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in torch.export's form: positional where possible, defaults omitted.

    ``OpOverload._schema`` (2.11 to 2.13). Raises TypeError for an argument the operator lacks.
    """
    schema = target._schema
    given = dict(zip((a.name for a in schema.arguments), args))
    unknown = set(kwargs) - {a.name for a in schema.arguments if a.name not in given}
    if unknown or len(args) > len(schema.arguments):
        raise TypeError(f"{target} takes {schema}; got {len(args)} arguments and {sorted(kwargs)}")
    given.update(kwargs)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    num_needed = 0
    for argument in schema.arguments:
        name, has_default = argument.name, argument.has_default_value()
        if name not in given and not has_default:
            raise TypeError(f"{target} needs {name!r}; its schema is {schema}")
        value = given.get(name, argument.default_value)
        if isinstance(argument.type, torch.ListType) and isinstance(value, int | float):
            value = [value]
        is_default = (
            has_default
            and not isinstance(value, torch.Tensor)
            and (value == argument.default_value)
        )
        if argument.kwarg_only:
            if not is_default:
                keywords[name] = value
            continue
        positional.append(value)
        if not is_default:
            num_needed = len(positional)
    return tuple(positional[:num_needed]), keywords


@contextlib.contextmanager
def without_vmap_loops() -> Iterator[None]:
    """Let ``torch.vmap`` raise where it would run an operator row by row.

    ``torch._C._functorch``: the switch of that fallback (2.11 to 2.13).
    """
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def runs_uncompiled(function: F) -> F:
    """A method that ``torch.compile`` around its caller leaves as it is, with all that it calls.

    ``torch.compiler.disable`` does that, but imports Dynamo, so it is asked only once Dynamo is
    imported: nothing compiles before. It sets ``_torchdynamo_disable`` (2.11 to 2.13).
    """
    disabled: list[Any] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(F, run)


# --- processes -----------------------------------------------------------------------------
def import_compiler() -> None:
    """Import ``torch._dynamo`` (2.11 to 2.13), which torch's optimizers import at their first use.

    It takes longer than the rest of a worker's start, and touches no device.
    """
    importlib.import_module("torch._dynamo")


def default_store() -> Any:
    """The store over which the default process group was made.

    ``torch.distributed.distributed_c10d._get_default_store`` (2.11 to 2.13).
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
