"""Models with unusual parts are captured, and correct under random assignments of every op."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.base.errors import CaptureError, InputError
from autopar.frontend.capture import capture
from autopar.frontend.checking.gradients import compare_with_eager
from autopar.ir.mesh import Mesh
from autopar.lowering.program import lower
from autopar.sharding.strategy import Analysis, Strategy
from autopar.testing.lockstep import LockstepRun
from tests.models.families import VOCABULARY, llama
from tests.oracles import assert_same, lockstep_steps, random_assignment, reference_steps, state_of

NUM_SEEDS = 4


class Odd(nn.Module):
    """One linear layer, then whatever ``body`` does with its result."""

    def __init__(self, body: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def conditional(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y.sin(), (y,)).sum()


def checkpointed(model: Odd, x: Tensor) -> Tensor:
    return checkpoint(lambda z: model.linear(z).relu(), x, use_reentrant=False).sum()


def without_gradient(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    with torch.no_grad():
        scale = y.abs().amax(1, keepdim=True)
    return (y / scale).square().mean()


def in_place(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x).clone()
    y[:, 0] = 0
    y.view(-1)[2:5].mul_(2)
    model.seen.add_(y.detach().mean(0))
    return (y * model.seen).sum()


def assigned(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    with torch.no_grad():
        model.seen = model.seen * 0.9 + y.mean(0)
    return (y * model.seen).sum()


def assigned_after_a_write(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    model.seen.add_(1)
    before = model.seen
    model.seen = (before + y.detach()[0]).sin()
    return (y * before * model.seen).sum()


def mapped(model: Odd, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: model.linear(row).tanh() * 2)(x).sum()


def of_a_number(model: Odd, x: Tensor) -> Tensor:
    """A tensor without dimensions has a dimension 0, as far as operators ask."""
    y = model.linear(x).sum()
    y = y.flip(0).sum(0).mean(-1) + y.softmax(0) + y.cumsum(0) + y.sort(0)[0]
    return y.transpose(0, -1).max(0)[0] * y.gather(0, torch.tensor(0)) + y.std(0, correction=0)


def no_rules(model: Odd, x: Tensor) -> Tensor:
    """Operators without a rule: they are computed redundantly on every device."""
    y = model.linear(x)
    first, rest = torch.split(y, [1, 3], 1)
    largest, _ = rest.max(1)
    return (first.squeeze(1) * largest).sum() + y.std() + torch.linalg.svdvals(y)[0]


def views_of_views(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x).t().unfold(0, 2, 2).permute(2, 0, 1).flatten(1)
    return y.reshape(2, 2, 4).transpose(0, 2).contiguous().view(-1)[::3].square().sum()


def written_by_its_decomposition(model: Odd, x: Tensor) -> Tensor:
    """Circular padding is decomposed into writes to slices of an empty tensor."""
    y = model.linear(x).unsqueeze(1)
    return torch.nn.functional.pad(y, (1, 2), mode="circular").square().cumsum(-1).mean()


def complex_inside(model: Odd, x: Tensor) -> Tensor:
    return torch.fft.rfft(model.linear(x)).abs().mean()


def assigned_slice(model: Odd, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = model.linear(x)[:, 0]
    y[:, 1:] = model.linear(x)[:, :1]
    return y.square().mean()


def used_again(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(model.linear(x).relu())
    return nn.functional.linear(y, model.linear.weight.T).square().mean()


def chosen_rows(model: Odd, x: Tensor) -> Tensor:
    """A loss over rows that a mask chooses."""
    y = model.linear(x)
    chosen = x[:, 0] < x[:, 1]
    return nn.functional.cross_entropy(y[chosen], x[chosen].argmax(1)) + y.square().mean()


def written_back(model: Odd, x: Tensor) -> Tensor:
    """Experts on the rows routed to them, their results written back, twice."""
    y = model.linear(x)
    for _ in range(2):
        first = (y[:, 0] > 0).nonzero().squeeze(1)
        y = y.index_add(0, first, model.linear(y[first]).tanh()).sin()
    return y.square().mean()


def number_of_a_tensor(model: Odd, x: Tensor) -> Tensor:
    return (model.linear(x) * x.abs().sum().item()).square().mean()


def looked_up_by_frequency(model: Odd, x: Tensor) -> Tensor:
    """Gradients that are divided by how often a row is looked up, and sparse ones."""
    rows, index = model.linear(x), torch.tensor([[0, 1], [1, 1], [3, 0], [1, 2]])
    counted = nn.functional.embedding(index, rows, scale_grad_by_freq=True)
    return counted.square().mean() + nn.functional.embedding(index, rows).sin().mean()


def looped(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    with torch.no_grad():
        start = (torch.zeros((), dtype=torch.int64), y.detach())
        _, scale = while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.5), start)
    return (y * scale).mean()


def scanned(model: Odd, x: Tensor) -> Tensor:
    def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carry * 0.9 + row, carry * row

    last, rows = scan(combine, torch.zeros(4, dtype=x.dtype), model.linear(x))
    return rows.square().mean() + last.sum()


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is passed on, scaled, instead of rounding's gradient of zero."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale["factor"]
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


class RowClipped(torch.autograd.Function):
    """Two outputs; the gradient of a row depends on the whole row."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x * y, y + 1

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first / (1 + first.square().sum(1, keepdim=True)), second + x.sum()


