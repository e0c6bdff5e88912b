"""The reader of exported programs, which turns them into autopar's own frozen graph.

Input: the functional program of ``torch.export`` and its model. Output: a `Graph` without metadata
checks and tuple indexing, with one name per tied parameter, gradient regions written into the
values, dead code dropped, fixed ops first, and blocks cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import CaptureError
from autopar.base.source_files import is_users
from autopar.base.torch_private import (
    FakeTensorMode,
    has_several_outputs,
    inlined_higher_order_body,
    pytree,
    returns_views,
)
from autopar.frontend.names import canonical_names, shared_names
from autopar.frontend.rewrites.alike_rows import AlikeRows, inputs_of, strides_of
from autopar.ir.blocks import cut_into_blocks
from autopar.ir.graph import Graph, Op, Ref, Value, ValueKind, map_refs

DATA_DEPENDENT_FIX = (
    "Control flow on tensor values cannot be captured. Replace\n"
    "    if x.sum() > 0: y = f(x)\n    else: y = g(x)\nby\n"
    "    y = torch.where(x.sum() > 0, f(x), g(x))\n"
    "or torch.cond(x.sum() > 0, f, g, (x,)); and .item(), .tolist(), int(tensor) and boolean "
    "indexing by operations on whole tensors."
)

_SKIPPED = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_async.msg"})
_IDENTITIES = frozenset({"aten.alias.default", "aten.lift_fresh_copy.default"})
_STOPS_GRADIENT = frozenset({"aten.detach.default"})
_INDEXING = "<built-in function getitem>"
MAX_FIXED_BYTES = 1 << 30
"""Larger results of constants (the mask of a sequence of 32,768) are not kept whole on each device,
but computed in each step, sharded where their consumers are."""


# Sparse gradients become dense: they are communicated and stored like their parameter.
_SPARSE_GRADIENT = {
    "aten.embedding.default": 4,
    "aten.embedding_bag.default": 5,
    "aten.embedding_bag.padding_idx": 5,
}


class ProgramReader:
    """Reads one exported program into a `Graph`."""

    def __init__(self, model: nn.Module, program: Any, *, differentiable: bool = True) -> None:
        self.program = program
        self.model = model
        self.values: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.of_node: dict[Any, Any] = {}
        self.canonical, self.aliases = canonical_names(model)
        self.trainable = {
            n
            for n, p in model.named_parameters(remove_duplicate=False)
            if p.requires_grad and differentiable
        }
        self.constants: dict[str, Tensor] = {}
        self.by_target: dict[str, int] = {}
        self.without_data = FakeTensorMode()

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
        if target.startswith("loss_fn."):
            return loss_fn_name(target.removeprefix("loss_fn."))
        name = target.removeprefix("model.")
        return self.canonical.get(name, name)

    def _placeholders(self, graph: Any) -> None:
        signature = self.program.graph_signature
        nodes = [n for n in graph.nodes if n.op == "placeholder"]
        for node, spec in zip(nodes, signature.input_specs):
            kind = spec.kind.name
            fake = node.meta.get("val")
            if kind == "USER_INPUT":
                if not isinstance(fake, Tensor):
                    self.of_node[node] = fake
                    continue
                self._add_value(node, ValueKind.INPUT, fake)
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
        name: str | None = None,
    ) -> int:
        index = len(self.values)
        if not all(isinstance(size, int) for size in fake.shape):
            raise CaptureError(
                f"the shape {tuple(fake.shape)} of {name or node.name!r} depends on tensor values, "
                f"at {location(node) or 'an unknown line'}\nHow to fix it: {DATA_DEPENDENT_FIX}"
            )
        self.values.append(
            {
                "name": name or node.name,
                "kind": kind,
                "shape": tuple(int(s) for s in fake.shape),
                "dtype": fake.dtype,
                "target": target,
                "differentiable": kind is ValueKind.PARAMETER and target in self.trainable,
                "fixed": kind is ValueKind.CONSTANT or kind is ValueKind.BUFFER,
                "strides": strides_of(fake) if kind is ValueKind.ACTIVATION else None,
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
        if target == "aten.copy.default":
            node = self._without_copy(node)
            if node is None:
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

    def _without_copy(self, node: Any) -> Any:
        """``copy(into, source)``, which has no derivative in torch, as ``source``, broadcast."""
        into, source = (n.meta["val"] for n in node.args[:2])
        if into.dtype != source.dtype:
            return node
        if into.shape == source.shape:
            self.of_node[node] = self.of_node[node.args[1]]
            return None
        node.target = torch.ops.aten.expand.default
        node.args = (node.args[1], list(into.shape))
        return node

    def _add_op(self, node: Any, grad_enabled: bool) -> None:
        args = self._argument(node.args)
        position = _SPARSE_GRADIENT.get(str(node.target), len(args))
        if position < len(args):
            args = (*args[:position], False, *args[position + 1 :])
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
                and (fake.dtype.is_floating_point or fake.dtype.is_complex)
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
                "module_path": unsliced(_module_path(node), self.model),
                "location": location(node),
            }
        )

    def _carries_gradient(self, op: Op) -> tuple[bool, ...]:
        """For each output of an operator with several, whether autograd gives it a gradient.

        The running statistics of a batch norm have none, though its input does. Empty for other
        operators, whose only output has one if any input has.
        """
        values = [self.values[i] for i in op.inputs]
        if not any(v["differentiable"] for v in values) or not has_several_outputs(op.target):
            return ()
        results = self._run_without_data(
            {"target": op.target, "args": op.args, "kwargs": op.kwargs}
        )
        return tuple(isinstance(r, Tensor) and r.requires_grad for r in results)

    def _run_without_data(self, op: dict[str, Any]) -> Any:
        """The result of an op, without data."""

        def fake(ref: Ref) -> Tensor:
            value = self.values[ref.index]
            kind = {"dtype": value["dtype"], "requires_grad": value["differentiable"]}
            if value["strides"] is None:
                return torch.empty(value["shape"], **kind)
            return torch.empty_strided(value["shape"], value["strides"], **kind)

        with self.without_data, torch.enable_grad():
            args, kwargs = map_refs((op["args"], op["kwargs"]), fake)
            return op["target"](*_lists(args), **{k: _lists(v) for k, v in kwargs})

    def _assemble(self, user: list[int | None], mutations: list[tuple[int, int]]) -> Graph:
        """Drop dead code, put fixed ops first, renumber, cut into blocks."""
        mutated = {buffer for buffer, _ in mutations}
        roots = {i for i in user if i is not None} | {new for _, new in mutations}
        rows = AlikeRows(self.values, self._propagate_fixed(mutated), self._run_without_data)
        self.ops = rows.rewritten(self.ops, roots)
        fixed = self._propagate_fixed(mutated, MAX_FIXED_BYTES)
        ops = self._live_ops(roots)
        ops = [o for o in ops if self._is_fixed(o, fixed)] + [
            o for o in ops if not self._is_fixed(o, fixed)
        ]
        used = set(roots) | mutated
        for op in ops:
            used.update(inputs_of(op))
            used.update(o for o in op["outputs"] if o is not None)
        for index, value in enumerate(self.values):
            if value["kind"] in (ValueKind.PARAMETER, ValueKind.INPUT, ValueKind.BUFFER):
                used.add(index)
        new_index = {old: new for new, old in enumerate(sorted(used))}
        loss, outputs = user[0], [i for i in user[1:] if i is not None]
        if loss is not None:
            self._stop_gradients_beside(loss, ops)
        values = tuple(
            Value(index=new_index[old], **{**self.values[old], "fixed": old in fixed})
            for old in sorted(used)
        )
        new_ops = tuple(_renumber(op, i, new_index) for i, op in enumerate(ops))
        return Graph(
            values=values,
            ops=new_ops,
            blocks=cut_into_blocks(new_ops, values),
            inputs=tuple(v.index for v in values if v.kind is ValueKind.INPUT),
            loss=None if loss is None else new_index[loss],
            outputs=tuple(new_index[i] for i in outputs),
            mutations=tuple((new_index[b], new_index[n]) for b, n in mutations),
            aliases=self.aliases,
            shared=shared_names(self.model),
            constants=tuple(
                (v.name, self.constants[v.name]) for v in values if v.kind is ValueKind.CONSTANT
            ),
        )

    def _stop_gradients_beside(self, loss: int, ops: Sequence[dict[str, Any]]) -> None:
        """Stop gradients through values that the loss does not depend on (further outputs).

        Such a gradient would be zero rather than None, and a zero gradient lets an optimizer decay
        its parameter. Parameters themselves stay as the model has them.
        """
        reached = {loss}
        for op in reversed(ops):
            outputs = [o for o in op["outputs"] if o is not None]
            if any(o in reached and self.values[o]["differentiable"] for o in outputs):
                reached.update(inputs_of(op))
        for index, value in enumerate(self.values):
            if value["kind"] is ValueKind.ACTIVATION and index not in reached:
                value["differentiable"] = False

    def _propagate_fixed(self, mutated: set[int], max_bytes: float = math.inf) -> set[int]:
        """The values that depend on constants alone and take at most ``max_bytes``."""
        fixed = {
            i for i, v in enumerate(self.values)
            if v["kind"] is not ValueKind.ACTIVATION and v["fixed"] and i not in mutated
        }  # fmt: skip
        for op in self.ops:
            inputs = inputs_of(op)
            is_small = not inputs or self._made_bytes(op) <= max_bytes
            if not is_random(op["target"]) and is_small and all(i in fixed for i in inputs):
                fixed.update(o for o in op["outputs"] if o is not None)
        return fixed

    def _made_bytes(self, op: dict[str, Any]) -> int:
        """Bytes of memory that the outputs of an op allocate."""
        if returns_views(op["target"]):
            return 0
        made = [self.values[o] for o in op["outputs"] if o is not None]
        return sum(math.prod(v["shape"]) * v["dtype"].itemsize for v in made)

    @staticmethod
    def _is_fixed(op: dict[str, Any], fixed: set[int]) -> bool:
        return all(o is None or o in fixed for o in op["outputs"])

    def _live_ops(self, roots: set[int]) -> list[dict[str, Any]]:
        live, kept = set(roots), []
        for op in reversed(self.ops):
            if any(o in live for o in op["outputs"] if o is not None):
                kept.append(op)
                live.update(inputs_of(op))
        dropped = [
            {**op, "outputs": tuple(o if o in live else None for o in op["outputs"])}
            for op in reversed(kept)
        ]
        return dropped


def loss_fn_name(name: str) -> str:
    """The name of a loss function's own tensor, distinct from any of the model."""
    return f"loss_fn:{name}"


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _renumber(op: dict[str, Any], index: int, new_index: Mapping[int, int]) -> Op:
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


def _module_path(node: Any) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    return re.sub(r"@\d+$", "", path).removeprefix("model").removeprefix(".")


def unsliced(path: str, model: nn.Module) -> str:
    """The path with the model's own names of modules that it reaches by slices of a list.

    The trace calls the first module of ``self.layers[2:]`` ``layers.slice(2, None, None).0``, where
    the model calls it ``layers.2``.
    """
    if "slice(" not in path:
        return path
    names, module, positions = list[str](), model, None
    for name in path.split("."):
        if bounds := re.fullmatch(r"slice\((.+), (.+), (.+)\)", name):
            cut = slice(*[None if each == "None" else int(each) for each in bounds.groups()])
            positions = (range(len(module)) if positions is None else positions)[cut]  # type: ignore[arg-type]
            continue
        if positions is not None:
            name, positions = str(positions[int(name)]), None
        names.append(name)
        module = module.get_submodule(re.sub(r"@\d+$", "", name))  # of a second call
    return ".".join(names)


def location(node: Any) -> str:
    """``file.py:line`` of the model's own code that made the node."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if is_users(f[0])]
    if not own:
        return ""
    file, line = own[-1]
    return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"
