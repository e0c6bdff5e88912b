"""The work of contractions: products of two or more tensors over named or listed dimensions.

Each is a sequence of matrix products, as in torch; other work in it (a sum over a dimension of one
operand) is not counted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.matrix_work import product
from autopar.cost_models.shapes import outputs
from autopar.cost_models.work import NO_WORK, Family, MatrixShape, OpWork, Work, generic

_Labels = dict[str, int]
"""The size of each dimension by its label, without dimensions of size 1."""
_Operand = tuple[TensorSpec, _Labels]


def _einsum(call: OpCall) -> OpWork:
    """Contract two operands at a time, by ``path`` or from left to right."""
    equation, specs = call.args[0], call.args[1]
    terms, kept = _parsed(equation, [len(spec.shape) for spec in specs])
    operands = [(spec, _sizes(term, spec)) for spec, term in zip(specs, terms)]
    path = call.argument(2, "path")
    done = []
    is_product = False
    while len(operands) > 1:
        first, second = sorted(path[:2]) if path else (0, 1)
        path = path[2:] if path else None
        b, a = operands.pop(second), operands.pop(first)
        needed = {*kept, *(label for _, labels in operands for label in labels)}
        result, todo, has_sum = _pair(a, b, needed)
        operands.insert(len(operands) if path is not None else 0, result)
        done.append(todo)
        is_product |= has_sum
    return _together(done) if is_product else generic(call, Family.OTHER, per_element=1)


def _parsed(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The labels of each operand and of the output; "-1" is the last dimension of an ellipsis."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    texts = inputs.split(",")
    hidden = [rank - len(text.replace("...", "")) for text, rank in zip(texts, ranks)]
    terms = [list(_labels(text, count)) for text, count in zip(texts, hidden)]
    if arrow:
        return terms, list(_labels(output, max(hidden)))
    every = [label for term in terms for label in term]
    return terms, [label for label in every if not label.isalpha() or every.count(label) == 1]


def _labels(text: str, num_hidden: int) -> Iterator[str]:
    before, dots, after = text.partition("...")
    yield from before
    if dots:
        yield from (str(dim) for dim in range(-num_hidden, 0))
    yield from after


def _sizes(term: Sequence[str], spec: TensorSpec) -> _Labels:
    return {label: size for label, size in zip(term, spec.shape) if size != 1}


def _pair(a: _Operand, b: _Operand, needed: set[str]) -> tuple[_Operand, OpWork, bool]:
    """The product of two operands, its work, and whether it has a sum.

    Without a sum, each direction has one multiplication per element.
    """
    (left, of_a), (right, of_b) = a, b
    summed = [label for label in of_a if label in of_b and label not in needed]
    kept_a = {label: size for label, size in of_a.items() if label in needed}
    columns = {label: size for label, size in of_b.items() if label in needed - of_a.keys()}
    batch = {label: size for label, size in kept_a.items() if label in of_b}
    rows = {label: size for label, size in kept_a.items() if label not in of_b}
    shape = MatrixShape(
        m=prod(rows.values()),
        n=prod(columns.values()),
        k=prod(of_a[label] for label in summed),
        batch=prod(batch.values()),
    )
    result = _result(left, right, (shape.batch, shape.m, shape.n))
    todo = product(left, right, shape, result.size_bytes)
    if not summed:
        todo = _each_direction(todo, lambda of: replace(of, flops=of.flops // 2, matrix=None))
    return (result, kept_a | columns), todo, bool(summed)


def _result(a: TensorSpec, b: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The result of a product, as an operand of the next; a parameter if all inputs are."""
    wanting = [spec for spec in (a, b) if spec.requires_grad]
    return TensorSpec(
        shape,
        a.dtype,
        requires_grad=bool(wanting),
        is_parameter=bool(wanting) and all(spec.is_parameter for spec in wanting),
    )


def _each_direction(todo: OpWork, change: Callable[[Work], Work]) -> OpWork:
    return replace(
        todo,
        forward=change(todo.forward),
        input_grad=change(todo.input_grad),
        weight_grad=change(todo.weight_grad),
    )


def _together(done: Sequence[OpWork]) -> OpWork:
    """The work of several products; the shape of the largest represents all."""
    largest_first = sorted(done, key=lambda todo: -todo.forward.flops)
    return replace(
        largest_first[0],
        forward=sum((todo.forward for todo in largest_first), NO_WORK),
        input_grad=sum((todo.input_grad for todo in largest_first), NO_WORK),
        weight_grad=sum((todo.weight_grad for todo in largest_first), NO_WORK),
    )


def _tensordot(call: OpCall) -> OpWork:
    a, b = call.tensor(0, "self"), call.tensor(1, "other")
    dims = call.argument(2, "dims_self"), call.argument(3, "dims_other")
    return _over(call, a, b, *dims)