def own_gradients(model: Odd, x: Tensor) -> Tensor:
    y = StraightThrough.apply(model.linear(x) * 3, {"factor": 0.5})
    first, second = RowClipped.apply(y, model.linear(x))
    return (first * second).square().mean()


def reentrant(model: Odd, x: Tensor) -> Tensor:
    return checkpoint(lambda z: model.linear(z).relu(), model.linear(x), use_reentrant=True).sum()


def reentrant_without_gradient(model: Odd, x: Tensor) -> Tensor:
    """None of its tensors needs a gradient, so autograd gives none to its parameters either."""
    first = checkpoint(lambda z: model.linear(z).sin(), x, use_reentrant=True)
    return (first * model.linear(x)).square().mean()


def reentrant_draws(model: Odd, x: Tensor) -> Tensor:
    def run(z: Tensor) -> Tensor:
        return nn.functional.dropout(model.linear(z), p=0.0).cos()

    return checkpoint(run, model.linear(x), use_reentrant=True, preserve_rng_state=False).mean()


def filled_diagonal(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    return (y.T @ y).fill_diagonal_(0).square().mean()


def filled_diagonal_of_a_tall_one(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    z = (y.T @ y).repeat(3, 1)
    z.fill_diagonal_(0.5, wrap=True)
    z[2:5].zero_()
    return (z * z.sin()).mean()


def strided_writes(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x).clone()
    y.as_strided((2, 3), (1, 4), 1).mul_(3)
    z = model.linear(x).t().clone(memory_format=torch.preserve_format)
    z.as_strided((2, 3), (1, 4), 1).copy_(y[:2, :3])
    return y.square().sum() + z.sin().sum()


def strided_reads(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x)
    z = y.t().clone(memory_format=torch.preserve_format)
    windows = y.as_strided((3, 4), (3, 2), 1)  # they overlap
    rows = y[1:].as_strided((2, 3), (4, 1), 5) * y[1:].as_strided((2, 3), (4, 1))
    return (windows.sin().sum() + rows.sum()) * z.as_strided((3, 2), (4, 1), 2).square().sum()


def joined_with_nothing(model: Odd, x: Tensor) -> Tensor:
    y = model.linear(x).unflatten(1, (2, 2))
    z = torch.cat([y.new_empty(0), y, model.seen[:0], y.sin()], 1)
    return torch.cat([z, x[0, :0]], -2).square().mean()


BODIES = [
    own_gradients, strided_reads, joined_with_nothing,
    reentrant, reentrant_without_gradient, reentrant_draws,
    filled_diagonal, filled_diagonal_of_a_tall_one, strided_writes,
    chosen_rows, written_back, number_of_a_tensor, looped, scanned,
    looked_up_by_frequency,
    written_by_its_decomposition, complex_inside, assigned_slice,
    conditional, checkpointed, without_gradient, in_place, mapped, no_rules, views_of_views,
    of_a_number,
    used_again, assigned, assigned_after_a_write,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_odd_models_train_as_in_eager(body):
    torch.manual_seed(0)
    model = Odd(body).double()
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(2)]
    captured = capture(model, batches[0])
    expected = reference_steps(copy.deepcopy(model), batches)
    analysis = Analysis(captured.graph)
    for seed in range(NUM_SEEDS):
        strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), seed))
        got = lockstep_steps(strategy, captured, state_of(model), batches)
        assert_same(got, expected, tolerance=1e-9)


