"""Decomposition as `torch.export` does it, with the kernels of composite operators registered once.

In: a context in which programs are decomposed, or a function over fake tensors. Out: the same
programs, sooner. Like `autopar.base.torch_private` it uses private torch API, with the torch
versions that have it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autopar.base.torch_private import FakeTensorMode, without_patched_modules


# torch.export.exported_program._override_composite_implicit_decomp, torch._export.utils.
# _materialize_cpp_cia_ops and torch._subclasses.fake_impls (2.11 to 2.13): in every call,
# ExportedProgram.run_decompositions({}) registers dozens of kernels for each of a hundred composite
# operators, one by one, and looks up all composite operators once for each namespace.
@contextlib.contextmanager
def without_repeated_registrations() -> Iterator[None]:
    """Run decompositions with the kernels that the first such run has registered.

    It applies to this thread alone: another one registers as torch does.
    """
    from torch._export import utils
    from torch.export import exported_program

    here, look_up = threading.get_ident(), utils._materialize_cpp_cia_ops
    override = exported_program._override_composite_implicit_decomp

    def replayed(cia_ops_to_callable: Any) -> Any:
        is_here = threading.get_ident() == here
        return (
            _replayed(override, cia_ops_to_callable) if is_here else override(cia_ops_to_callable)
        )

    exported_program._override_composite_implicit_decomp = replayed
    utils._materialize_cpp_cia_ops = functools.cache(look_up)
    try:
        yield
    finally:
        exported_program._override_composite_implicit_decomp = override
        utils._materialize_cpp_cia_ops = look_up


# torch._subclasses.functional_tensor, torch._dispatch.python, torch.export._trace and
# exported_program (2.11 to 2.13): the modes in which ExportedProgram.run_decompositions({}) traces.
def decomposed_trace(
    function: Callable[[Sequence[torch.Tensor]], Any],
    operands: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> torch.fx.Graph | None:
    """The graph that ``run_decompositions({})`` makes of a function over fake tensors of ``mode``.

    None if the function writes to one of the operands.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.export import _trace, exported_program
    from torch.fx.experimental.proxy_tensor import make_fx

    has_written = False

    def noting_writes(given: Sequence[Any]) -> Any:
        nonlocal has_written
        results = function(given)
        is_written = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
        has_written = any(is_written(x.elem) for x in given)
        return results

    composites, _ = exported_program._split_decomp_table_to_cia_and_python_decomp({})
    functional = dispatch_functionalize(noting_writes, FunctionalTensorMode(export=True))
    with (
        exported_program._override_composite_implicit_decomp(composites),
        _trace._ignore_backend_decomps(),
        _trace._compiling_state_context(),
        torch.no_grad(),
        mode,
        enable_python_dispatcher(),
        without_patched_modules(),
    ):
        traced = make_fx(functional, decomposition_table={})(list(operands))
    return None if has_written else traced.graph


class _Kernels:
    """Kernels of one operator for its rule of decomposition, and what they were made from."""

    def __init__(self, op: Any, rule: Any) -> None:
        from torch._subclasses.fake_impls import op_implementations_dict

        self.op, self.rule = op, rule
        self.before = op.py_kernels.copy()
        self.had_fake = op in op_implementations_dict

    def record(self) -> None:
        from torch._subclasses.fake_impls import op_implementations_dict

        self.after = self.op.py_kernels.copy()
        self.fake = op_implementations_dict.get(self.op)

    def applies_to(self, other: _Kernels) -> bool:
        ours, theirs = (self.rule, self.had_fake), (other.rule, other.had_fake)
        return ours == theirs and self.before == other.before

    def register(self) -> None:
        from torch._subclasses.fake_impls import op_implementations_dict

        self._set(self.after)
        if self.fake is not None:
            op_implementations_dict.setdefault(self.op, self.fake)

    def restore(self) -> None:
        from torch._subclasses.fake_impls import _deregister_op_impl

        self._set(self.before)
        _deregister_op_impl(self.op)

    def _set(self, kernels: dict[Any, Any]) -> None:
        self.op.py_kernels.clear()
        self.op.py_kernels.update(kernels)
        self.op._dispatch_cache.clear()


_kernels: dict[Any, _Kernels] = {}


@contextlib.contextmanager
def _replayed(override: Any, rules: dict[Any, Any]) -> Iterator[None]:
    """``override(rules)``, with what an earlier call has registered for the same rules."""
    wanted = {op: _Kernels(op, rule) for op, rule in rules.items()}
    known = [k for op, new in wanted.items() if (k := _kernels.get(op)) and k.applies_to(new)]
    others = rules.keys() - {k.op for k in known}
    with override({op: rule for op, rule in rules.items() if op in others}):
        for op in others:
            wanted[op].record()
            _kernels[op] = wanted[op]
        try:
            for kernels in known:
                kernels.register()
            yield
        finally:
            for kernels in known:
                kernels.restore()
