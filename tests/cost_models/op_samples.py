"""Real calls of every operation that occurs in exported graphs of the supported models."""

from typing import Any

import torch

aten = torch.ops.aten


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def _weights(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape))


def _ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def samples() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Operation, arguments and keyword arguments, on small real tensors."""
    x, w, b = _floats(4, 6, 8), _weights(10, 8), _weights(10)
    image, kernel = _floats(2, 4, 9, 9), _weights(6, 4, 3, 3)
    q, k, v = _floats(2, 3, 5, 8), _floats(2, 3, 7, 8), _floats(2, 3, 7, 4)
    hidden = torch.zeros(2, 4, 5)
    cells = [_weights(20, 8), _weights(20, 5), _weights(20), _weights(20)]
    cells += [_weights(20, 5), _weights(20, 5), _weights(20), _weights(20)]
    gru = [_weights(15, 8), _weights(15, 5), _weights(15), _weights(15)]
    norm = [_weights(4), _weights(4), torch.zeros(4), torch.ones(4)]
    return [
        (aten.linear.default, (x, w, b), {}),
        (aten.linear.default, (x, w), {}),
        (aten.mm.default, (_floats(4, 6), _weights(6, 7)), {}),
        (aten.addmm.default, (b, _floats(4, 6), _weights(6, 10)), {}),
        (aten.bmm.default, (_floats(3, 4, 6), _floats(3, 6, 2)), {}),
        (aten.baddbmm.default, (_weights(3, 1, 2), _floats(3, 4, 6), _weights(3, 6, 2)), {}),
        (aten.matmul.default, (_floats(2, 3, 4, 6), _floats(2, 1, 6, 5)), {}),
        (aten.matmul.default, (_floats(2, 4, 6), _weights(6)), {}),
        (aten.matmul.default, (_weights(6), _floats(2, 6, 4)), {}),
        (aten.conv2d.default, (image, kernel, _weights(6), [2, 2], [1, 1]), {}),
        (aten.conv2d.default, (image, _weights(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4), {}),
        (aten.embedding.default, (_weights(11, 8), _ints(11, 3, 4)), {}),
        (
            aten.embedding_bag.default,
            (_weights(11, 8), _ints(11, 12), torch.tensor([0, 3, 3]), False, 2),
            {},
        ),
        (aten.layer_norm.default, (x, [8], _weights(8), _weights(8)), {}),
        (aten._native_batch_norm_legit_functional.default, (image, *norm, True, 0.1, 1e-5), {}),
        (aten.native_group_norm.default, (image, norm[0], norm[1], 2, 4, 81, 2, 1e-5), {}),
        (aten.scaled_dot_product_attention.default, (q, k, v), {}),
        (aten.scaled_dot_product_attention.default, (q, k, v, torch.ones(5, 7) > 0), {}),
        (aten.native_dropout.default, (x, 0.1, True), {}),
        (aten.gelu.default, (x,), {"approximate": "tanh"}),
        (aten.relu.default, (x,), {}),
        (aten.silu.default, (x,), {}),
        (aten.neg.default, (x.transpose(0, 1)[:, :2, ::2],), {}),
        (aten.tanh.default, (x,), {}),
        (aten.pow.Tensor_Scalar, (x, 3.0), {}),
        (aten.add.Tensor, (x, _weights(8)), {}),
        (aten.mul.Tensor, (x, x.transpose(0, 0)), {}),
        (aten.mul.Tensor, (x, 2.0), {}),
        (aten.where.self, (x > 0, x, x), {}),
        (aten.eq.Tensor, (_ints(3, 4), _ints(3, 2, 4)), {}),
        (aten._softmax.default, (x, -1, False), {}),
        (aten._log_softmax.default, (x, -1, False), {}),
        (aten.cross_entropy_loss.default, (_floats(6, 9), _ints(9, 6)), {}),
        (aten.cross_entropy_loss.default, (_floats(6, 9, 2), _ints(9, 6, 2), None, 0), {}),
        (
            aten.binary_cross_entropy.default,
            (torch.rand(6, 9, requires_grad=True), torch.rand(6, 9)),
            {},
        ),
        (aten.nll_loss_forward.default, (_floats(6, 9), _ints(9, 6), None, 1, -100), {}),
        (aten.max_pool2d.default, (image, [3, 3], [2, 2], [1, 1]), {}),
        (aten.adaptive_avg_pool2d.default, (image, [1, 1]), {}),
        (aten.lstm.input, (x, [hidden, hidden], cells, True, 2, 0.0, True, False, True), {}),
        (aten.gather.default, (x, 1, _ints(6, 4, 2, 8)), {}),
        (aten.index.Tensor, (x, [_ints(4, 5), None, _ints(8, 5)]), {}),
        (aten.index_select.default, (x, 1, _ints(6, 3)), {}),
        (aten.scatter.src, (x, 1, _ints(6, 4, 2, 8), _floats(4, 2, 8)), {}),
        (aten.sum.dim_IntList, (x, [-1], True), {}),
        (aten.mean.default, (x,), {}),
        (aten.view.default, (x, [24, 8]), {}),
        (aten.reshape.default, (x.transpose(0, 1), [24, 8]), {}),
        (aten.expand.default, (_floats(1, 6, 1), [4, 6, 8]), {}),
        (aten.transpose.int, (x, 0, 1), {}),
        (aten.permute.default, (x, [2, 0, 1]), {}),
        (aten.slice.Tensor, (x, 1, 1, 4), {}),
        (aten.split.Tensor, (x, 2, 1), {}),
        (aten.unsqueeze.default, (x, 0), {}),
        (aten.clone.default, (x.transpose(0, 1),), {"memory_format": torch.contiguous_format}),
        (aten.clone.default, (x.transpose(0, 1),), {}),
        (aten.clone.default, (x[:, 1:4],), {}),
        (aten.cat.default, ([x, x], 1), {}),
        (aten.stack.default, ([x, x], 1), {}),
        (aten.cumsum.default, (x, 1), {}),
        (aten._to_copy.default, (x,), {"dtype": torch.float64}),
        (aten.arange.default, (5,), {"device": torch.device("cpu"), "pin_memory": False}),
        (aten.full.default, ([2, 3], 1.5), {"dtype": torch.float32}),
        (aten.new_ones.default, (x, [3]), {}),
        (aten.einsum.default, ("bsi,io->bso", [x, _weights(8, 5)]), {}),
        (aten.tensordot.default, (x, _weights(8, 6, 3), [1, 2], [1, 0]), {}),
        (aten.bilinear.default, (x, _floats(4, 6, 5), _weights(3, 8, 5), _weights(3)), {}),
        (aten.cdist.default, (x, _floats(4, 30, 8)), {}),
        (aten.mv.default, (_weights(7, 6), _floats(6)), {}),
        (aten.gru.input, (x, hidden[:1], gru, True, 1, 0.0, True, False, True), {}),
        (aten.lstm_cell.default, (_floats(4, 8), [_floats(4, 5), _floats(4, 5)], *cells[:4]), {}),
    ]


def sample_ids() -> list[str]:
    """Unique names for ``samples()``, in the same order."""
    return [f"{index}-{op}" for index, (op, _, _) in enumerate(samples())]
