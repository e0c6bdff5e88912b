"""Losses over the rows that a boolean mask selects, as sums that can be split by rows.

``cross_entropy(logits[mask], labels[mask])`` and ``mse_loss(x[mask], y[mask])`` compute on as many
rows as data says, so their ops cannot be split. But each device can sum the losses of the rows
that are selected among its own: one generated operator does so, from the whole tensors and the mask
(`autopar.ir.row_sums`). A mean is that sum divided by the number of elements.

Input: an exported program, before its decompositions. Output: the same program, in which such an
operator computes each loss, sum or mean over rows that one mask selects, if every op in between
works row by row; additions may happen in another order. Other losses stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from autopar.frontend.rewrites.data_dependent import may_be_inside, operator_of
from autopar.frontend.rewrites.edit import Ops, meta_of, value_of, writes
from autopar.frontend.rewrites.row_masks import is_fixed, mask_of
from autopar.ir.row_sums import NAMESPACE, ROW_SUMS, RowSum

_ATEN = torch.ops.aten
_COPIES = frozenset({
    _ATEN.clone.default, _ATEN.contiguous.default, _ATEN.detach.default, _ATEN.to.dtype,
    _ATEN._to_copy.default,
})  # fmt: skip
_SOFTMAX = frozenset({_ATEN.softmax.int, _ATEN.log_softmax.int})
_OF_CLASSES = frozenset({_ATEN.cross_entropy_loss.default, _ATEN.nll_loss_nd.default})
_OF_ELEMENTS = frozenset({
    _ATEN.mse_loss.default, _ATEN.l1_loss.default, _ATEN.smooth_l1_loss.default,
    _ATEN.huber_loss.default, _ATEN.binary_cross_entropy_with_logits.default,
    _ATEN.binary_cross_entropy.default,
})  # fmt: skip
_REDUCTIONS = frozenset({_ATEN.mean.default, _ATEN.sum.default})
_MEAN, _SUM = 1, 2
"""Values of the argument ``reduction`` of losses."""


def sum_losses_by_rows(module: fx.GraphModule) -> None:
    """Rewrite the losses over selected rows of a graph."""
    graph, is_changed = module.graph, False
    for node in list(graph.nodes):
        if node.target in _OF_CLASSES | _OF_ELEMENTS | _REDUCTIONS:
            loss = _Loss.of(node)
            if loss is not None:
                with graph.inserting_before(node):
                    result = loss.summed_by_rows(Ops(graph, node))
                node.replace_all_uses_with(result)
                _erase_unused(node)
                is_changed = True
    if is_changed:
        module.recompile()


class _Loss:
    """A loss over selected rows.

    ``masks`` are equal: the same mask, perhaps computed several times. ``given`` are the arguments
    by name, ``rows`` the calls from the selections to the loss, in graph order.
    """

    def __init__(self, node: fx.Node, masks: list[fx.Node], rows: list[fx.Node]) -> None:
        self.node, self.masks, self.rows = node, masks, rows
        self.mask = masks[0]
        self.given = _given(node)
        self.is_half = value_of(node).dtype in (torch.float16, torch.bfloat16)

    @staticmethod
    def of(node: fx.Node) -> _Loss | None:
        """The loss of a call, if it is one."""
        sources = [operand for operand in node.all_input_nodes if _is_of_rows(operand)]
        value = meta_of(node)
        is_number = isinstance(value, Tensor) and not value.dim() and value.is_floating_point()
        if not sources or not is_number or not _has_plain_arguments(node):
            return None
        order = {each: place for place, each in enumerate(node.graph.nodes)}
        found: set[fx.Node] = set()
        if not all(_collect(source, found) for source in sources):
            return None
        rows = sorted(found, key=order.__getitem__)
        selections = [each for each in rows if each.target is _ATEN.index.Tensor]
        masks = [mask.node for each in selections if (mask := mask_of(*each.args)) is not None]
        compared = {*rows}
        if not all(_are_equal(mask, masks[0], compared) for mask in masks):
            return None
        first = min(map(order.__getitem__, compared))
        if any(map(writes, list(node.graph.nodes)[first : order[node]])):
            return None
        loss = _Loss(node, masks, rows)
        is_countable = node.target not in _OF_CLASSES or loss.labels() is not None
        return loss if is_countable else None

    @property
    def is_mean(self) -> bool:
        return self.given.get("reduction", _SUM) == _MEAN or self.node.target is _ATEN.mean.default

    def labels(self) -> fx.Node | None:
        """The labels that the mask selects from."""
        node = self.given["target"]
        while isinstance(node, fx.Node) and node.target in _COPIES:
            node = node.args[0]
        is_plain = isinstance(node, fx.Node) and node.target is _ATEN.index.Tensor
        return node.args[0] if is_plain else None

    def summed_by_rows(self, ops: Ops) -> fx.Node:
        operands, have_rows = self._operands()
        made = ops(self._operator(operands, have_rows), operands)
        result = ops(operator.getitem, made, 0)
        if self.is_mean:
            result = ops(_ATEN.div.Tensor, result, self._count(ops))
        if self.is_half:
            result = ops(_ATEN._to_copy.default, result, dtype=value_of(self.node).dtype)
        return result

    def _operands(self) -> tuple[list[fx.Node], tuple[bool, ...]]:
        """The operator's operands, and for each whether its first dimensions are those of rows."""
        found = {self.mask: True}
        for node in (*self.rows, self.node):
            is_selection = node.target is _ATEN.index.Tensor
            for source in node.all_input_nodes[:1] if is_selection else _tensors(node):
                if source not in self.rows:
                    found[source] = is_selection
        return list(found), tuple(found.values())

    def _operator(self, operands: list[fx.Node], have_rows: tuple[bool, ...]) -> Any:
        """The operator that sums over the selected rows of its operands."""
        graph = fx.Graph()
        inside: dict[fx.Node, Any] = {
            node: graph.placeholder(f"x{place}") for place, node in enumerate(operands)
        }
        inside |= dict.fromkeys(self.masks, inside[self.mask])
        for node in self.rows:
            if node.target is operator.getitem:
                inside[node] = inside[_broadcast(node)]  # type: ignore[index]
            else:
                inside[node] = graph.node_copy(node, inside.__getitem__)
                inside[node].meta = {}
        given = dict(fx.map_arg(self.given, inside.__getitem__))
        total = given["self"]
        if self.node.target not in _REDUCTIONS:
            given["reduction"] = 0 if self.is_half else _SUM
            total = graph.call_function(self.node.target, tuple(given.values()))  # type: ignore[arg-type]
        if self.is_half:  # as a mean is computed
            total = graph.call_function(_ATEN.sum.default, (total,), {"dtype": torch.float32})
        elif self.node.target in _REDUCTIONS:
            total = graph.call_function(_ATEN.sum.default, (total,))
        graph.output((total,))
        body = fx.GraphModule(torch.nn.Module(), graph)
        like = torch.empty_like(value_of(self.node))
        result = like.float() if self.is_half else like
        found = operator_of(body, [value_of(each) for each in operands], [result], NAMESPACE)
        ROW_SUMS[str(found)] = RowSum(value_of(self.mask).dim(), have_rows)
        return found

    def _count(self, ops: Ops) -> fx.Node:
        """The denominator of the mean: the number of selected elements, for classes the total
        weight of the labels that are not ignored."""
        if self.node.target not in _OF_CLASSES:
            source = self.given["self"]
            num = value_of(source).shape[1:].numel()
            return ops(_ATEN.mul.Tensor, ops(_ATEN.sum.default, self.mask), num)
        labels, weight = self.labels(), self.given["weight"]
        assert labels is not None
        counts = ops(_ATEN.ne.Scalar, labels, self.given["ignore_index"])
        counts = ops(_ATEN.logical_and.default, counts, self.mask)
        if weight is not None:
            left_out = ops(_ATEN.logical_not.default, counts)
            classes = ops(_ATEN.masked_fill.Scalar, labels, left_out, 0)
            counts = ops(_ATEN.index.Tensor, weight, [classes])
            counts = ops(_ATEN.masked_fill.Scalar, counts, left_out, 0)
        return ops(_ATEN.sum.default, counts)


