"""Capture: an ordinary ``nn.Module`` and example inputs become a `Graph`.

``torch.export`` (non-strict) runs the model's own Python once over fake CPU tensors, so nothing is
allocated and parameters may live on the meta device. The exported graph is made functional, then
read into autopar's own frozen types: metadata checks and tuple indexing disappear, tied parameters
get one name, everything that depends on neither parameters nor inputs (masks, positions) moves to
the front, and the rest is cut into blocks by module path.
"""

from __future__ import annotations

import copy
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.blocks import cut_into_blocks
from autopar.errors import CaptureError, InputError
from autopar.graph import Graph, Op, Ref, Value, ValueKind, verify
from autopar.torch_private import (
    DataDependentOutputException,
    FakeTensorMode,
    has_several_outputs,
    inlined_higher_order_body,
    keyed_leaves,
    mark_no_grad_regions,
    pytree,
)

LossFn = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a call of the model becomes the graph's inputs, and its outputs the model's own.

    ``leaves`` has one entry per flattened argument: the position among the graph's tensor inputs,
    or the constant that was captured. ``input_names`` names the tensor inputs as users know them.
    """

    in_spec: Any
    leaves: tuple[Any, ...]
    input_names: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[torch.dtype, ...]
    out_spec: Any
    out_leaves: tuple[Any, ...]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensor inputs of a call; raises InputError where it differs from the example."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.in_spec:
            raise InputError(
                "inputs do not match the example inputs: they must have the same structure "
                f"(positional and keyword). Expected {self.describe()}; got "
                f"{len(args)} positional and keywords {sorted(kwargs)}"
            )
        tensors: list[Tensor] = []
        for leaf, expected in zip(leaves, self.leaves):
            if isinstance(expected, _InputSlot):
                tensors.append(self._check(leaf, expected.position))
            elif isinstance(leaf, Tensor) or leaf != expected:
                raise InputError(
                    f"argument {leaf!r} differs from the value {expected!r} the model was "
                    "captured with; compile again for another value"
                )
        return tensors

    def _check(self, leaf: Any, position: int) -> Tensor:
        name, shape = self.input_names[position], self.input_shapes[position]
        dtype = self.input_dtypes[position]
        if not isinstance(leaf, Tensor):
            raise InputError(f"input {name!r} must be a tensor, got {type(leaf).__name__}")
        if tuple(leaf.shape) != shape or leaf.dtype != dtype:
            raise InputError(
                f"input {name!r} has shape {tuple(leaf.shape)} and dtype {leaf.dtype}; the model "
                f"was compiled for {shape} and {dtype}. Pad or drop the batch, or compile again "
                "with example_inputs of the new shape"
            )
        return leaf

    def describe(self) -> str:
        return ", ".join(
            f"{n}: {tuple(s)} {d}"
            for n, s, d in zip(self.input_names, self.input_shapes, self.input_dtypes)
        )


@dataclass(frozen=True, slots=True)
class _InputSlot:
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A graph with the signature of the model it was captured from."""

    graph: Graph
    signature: Signature


class _OutputNote:
    """The structure of the model's output, noted while it is traced.

    torch.export puts back what tracing changes on a module, but not on an object it holds.
    """

    def __init__(self) -> None:
        self.spec: Any = None
        self.leaves: tuple[Any, ...] = ()


class _Step(nn.Module):
    """The model together with its loss: returns (loss or None, flat output tensors)."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, targets: _Targets | None):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.targets = targets
        self.output = _OutputNote()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        target_args: tuple[Any, ...] = ()
        if self.targets is not None:
            args, kwargs, target_args = self.targets.take(args, kwargs)
        output = self.model(*args, **kwargs)
        loss = self.loss_fn(output, *target_args) if self.loss_fn else _find_loss(output)
        leaves, self.output.spec = pytree.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kept = iter(range(len(tensors)))
        self.output.leaves = tuple(
            _InputSlot(next(kept)) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves
        )
        return (loss, *tensors)


def _plain(leaf: Any) -> Any:
    """Constants among the outputs are kept; other objects (caches) become None."""
    return leaf if isinstance(leaf, int | float | str | bool | type(None)) else None


def _find_loss(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.numel() == 1 and output.is_floating_point() else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


@dataclass(frozen=True, slots=True)
class _Targets:
    """Which of a call's arguments go to ``loss_fn``: the last positional, or these keywords."""

    num_positional: int
    keywords: tuple[str, ...]

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        cut = len(args) - self.num_positional
        targets = (*args[cut:], *(kwargs[name] for name in self.keywords))
        return args[:cut], {k: v for k, v in kwargs.items() if k not in self.keywords}, targets