def test_a_key_cache_that_is_still_empty_is_no_hindrance():
    torch.manual_seed(0)
    model = llama(num_layers=1)
    model.config.use_cache = True  # keys and values are joined to tensors of shape (0,)
    model.double()
    ids = torch.randint(0, VOCABULARY, (4, 8))
    batches = [{"input_ids": ids, "labels": ids.flip(0)}] * 2
    captured = capture(model, batches[0])
    analysis = Analysis(captured.graph)
    joins = [
        (op, space)
        for op, space in zip(captured.graph.ops, analysis.spaces)
        if any(captured.graph.values[index].shape == (0,) for index in op.inputs)
        and op.target_name == "aten.cat.default"
    ]
    assert len(joins) == 2
    assert all(space is not None and space.splittable() for _, space in joins)
    expected = reference_steps(copy.deepcopy(model), batches)
    for seed in range(NUM_SEEDS):
        strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), seed))
        got = lockstep_steps(strategy, captured, state_of(model), batches)
        assert_same(got, expected, tolerance=1e-6)  # parts of it compute in single precision


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y[1:].as_strided((2,), (1,), 0),  # in front of the value
        lambda y: y[:2].as_strided((2,), (8,), 4),  # behind it
    ],
)
def test_memory_outside_of_a_value_is_refused(read: Callable[[Tensor], Tensor]) -> None:
    model = Odd(lambda model, x: read(model.linear(x)).sum())
    with pytest.raises(CaptureError, match=r"as_strided with size \(2,\).*it reaches others"):
        capture(model, torch.randn(4, 4))


@pytest.mark.parametrize("body", [written_back, own_gradients], ids=lambda body: body.__name__)
def test_gradients_of_regions_and_functions_are_of_single_precision(body):
    """Autocast is off outside, and so also where they are computed."""
    torch.manual_seed(0)
    model, x = Odd(body), torch.randn(4, 4)
    captured = capture(model, {"x": x})
    analysis = Analysis(captured.graph)
    strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), 0))
    got = lockstep_steps(strategy, captured, state_of(model), [{"x": x}])
    assert_same(got, reference_steps(model, [{"x": x}]), tolerance=1e-5)


def test_an_element_wise_function_is_split():
    def body(model: Odd, x: Tensor) -> Tensor:
        return StraightThrough.apply(model.linear(x), {"factor": 0.5}).square().mean()

    captured = capture(Odd(body), (torch.randn(4, 4),))
    (rounding,) = (op for op in captured.graph.ops if "StraightThrough" in op.target_name)
    space = Analysis(captured.graph).spaces[rounding.index]
    assert space is not None
    assert len(space.sizes) == 2