def _has_plain_arguments(node: fx.Node) -> bool:
    """Whether a loss, sum or mean is over all elements, and its operands are alike."""
    given = _given(node)
    if node.target in _REDUCTIONS:
        return given.get("dtype") is None
    pair = given["self"], given["target"]
    if not all(map(_is_of_rows, pair)) or given["reduction"] not in (_MEAN, _SUM):
        return False
    scores, labels = map(value_of, pair)
    extra = [x for x in (given.get("weight"), given.get("pos_weight")) if x is not None]
    if not all(is_fixed(x) and value_of(x).dim() < scores.dim() for x in extra):
        return False
    if node.target in _OF_CLASSES:
        is_named = not labels.is_floating_point() and labels.dim() == 1
        return is_named and scores.dim() == 2
    return str(scores.shape) == str(labels.shape)


def _is_of_rows(argument: Any) -> TypeGuard[fx.Node]:
    """Whether it is a tensor whose first dimension, and no other, depends on data."""
    value = meta_of(argument) if isinstance(argument, fx.Node) else None
    if not isinstance(value, Tensor) or is_fixed(argument):
        return False
    return all(type(size) is int for size in value.shape[1:])


def _collect(node: fx.Node, found: set[fx.Node]) -> bool:
    """Collect the calls between the selections and a node; False if one is not row-wise."""
    if node in found:
        return True
    found.add(node)
    if node.target is _ATEN.index.Tensor:
        mask = mask_of(*node.args)
        return mask is not None and mask.first == 0
    rank = value_of(node).dim()
    if node.target is operator.getitem:
        source = _broadcast(node)
        return source is not None and _collect(source, found)
    if not _is_row_wise(node):
        return False
    for operand in _tensors(node):
        shape = meta_of(operand).shape
        if _is_of_rows(operand):
            if len(shape) != rank or not _collect(operand, found):
                return False
        elif not is_fixed(operand) or not (
            len(shape) < rank or (rank == len(shape) and shape[0] == 1)
        ):
            return False
    return True