def _find_targets(loss_fn: LossFn, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Targets:
    call = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    names = [
        p.name
        for p in inspect.signature(call).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ][1:]
    keywords = tuple(name for name in names if name in kwargs)
    positional = len(names) - len(keywords)
    if positional > len(args):
        raise InputError(
            f"loss_fn takes {len(names)} targets {names} but the inputs hold only {len(args)} "
            f"positional values and keywords {sorted(kwargs)}; pass "
            "example_inputs=(*model_inputs, *targets)"
        )
    return _Targets(positional, keywords)


class Arguments(NamedTuple):
    """Example inputs that are positional and keyword at once: ``Arguments((x,), {"y": y})``."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


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


def capture(model: nn.Module, example_inputs: Any, *, loss_fn: LossFn | None = None) -> Captured:
    """Capture one call of ``model`` in its current mode (train or eval) on the global batch.

    Raises CaptureError with the user's file and line where the model cannot be captured, and
    InputError for inputs that do not fit.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    args, kwargs = split_inputs(example_inputs)
    targets = _find_targets(loss_fn, args, kwargs) if loss_fn is not None else None
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    memo: dict[int, Any] = {}
    step = _Step(_fake_copy(model, mode, memo), _fake_copy(loss_fn, mode, memo), targets)
    step.train(model.training)
    fake_args, fake_kwargs = pytree.tree_map(lambda x: _fake(x, mode), (args, kwargs))
    program = _export(step, fake_args, fake_kwargs, args, kwargs)
    reader = _Reader(model, program)
    graph = reader.read()
    verify(graph)
    return Captured(graph=graph, signature=_signature(step, graph, args, kwargs))


def _fake(x: Any, mode: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    with mode:
        fake = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    return fake


def _fake_copy(module: Any, mode: Any, memo: dict[int, Any]) -> Any:
    """A copy of ``module`` whose tensors are fake; tied ones stay tied, nothing is allocated."""
    if not isinstance(module, nn.Module):
        return module
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in memo:
            fake = _fake(tensor, mode)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
    return copy.deepcopy(module, memo)


def _export(step: _Step, args: Any, kwargs: Any, real_args: Any, real_kwargs: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(step, args, kwargs, strict=False)
            mark_no_grad_regions(exported.graph_module)
            return exported.run_decompositions({})
    except Exception as error:
        if _fails_without_export(step, args, kwargs):
            raise InputError(
                "the model itself fails on the example inputs, before any capture: "
                f"{type(error).__name__}: {_first_line(error)}{_where(error)}"
            ) from error
        raise CaptureError(_explain(error)) from error


def _fails_without_export(step: _Step, args: Any, kwargs: Any) -> bool:
    try:
        step(*args, **kwargs)
    except DataDependentOutputException:
        return False
    except Exception:
        return True
    return False


_DATA_DEPENDENT = (
    "Control flow on tensor values cannot be captured. Replace\n"
    "    if x.sum() > 0: y = f(x)\n    else: y = g(x)\nby\n"
    "    y = torch.where(x.sum() > 0, f(x), g(x))\n"
    "or torch.cond(x.sum() > 0, f, g, (x,)); and .item(), .tolist(), int(tensor) and boolean "
    "indexing by operations on whole tensors."
)
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
        hint = _DATA_DEPENDENT
    elif "output" in text and "type" in text:
        hint = _OUTPUT_TYPE
    else:
        hint = _GENERIC
    head = f"the model cannot be captured as one graph{_where(error)}"
    return f"{head}\n{type(error).__name__}: {_first_line(error)}\nHow to fix it: {hint}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


def _where(error: BaseException) -> str:
    """The last frame outside torch, autopar and this module, as `` at file:line (code)``."""
    own = re.compile(r"[/\\](torch|autopar|contextlib|copyreg)([/\\]|\.py)")
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not own.search(f.filename) and not f.filename.startswith("<")
    ]
    user = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\s+(.*)', str(error))
    user = [u for u in user if not own.search(u[0])]
    if frames:
        last = frames[-1]
        return f" at {last.filename}:{last.lineno} in {last.name}: {last.line}"
    if user:
        file, line, name, code = user[-1]
        return f" at {file}:{line} in {name}: {code}"
    return ""


def _signature(step: _Step, graph: Graph, args: Any, kwargs: Any) -> Signature:
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    names = keyed_leaves((tuple(args), dict(kwargs)))
    slots: list[Any] = []
    tensors: list[tuple[str, Tensor]] = []
    for leaf, name in zip(leaves, names):
        if isinstance(leaf, Tensor):
            slots.append(_InputSlot(len(tensors)))
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
    )


_SKIPPED = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_async.msg"})
_IDENTITIES = frozenset({"aten.alias.default", "aten.lift_fresh_copy.default"})
_STOPS_GRADIENT = frozenset({"aten.detach.default"})
_INDEXING = "<built-in function getitem>"


class _Reader:
    """Reads one exported program into a `Graph`."""

    def __init__(self, model: nn.Module, program: Any) -> None:
        self.program = program
        self.values: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.of_node: dict[Any, Any] = {}
        self.canonical, self.aliases = _canonical_names(model)
        self.trainable = {
            n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
        }
        self.constants: dict[str, Tensor] = {}
        self.by_target: dict[str, int] = {}

    def read(self) -> Graph:
        graph_module = self.program.graph_module
        self._placeholders(graph_module.graph)
        outputs = self._body(graph_module, grad_enabled=True)
        signature = self.program.graph_signature
        mutations, user = [], []
        for spec, value in zip(signature.output_specs, outputs):
            if spec.kind.name == "BUFFER_MUTATION":
                mutations.append((self.by_target[self._name(spec.target)], value))
            elif spec.kind.name == "USER_OUTPUT":
                user.append(value)
            else:
                raise CaptureError(
                    f"the model changes {spec.target or spec.arg} in place, which a compiled "
                    "step cannot keep; return the new value, or register it as a buffer"
                )
        return self._assemble(user, mutations)

    def _name(self, target: str) -> str:
        name = target.removeprefix("model.").removeprefix("loss_fn.")
        return self.canonical.get(name, name)

    def _placeholders(self, graph: Any) -> None:
        signature = self.program.graph_signature
        nodes = [n for n in graph.nodes if n.op == "placeholder"]
        num_inputs = 0
        for node, spec in zip(nodes, signature.input_specs):
            kind = spec.kind.name
            fake = node.meta.get("val")
            if kind == "USER_INPUT":
                if not isinstance(fake, Tensor):
                    self.of_node[node] = fake
                    continue
                self._add_value(node, ValueKind.INPUT, fake, position=num_inputs)
                num_inputs += 1
            elif kind in ("PARAMETER", "BUFFER"):
                self._state(node, spec, fake)
            elif kind == "CONSTANT_TENSOR":
                data = self.program.constants[spec.target]
                self._add_value(node, ValueKind.CONSTANT, data)
                self.constants[node.name] = data
            else:
                raise CaptureError(f"the model closes over {spec.target!r} of kind {kind}")

    def _state(self, node: Any, spec: Any, fake: Any) -> None:
        target = self._name(spec.target)
        if target in self.by_target:
            self.of_node[node] = Ref(self.by_target[target])
            return
        kind = ValueKind.PARAMETER if spec.kind.name == "PARAMETER" else ValueKind.BUFFER
        self._add_value(node, kind, fake, target=target)
        self.by_target[target] = self.of_node[node].index

    def _add_value(
        self,
        node: Any,
        kind: ValueKind,
        fake: Tensor,
        *,
        target: str | None = None,
        position: int | None = None,
        name: str | None = None,
    ) -> int:
        index = len(self.values)
        if not all(isinstance(size, int) for size in fake.shape):
            raise CaptureError(
                f"the shape {tuple(fake.shape)} of {name or node.name!r} depends on tensor values, "
                f"at {_location(node) or 'an unknown line'}\nHow to fix it: {_DATA_DEPENDENT}"
            )
        self.values.append(
            {
                "name": name or node.name,
                "kind": kind,
                "shape": tuple(int(s) for s in fake.shape),
                "dtype": fake.dtype,
                "target": target,
                "input_position": position,
                "differentiable": kind is ValueKind.PARAMETER and target in self.trainable,
                "fixed": kind is ValueKind.CONSTANT or kind is ValueKind.BUFFER,
            }
        )
        self.of_node[node] = Ref(index)
        return index

    def _body(self, module: Any, *, grad_enabled: bool) -> list[Any]:
        """Read the calls of one graph; returns what its output node lists."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self.of_node[node] = self._attribute(module, node)
            elif node.op == "call_function":
                self._call(module, node, grad_enabled)
            elif node.op == "output":
                flat = pytree.tree_leaves(_tuples(node.args[0]), is_leaf=_is_leaf)
                return [self._resolve(arg) for arg in flat]
        raise CaptureError("the exported graph has no output")

    def _attribute(self, module: Any, node: Any) -> Any:
        attribute = getattr(module, node.target)
        if not isinstance(attribute, Tensor):
            return attribute
        self._add_value(node, ValueKind.CONSTANT, attribute)
        self.constants[node.name] = attribute
        return self.of_node[node]

    def _resolve(self, arg: Any) -> Any:
        resolved = self._argument(arg)
        return resolved.index if isinstance(resolved, Ref) else None

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.of_node[arg]
        if isinstance(arg, list | tuple):
            return tuple(self._argument(a) for a in arg)
        return arg

    def _call(self, module: Any, node: Any, grad_enabled: bool) -> None:
        target = str(node.target)
        if target in _SKIPPED:
            return
        if target == _INDEXING:
            self.of_node[node] = self.of_node[node.args[0]][node.args[1]]
            return
        if target in _IDENTITIES:
            self.of_node[node] = self.of_node[node.args[0]]
            return
        body = inlined_higher_order_body(module, node)
        if body is not None:
            inner, operands, enabled = body
            placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
            for placeholder, operand in zip(placeholders, operands):
                self.of_node[placeholder] = self._argument(operand)
            outputs = self._body(inner, grad_enabled=grad_enabled and enabled)
            self.of_node[node] = tuple(Ref(o) if o is not None else None for o in outputs)
            return
        self._add_op(node, grad_enabled)

    def _add_op(self, node: Any, grad_enabled: bool) -> None:
        args = self._argument(node.args)
        kwargs = tuple((k, self._argument(v)) for k, v in node.kwargs.items())
        op = Op(
            index=0, name=node.name, target=node.target, args=args, kwargs=kwargs,
            outputs=(), module_path="",
        )  # fmt: skip
        inputs = [self.values[i] for i in op.inputs]
        fakes = node.meta.get("val")
        single = not isinstance(fakes, list | tuple)
        flows = grad_enabled and str(node.target) not in _STOPS_GRADIENT
        carried = self._carries_gradient(op) if flows else ()
        outputs: list[int | None] = []
        for position, fake in enumerate([fakes] if single else fakes):
            if not isinstance(fake, Tensor):
                outputs.append(None)
                continue
            name = node.name if single or position == 0 else f"{node.name}.{position}"
            index = self._add_value(node, ValueKind.ACTIVATION, fake, name=name)
            self.values[index]["differentiable"] = (
                flows
                and fake.dtype.is_floating_point
                and (carried[position] if carried else any(v["differentiable"] for v in inputs))
            )
            self.values[index]["fixed"] = all(v["fixed"] for v in inputs) and not is_random(
                node.target
            )
            outputs.append(index)
        self.of_node[node] = (
            Ref(outputs[0])
            if single and outputs[0] is not None
            else tuple(Ref(o) if o is not None else None for o in outputs)
        )
        self.ops.append(
            {
                "name": node.name,
                "target": node.target,
                "args": args,
                "kwargs": kwargs,
                "outputs": tuple(outputs),
                "module_path": _module_path(node),
                "location": _location(node),
            }
        )

    def _carries_gradient(self, op: Op) -> tuple[bool, ...]:
        """Per output of an operator that has several, whether autograd gives it a gradient.

        The running statistics of a batch norm have none, though its input does. Empty for other
        operators, whose only output has one if any input has.
        """
        values = [self.values[i] for i in op.inputs]
        if not any(v["differentiable"] for v in values) or not has_several_outputs(op.target):
            return ()
        with FakeTensorMode(), torch.enable_grad():
            operands = [
                torch.empty(v["shape"], dtype=v["dtype"], requires_grad=v["differentiable"])
                for v in values
            ]
            args, kwargs = op.bind(operands)
            results = op.target(*_lists(args), **{k: _lists(v) for k, v in kwargs.items()})
        return tuple(isinstance(r, Tensor) and r.requires_grad for r in results)

    def _assemble(self, user: list[int | None], mutations: list[tuple[int, int]]) -> Graph:
        """Drop dead code, put fixed ops first, renumber, cut into blocks."""
        mutated = {buffer for buffer, _ in mutations}
        fixed = self._propagate_fixed(mutated)
        roots = {i for i in user if i is not None} | {new for _, new in mutations}
        ops = self._live_ops(roots)
        ops = [o for o in ops if self._is_fixed(o, fixed)] + [
            o for o in ops if not self._is_fixed(o, fixed)
        ]
        used = set(roots) | mutated
        for op in ops:
            used.update(_op_inputs(op))
            used.update(o for o in op["outputs"] if o is not None)
        for index, value in enumerate(self.values):
            if value["kind"] in (ValueKind.PARAMETER, ValueKind.INPUT, ValueKind.BUFFER):
                used.add(index)
        new_index = {old: new for new, old in enumerate(sorted(used))}
        values = tuple(
            Value(index=new_index[old], **{**self.values[old], "fixed": old in fixed})
            for old in sorted(used)
        )
        new_ops = tuple(_renumber(op, i, new_index) for i, op in enumerate(ops))
        loss, outputs = user[0], [i for i in user[1:] if i is not None]
        return Graph(
            values=values,
            ops=new_ops,
            blocks=cut_into_blocks(new_ops, values),
            inputs=tuple(v.index for v in values if v.kind is ValueKind.INPUT),
            loss=None if loss is None else new_index[loss],
            outputs=tuple(new_index[i] for i in outputs),
            mutations=tuple((new_index[b], new_index[n]) for b, n in mutations),
            aliases=self.aliases,
            constants=tuple(
                (v.name, self.constants[v.name]) for v in values if v.kind is ValueKind.CONSTANT
            ),
        )

    def _propagate_fixed(self, mutated: set[int]) -> set[int]:
        fixed = {
            i for i, v in enumerate(self.values)
            if v["kind"] is not ValueKind.ACTIVATION and v["fixed"] and i not in mutated
        }  # fmt: skip
        for op in self.ops:
            if not is_random(op["target"]) and all(i in fixed for i in _op_inputs(op)):
                fixed.update(o for o in op["outputs"] if o is not None)
        return fixed

    @staticmethod
    def _is_fixed(op: dict[str, Any], fixed: set[int]) -> bool:
        return all(o is None or o in fixed for o in op["outputs"])

    def _live_ops(self, roots: set[int]) -> list[dict[str, Any]]:
        live, kept = set(roots), []
        for op in reversed(self.ops):
            if any(o in live for o in op["outputs"] if o is not None):
                kept.append(op)
                live.update(_op_inputs(op))
        dropped = [
            {**op, "outputs": tuple(o if o in live else None for o in op["outputs"])}
            for op in reversed(kept)
        ]
        return dropped


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _op_inputs(op: dict[str, Any]) -> tuple[int, ...]:
    view = Op(
        index=0, name="", target=None, args=op["args"], kwargs=op["kwargs"], outputs=(),
        module_path="",
    )  # fmt: skip
    return view.inputs


def _renumber(op: dict[str, Any], index: int, new_index: Mapping[int, int]) -> Op:
    from autopar.graph import map_refs

    def rename(ref: Ref) -> Ref:
        return Ref(new_index[ref.index])

    return Op(
        index=index,
        **{
            **op,
            "args": map_refs(op["args"], rename),
            "kwargs": map_refs(op["kwargs"], rename),
            "outputs": tuple(None if o is None else new_index[o] for o in op["outputs"]),
        },
    )


def _tuples(node: Any) -> Any:
    return tuple(_tuples(n) for n in node) if isinstance(node, list | tuple) else node


def _lists(node: Any) -> Any:
    return [_lists(n) for n in node] if isinstance(node, tuple) else node


def _is_leaf(node: Any) -> bool:
    return not isinstance(node, tuple)


def _canonical_names(model: nn.Module) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    """Every name of a tensor to its first one, and the further names of tied ones."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    named: Sequence[tuple[str, Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        canonical[name] = first.setdefault(id(tensor), name)
    aliases = tuple((name, kept) for name, kept in canonical.items() if name != kept)
    return canonical, aliases


def _module_path(node: Any) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    return re.sub(r"@\d+$", "", path).removeprefix("model").removeprefix(".")


def _location(node: Any) -> str:
    """``file.py:line`` of the model's own code that made the node."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if not re.search(r"[/\\](torch|autopar)[/\\]", f[0])]
    if not own:
        return ""
    file, line = own[-1]
    return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"