def test_functions_whose_gradient_cannot_be_kept_are_refused():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.rand_like(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class OfModule(StraightThrough):
        @staticmethod
        def forward(ctx, x, module):
            return module(x)

    with pytest.raises(CaptureError, match="Noisy draws random numbers"):
        capture(Odd(lambda model, x: Noisy.apply(model.linear(x)).sum()), (torch.randn(4, 4),))
    with pytest.raises(CaptureError, match="OfModule is called with more than tensors"):
        capture(
            Odd(lambda model, x: OfModule.apply(model.linear(x), model.linear).sum()),
            (torch.randn(4, 4),),
        )


def test_a_module_may_keep_what_it_computed():
    def body(model: Odd, x: Tensor) -> Tensor:
        model.kept = model.linear(x)
        return model.kept.square().mean()

    model = Odd(body)
    model(torch.randn(4, 4))
    assert capture(model, (torch.randn(4, 4),)).graph.loss is not None
    assert model.kept.requires_grad


def test_a_buffer_returned_and_then_assigned_is_returned_as_it_was():
    class Swapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd(lambda model, x: model.linear(x))
            self.register_buffer("other", torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            seen = self.odd.seen
            self.other, self.odd.seen = seen, self.other
            return self.odd(x * self.odd.seen).mean(), seen

    captured = capture(Swapping(), torch.randn(4, 4))
    graph = captured.graph
    assert {graph.values[old].target for old, _ in graph.mutations} == {"other", "odd.seen"}
    compare_with_eager(captured, Swapping(), torch.randn(4, 4))


def test_a_gathered_parameter_is_contiguous():
    """The kernel of weight normalisation asks for it, and a padded gather leaves gaps."""
    torch.manual_seed(0)
    convolution = nn.Conv1d(4, 8, 4, groups=2)
    model = nn.utils.parametrizations.weight_norm(convolution, dim=2).double()
    batches = [(torch.randn(3, 4, 9, dtype=torch.float64),)]
    captured = capture(model, batches[0], loss_fn=lambda y: y.square().mean())
    analysis = Analysis(captured.graph)
    for seed in range(3 * NUM_SEEDS):
        strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (3,)), seed))
        run = LockstepRun(lower(strategy), captured.graph, state_of(model))
        loss = run.step(captured.signature.flatten(batches[0], {})).loss[0]
        torch.testing.assert_close(loss, model(*batches[0]).square().mean().detach())


def test_a_size_that_depends_on_values_is_refused_where_it_leaves_the_model():
    model = Odd(lambda model, x: model.linear(x[x.sum(1) > 0]))
    with pytest.raises(CaptureError, match=r"depends on tensor values(.|\n)*torch.where"):
        capture(model, (torch.randn(4, 4),), loss_fn=lambda y: y.sum())


def test_a_random_number_of_random_numbers_is_refused():
    def body(model: Odd, x: Tensor) -> Tensor:
        return nn.functional.dropout(model.linear(x)[x[:, 0] > 0], 0.5).sum()

    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(Odd(body), (torch.randn(4, 4),))


class TwoHeads(nn.Module):
    """The loss is of one head; the other is an output only, or read without its gradient."""

    def __init__(self) -> None:
        super().__init__()

        def layers(num_layers: int) -> nn.Sequential:  # long enough for a block of its own
            return nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))))

        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.side, self.teacher = layers(6), layers(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x).relu()
        side, target, out = self.side(y), self.teacher(y), self.head(y)
        return {"side": side * 2, "loss": (out - target.detach()).square().mean()}


def test_what_the_loss_does_not_depend_on_gets_no_gradient():
    model = TwoHeads().double()
    x = torch.randn(4, 4, dtype=torch.float64)
    captured = capture(model, {"x": x})
    model(x)["loss"].backward()
    expected = {n for n, p in model.named_parameters() if p.grad is not None}
    assert expected == {"body.weight", "body.bias", "head.weight", "head.bias"}
    analysis = Analysis(captured.graph)
    for seed in range(NUM_SEEDS):
        strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), seed))
        assert set(lockstep_steps(strategy, captured, state_of(model), [{"x": x}]).gradients) == (
            expected
        )


def test_running_statistics_carry_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = capture(model, (torch.randn(4, 4),), loss_fn=lambda y: y.sum()).graph
    (norm,) = (op for op in graph.ops if "batch_norm" in op.target_name)
    flows = [o is not None and graph.values[o].differentiable for o in norm.outputs]
    assert flows[0]
    assert not any(flows[3:])