def _inner(call: OpCall) -> OpWork:
    """The product over the last dimension of both, or with a scalar."""
    a, b = call.tensor(0, "self"), call.tensor(1, "other")
    if not (a.shape and b.shape):
        return generic(call, Family.POINTWISE, per_element=1)
    return _over(call, a, b, (-1,), (-1,))


def _over(
    call: OpCall, a: TensorSpec, b: TensorSpec, dims_a: Sequence[int], dims_b: Sequence[int]
) -> OpWork:
    """The product of ``a`` and ``b`` over these dimensions; if one has size 1, of its sum."""
    inner = prod(min(a.shape[i], b.shape[j]) for i, j in zip(dims_a, dims_b))
    shape = MatrixShape(m=_without(a, dims_a), n=_without(b, dims_b), k=inner)
    return product(a, b, shape, outputs(call)[0].size_bytes)


def _without(spec: TensorSpec, dims: Sequence[int]) -> int:
    rank = len(spec.shape)
    left_out = {dim % rank for dim in dims}
    return prod(size for dim, size in enumerate(spec.shape) if dim not in left_out)


def _chain(call: OpCall) -> OpWork:
    """A chain of matrices, multiplied in the order with the fewest operations, as in torch."""
    specs = call.args[0]
    matrices = [*specs]
    if len(specs[0].shape) == 1:
        matrices[0] = replace(specs[0], shape=(1, *specs[0].shape), stride=None)
    if len(specs[-1].shape) == 1:
        matrices[-1] = replace(specs[-1], shape=(*specs[-1].shape, 1), stride=None)
    if len(matrices) == 1:
        return generic(call, Family.OTHER, per_element=1)
    sides = [matrices[0].shape[0], *(spec.shape[1] for spec in matrices)]
    done: list[OpWork] = []

    def multiplied(first: int, last: int) -> TensorSpec:
        if first == last:
            return matrices[first]
        at = _split(tuple(sides[first : last + 2]))[1] + first
        a, b = multiplied(first, at - 1), multiplied(at, last)
        shape = MatrixShape(m=sides[first], n=sides[last + 1], k=sides[at])
        result = _result(a, b, (shape.m, shape.n))
        done.append(product(a, b, shape, result.size_bytes))
        return result

    multiplied(0, len(matrices) - 1)
    return _together(done)


@lru_cache(maxsize=1 << 12)
def _split(sides: tuple[int, ...]) -> tuple[int, int]:
    """The fewest multiplications of a chain of matrices with these sides, and where it is split."""
    if len(sides) == 2:
        return 0, 0
    return min(
        (
            _split(sides[: at + 1])[0] + _split(sides[at:])[0] + sides[0] * sides[at] * sides[-1],
            at,
        )
        for at in range(1, len(sides) - 1)
    )


def _bilinear(call: OpCall) -> OpWork:
    """The first input times every matrix of the weight, then each row times the second input."""
    first, second, weight = call.tensor(0, "input1"), call.tensor(1, "input2"), call.args[2]
    num_out, k, n = weight.shape
    rows = prod(first.shape[:-1])
    half = _result(first, weight, (rows, num_out, n))
    out_bytes = outputs(call)[0].size_bytes
    return _together(
        [
            product(first, weight, MatrixShape(m=rows, n=num_out * n, k=k), half.size_bytes),
            product(
                half,
                second,
                MatrixShape(m=num_out, n=1, k=n, batch=rows),
                out_bytes,
                call.argument(3, "bias"),
            ),
        ]
    )


def _distances(call: OpCall) -> OpWork:
    """Distances: Euclidean ones of many rows by one product, others row by row."""
    a, b, norm = call.tensor(0, "x1"), call.tensor(1, "x2"), call.argument(2, "p", 2.0)
    out = outputs(call)[0]
    (m, k), n, batch = a.shape[-2:], b.shape[-2], prod(out.shape[:-2])
    mode = call.argument(3, "compute_mode") or 0
    if norm != 2 or mode == 2 or (mode == 0 and m <= 25 and n <= 25):
        base = generic(call, Family.OTHER, per_element=0)
        each = 3 * k * out.num_elements
        return _each_direction(base, lambda of: replace(of, flops=each * of.num_kernels))
    gradients = product(a, b, MatrixShape(m=m, n=n, k=k, batch=batch), out.size_bytes)
    # The squared lengths of the rows are two more columns of each operand.
    whole = product(a, b, MatrixShape(m=m, n=n, k=k + 2, batch=batch), out.size_bytes)
    return replace(gradients, forward=whole.forward)


CONTRACTION_RULES: dict[str, Callable[[OpCall], OpWork]] = {
    "einsum": _einsum,
    "tensordot": _tensordot,
    "inner": _inner,
    "linalg_multi_dot": _chain,
    "chain_matmul": _chain,
    "bilinear": _bilinear,
    "cdist": _distances,
}