def _are_equal(one: Any, other: Any, compared: set[fx.Node]) -> bool:
    """Whether two arguments are results of equal expressions; collects the nodes that differ."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        if one is other:
            return True
        compared |= {one, other}
        tags = getattr(one.target, "tags", ())
        is_alike = one.op == "call_function" and one.target is other.target
        return (
            is_alike
            and torch.Tag.nondeterministic_seeded not in tags
            and _are_equal([*one.args], [*other.args], compared)
            and one.kwargs == other.kwargs
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other)
        return len(one) == len(other) and all(_are_equal(a, b, compared) for a, b in pairs)
    return type(one) is type(other) and bool(one == other)


def _is_row_wise(node: fx.Node) -> bool:
    """Whether a call computes each row of its result from that row of its operands."""
    if node.target in _SOFTMAX:
        return int(node.args[1]) % value_of(node).dim() != 0  # type: ignore[arg-type]
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return may_be_inside(node) and (is_pointwise or node.target in _COPIES)


def _broadcast(node: fx.Node) -> fx.Node | None:
    """The tensor that a result of ``broadcast_tensors`` is, where all have one shape."""
    source, place = node.args
    assert isinstance(source, fx.Node)
    if source.target is not _ATEN.broadcast_tensors.default:
        return None
    given: Any = source.args[0]
    is_same = len({str(meta_of(each).shape) for each in given}) == 1
    return given[place] if is_same and _is_of_rows(given[place]) else None


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors among the arguments of a call; that of ``getitem`` is what it takes."""
    if node.target is operator.getitem:
        source = _broadcast(node)
        assert source is not None
        yield source
        return
    yield from node.all_input_nodes


def _erase_unused(node: fx.Node) -> None:
    """Erase a call that nobody reads, and the calls that it alone reads."""
    if node.op == "call_function" and not node.users:
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        for source in sources:
            _erase_unused(source)


def _given(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, in the order of its schema."""
    target: Any = node.target
    found = {argument.name: argument.default_value for argument in target._schema.arguments}
    return found | dict(zip(found, node.args)) | node.kwargs