class SparseTable(nn.Module):
    """Its table asks for sparse gradients, which leave as dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index).square().mean()


def test_sparse_gradients_are_made_dense():
    torch.manual_seed(0)
    model, index = SparseTable().double(), torch.tensor([[0, 1], [1, 5]])
    captured = capture(model, {"index": index})
    analysis = Analysis(captured.graph)
    strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), 0))
    got = lockstep_steps(strategy, captured, state_of(model), [{"index": index}])
    model(index).backward()
    expected = model.table.weight.grad.to_dense()
    torch.testing.assert_close(got.gradients["table.weight"], expected)


class Recurrent(nn.Module):
    """An LSTM over packed sequences, given or packed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x, lengths=None):
        if lengths is not None:
            x = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.layer(x)[0].data.square().mean()


def test_packed_sequences_are_refused_with_a_way_out():
    given = rnn.pack_sequence([torch.randn(5, 4), torch.randn(3, 4)])
    for call in ((given,), {"x": given}, given):
        with pytest.raises(InputError, match=r"PackedSequence cannot be an input.*pad_sequence"):
            capture(Recurrent(), call)
    call = (torch.randn(3, 6, 4), torch.tensor([6, 3, 4]))
    with pytest.raises(CaptureError, match=r"test_odd_captures.py.*packs sequences.*\n.*mask"):
        capture(Recurrent(), call)


def by_grad(model, x):
    return torch.func.grad(lambda given: model.linear(given).square().sum())(x).square().mean()


def by_jacobian(model, x):
    return torch.func.vmap(torch.func.jacrev(model.linear))(x).square().mean()


@pytest.mark.parametrize("body", [by_grad, by_jacobian])
def test_gradients_inside_a_forward_pass_are_refused_with_a_way_out(body):
    with pytest.raises(CaptureError, match=r"forward pass, by torch.func.*\n.*torch.func.jvp"):
        capture(Odd(body), (torch.randn(3, 4),))


def by_forward_mode(model, x):
    out, tangent = torch.func.jvp(lambda given: model.linear(given).tanh(), (x,), (x.cos(),))
    return (out + tangent).square().mean()


def by_functional_call(model, x):
    held = {name: p * 1.5 for name, p in model.linear.named_parameters()}
    return torch.func.functional_call(model.linear, held, (x,)).tanh().mean()


@pytest.mark.parametrize("body", [by_forward_mode, by_functional_call])
def test_other_transforms_train_as_in_eager(body):
    torch.manual_seed(0)
    model, x = Odd(body).double(), torch.randn(4, 4).double()
    captured = capture(model, {"x": x})
    analysis = Analysis(captured.graph)
    strategy = Strategy(analysis, random_assignment(analysis, Mesh(("a",), (2,)), 0))
    got = lockstep_steps(strategy, captured, state_of(model), [{"x": x}])
    assert_same(got, reference_steps(model, [{"x": x}]), tolerance=1e-9)


@pytest.mark.parametrize("layer", ["encoder", "decoder", "both"])
def test_transformers_of_torch_take_any_mask(layer: str) -> None:
    """Eager mode compares a mask with the causal one, and takes a faster kernel if they are equal:
    the graph uses the mask."""
    mask = nn.Transformer.generate_square_subsequent_mask(5)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if layer == "encoder":
                out = self.inner.encoder(x, mask=mask)
            elif layer == "decoder":
                out = self.inner.decoder(y, x, tgt_mask=mask)
            else:
                out = self.inner(x, y, src_mask=mask, tgt_mask=mask)
            loss: Tensor = (out * x).mean()
            return loss

    torch.manual_seed(0)
    model, batch = Masked(), (torch.randn(4, 5, 8), torch.randn(4, 5, 8))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    reference, expected = copy.deepcopy(model), []
    optimizer = sgd(reference.parameters())
    with autopar.compile(model, 1, batch, optimizer=sgd, profile_limit_s=0) as compiled:
        got = [compiled.train_step(*batch).item() for _ in range(3)]
    for _ in range(3):
        optimizer.zero_grad()
        loss = reference(*batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert got == pytest.approx(expected, rel=1e-5)
