"""Calls in eval mode on real processes equal eager PyTorch in eval mode."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.lowering.program import lower
from autopar.planning.constraints import Force
from autopar.runtime.compiled import Compiled
from autopar.runtime.options import RunOptions
from autopar.runtime.step import forward_programs
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import build, token_batch, vector_batch
from tests.oracles import loss_of, random_assignment, to_double
from tests.runtime.processes import lower_forward

pytestmark = pytest.mark.usefixtures("reused_workers")

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STRATEGIES: dict[str, tuple[dict[str, int], list[Any]]] = {
    "data parallel": ({"x": 2}, [Force("data_parallel")]),
    "tensor parallel": ({"x": 2}, [Force("tensor_parallel")]),
    "zero3 x tensor": ({"x": 2, "y": 2}, [Force("zero3", axis="x"), Force("tensor_parallel", "y")]),
}


class Net(nn.Module):
    """Batch norm, dropout, a frozen part, and tensors that only evaluation reads."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(dropped)
        self.frozen = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 8)
        self.temperature = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("offset", torch.arange(8.0))
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.dropout(self.norm(self.first(x)).relu())
        logits = self.head(self.frozen(hidden))
        if self.training:
            self.steps.add_(1)
        else:  # what it computes of buffers alone is another number after each step
            logits = logits * self.temperature + self.offset * (self.steps + 1)
        return logits if y is None else F.cross_entropy(logits, y)


def net_batch(seed: int) -> dict[str, Tensor]:
    return vector_batch(seed)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "net": (lambda: Net().train(), net_batch),
    "gpt2": (lambda: build("gpt2")[0], token_batch),
    "resnet": (lambda: build("resnet")[0], build("resnet")[1]),
}


def compile_on(model: nn.Module, batch: Any, strategy: str, **options: Any) -> Compiled:
    mesh, constraints = STRATEGIES[strategy]
    num_devices = functools.reduce(lambda a, b: a * b, mesh.values())
    return autopar.compile(
        model, num_devices, example_inputs=batch, mesh=mesh, constraints=constraints,
        optimizer=sgd, profile_limit_s=0, **options,
    )  # fmt: skip


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(**batch))
    loss.backward()
    optimizer.step()
    return loss.detach()


def first_rows(batch: dict[str, Tensor], num: int) -> dict[str, Tensor]:
    return {k: v[:num] for k, v in batch.items()}


def assert_equal_outputs(got: Any, expected: Any, tolerance: float = 1e-8) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        got, expected = {"": got}, {"": expected}
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        if isinstance(tensor, Tensor):
            # Some losses of transformers are computed in single precision.
            bound = tolerance if tensor.dtype is torch.float64 else max(tolerance, 2e-6)
            torch.testing.assert_close(got[key], tensor.detach(), rtol=bound, atol=bound)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("net", "data parallel"),
        ("net", "zero3 x tensor"),
        ("gpt2", "tensor parallel"),
        ("gpt2", "zero3 x tensor"),
        ("resnet", "data parallel"),
    ],
)
def test_evaluation_after_training_equals_eager(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    make, make_batch = MODELS[name]
    model = make().double()
    batches = [to_double(make_batch(seed)) for seed in range(4)]
    compiled = compile_on(model, batches[0], strategy)
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    unlabelled = {k: v for k, v in batches[3].items() if k not in ("labels", "y")}
    calls = [batches[3], first_rows(batches[2], 3), unlabelled, first_rows(unlabelled, 1)]
    # GPT-2's loss, and so its gradients, are computed in single precision by transformers itself.
    tolerance = 2e-6 if name == "gpt2" else 1e-8
    for round_ in range(2):
        for batch in batches[:2]:
            expected = train_step(reference, optimizer, batch)
            loss = compiled.train_step(**batch)
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        before = compiled.full_state_dict()
        assert compiled.eval() is compiled
        trained, same = copy.deepcopy(reference).eval(), copy.deepcopy(reference).eval()
        same.load_state_dict(before)
        for call in calls[round_:]:
            output = compiled(**call)
            assert_equal_outputs(output, trained(**call), tolerance)
            assert_equal_outputs(output, same(**call))
        after = compiled.full_state_dict()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
        compiled.train()
    assert_equal_outputs(compiled(**batches[0]), copy.deepcopy(reference)(**batches[0]), tolerance)
    short = first_rows(batches[0], 2)
    assert_equal_outputs(compiled(**short), copy.deepcopy(reference)(**short), tolerance)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "num_devices", "seed"),
    [("net", 2, 0), ("net", 4, 1), ("net", 4, 2), ("gpt2", 4, 0), ("resnet", 2, 1)],
)
def test_any_split_of_the_forward_pass(name: str, num_devices: int, seed: int) -> None:
    """Parameters are placed by a drawn training assignment; all other choices are drawn again."""
    torch.manual_seed(0)
    make, make_batch = MODELS[name]
    model = make().double()
    batch = to_double(make_batch(0))
    mesh = Mesh(("x",), (2,)) if num_devices == 2 else Mesh(("x", "y"), (2, 2))
    captured = capture(model, batch)
    analysis = Analysis(captured.graph)
    strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
    compiled = Compiled(
        captured=captured,
        program=lower(strategy),
        forward_program=lambda: lower(strategy, training=False),
        lower_forward=lower_forward(mesh, seed + 100),
        plan=None,
        devices=[torch.device("cpu")] * num_devices,
        model=model,
        options=RunOptions(optimizer=sgd),
    )
    compiled.train_step(**batch)
    compiled.copy_to(model)
    if isinstance(model, Net):
        model.steps.fill_(1)  # a buffer that state_dict() leaves out
    expected = model.eval()(**first_rows(batch, 2))
    assert_equal_outputs(compiled.eval()(**first_rows(batch, 2)), expected)
    assert_equal_outputs(compiled(**batch), model(**batch))


def test_no_dropout_and_running_statistics() -> None:
    torch.manual_seed(0)
    model, batch = Net(dropped=0.5).train(), net_batch(0)
    compiled = compile_on(model, batch, "data parallel", seed=3)
    with torch.no_grad():
        dropped = compiled(**batch)
        compiled.train_step(**batch)
        assert compiled(**batch) != dropped
    first, second = compiled.eval()(**batch), compiled(**batch)
    assert torch.equal(first, second)
    plain = Net().train()
    compiled.copy_to(plain)
    plain.steps.fill_(1)  # a buffer that state_dict() leaves out
    torch.testing.assert_close(first, plain.eval()(**batch).detach())
    shifted = {**batch, "x": batch["x"] + 5}  # its own statistics would take the shift away
    torch.testing.assert_close(compiled(**shifted), plain(**shifted).detach())


def test_the_users_model_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model, batch = Net().train(), net_batch(0)
    model.dropout.eval()
    modes = [m.training for m in model.modules()]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    compiled = compile_on(model, batch, "data parallel")
    assert compiled.training
    model.eval()  # says nothing about the compiled model
    compiled.train_step(**batch)
    assert compiled.training
    model.train()
    model.dropout.eval()
    assert not compiled.eval().training
    compiled(**batch)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert compiled.train(False).train().training


def test_a_model_compiled_in_eval_mode() -> None:
    torch.manual_seed(0)
    model, batch = Net(dropped=0.5).eval(), net_batch(0)
    compiled = compile_on(model, batch, "data parallel", seed=0)
    assert not compiled.training
    torch.testing.assert_close(compiled(**batch), model(**batch).detach())
    one, model = compiled.train()(**batch), model.train()
    expected = copy.deepcopy(model)
    expected.dropout.p = 0.0
    assert abs(one.item() - expected(**batch).item()) > 1e-6


@pytest.mark.parametrize("keyword", [False, True])
def test_targets_of_a_loss_function_may_be_left_out(keyword: bool) -> None:
    torch.manual_seed(0)
    model, batch = Net().train(), net_batch(0)
    x, y = batch["x"], batch["y"]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    example = {"x": x, "target": y} if keyword else (x, y)
    compiled = compile_on(model, example, "data parallel", loss_fn=loss_fn).eval()
    expected = model.eval()(x).detach()

    def call(rows: int) -> Tensor:
        if keyword:
            return compiled(x=x[:rows], target=y[:rows])
        return compiled(x[:rows], y[:rows])

    torch.testing.assert_close(call(4), expected)
    torch.testing.assert_close(call(3), model(x[:3]).detach())
    torch.testing.assert_close(compiled(x=x) if keyword else compiled(x), expected)


def test_programs_are_kept_and_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = Net().train(), net_batch(0)
    monkeypatch.setattr(forward_programs, "MAX_PROGRAMS", 2)
    compiled = compile_on(model, batch, "data parallel").eval()
    captures: list[Any] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        captures.append(args)
        return capture(*args, **kwargs)

    monkeypatch.setattr(forward_programs, "capture", counting)
    model.eval()

    def check(rows: Sequence[int], num_captures: int) -> None:
        for num in rows:
            x = batch["x"][:num]
            torch.testing.assert_close(compiled(x), model(x).detach())
        assert len(captures) == num_captures

    check([1, 2, 1, 2], 2)
    check([1, 3], 3)
    check([1, 3, 1], 3)
    check([2], 4)


def test_loaded_buffers_are_those_that_are_read() -> None:
    torch.manual_seed(0)
    model, batch = Net().train(), net_batch(0)
    compiled = compile_on(model, batch, "data parallel").eval()
    compiled(**batch)
    other = Net().eval()
    with torch.no_grad():
        other.offset.mul_(3)
        other.norm.running_mean.uniform_()
    compiled.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(**batch), other(**batch).detach())


class Telling(nn.Module):
    """Returns a parameter, a buffer, an input and a constant as well as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("labels", torch.arange(8.0))

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        logits = self.linear(x)
        told = {"logits": logits, "x": [x], "weight": (self.linear.weight, self.labels), "of": 8}
        return told if y is None else {**told, "loss": F.cross_entropy(logits, y)}


def test_outputs_that_are_not_computed() -> None:
    torch.manual_seed(0)
    model, batch = Telling().train(), net_batch(0)
    compiled = compile_on(model, batch, "zero3 x tensor")
    compiled.train_step(**batch)
    compiled.copy_to(model)
    for mode in (True, False):
        for call in (batch, {"x": batch["x"][:3]}):
            output, expected = compiled.train(mode)(**call), model.train(mode)(**call)
            assert output["of"] == 8
            torch.testing.assert_close(output, expected)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = StraightThrough.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return rounded


def test_a_forward_pass_sees_through_a_models_own_functions() -> None:
    """It needs no gradient of theirs, so their ops are split like any other."""
    x, model = torch.randn(4, 16), Rounded()
    trained, evaluated = (
        {op.target_name for op in capture(model, x, differentiable=with_backward).graph.ops}
        for with_backward in (True, False)
    )
    assert any("autopar_functions" in name for name in trained)
    assert evaluated == {"aten.linear.default", "aten.round.default"}


def test_beside_micro_batches() -> None:
    model, make_batch = build("mlp")
    batch = make_batch(0)
    compiled = compile_on(model, batch, "data parallel", num_microbatches=2)
    expected = loss_of(model(**batch)).detach()
    torch.testing.assert_close(compiled.train_step(**batch), expected)
    compiled.copy_to(model)
    torch.testing.assert_close(compiled(**batch), model(**batch).detach())
    compiled.eval()
    torch.testing.assert_close(compiled(**batch), model(**batch).detach())
    torch.testing.assert_close(compiled(x=batch["x"][:3]), model(batch["x"][:3]).detach())


def test_calls_under_no_grad_and_inference_mode() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(encoder, nn.Linear(16, 8)).train()
    x, y = torch.randn(4, 3, 16), torch.randn(4, 3, 8)
    compiled = compile_on(model, (x, y), "tensor parallel", loss_fn=F.mse_loss).eval()
    model.eval()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x[:3]), model(x[:3]))


def test_modes_before_the_first_call() -> None:
    torch.manual_seed(0)
    model, batch = Net().train(), net_batch(0)
    compiled = autopar.compile(model, 2, optimizer=sgd, mesh={"x": 2}, profile_limit_s=0)
    assert compiled.training
    assert compiled.eval() is compiled
    assert not compiled.training
    torch.testing.assert_close(compiled(**batch), model.eval()(**batch).detach())
    assert compiled.train().training


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, b: c(b["x"], local=True), "part of a call like those that are trained with"),
        (lambda c, b: c(**b, local=True), "local=True"),
        (lambda c, b: c(b["x"][:, :5]), "the model itself fails"),
    ],
)
def test_calls_that_cannot_be(call: Any, message: str) -> None:
    torch.manual_seed(0)
    model, batch = Net().train(), net_batch(0)
    compiled = compile_on(model, batch, "data parallel").eval()
    with pytest.raises(InputError, match=message):
        call(compiled, batch)
    torch.testing.assert_close(compiled(**batch), model.eval()(**batch).detach())


class EarlyLoss(nn.Module):
    """Returns a loss that is computed early, and is read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        early = None
        for layer in self.layers:
            x = x + layer(x)
            if early is None:
                early = nn.functional.cross_entropy(self.head(x), y)
        assert early is not None
        return {"loss": early + x.square().mean(), "early": early, "late": x}


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("schedule", ["zb_v", "v_half", "interleaved", "1f1b"])
def test_pipelines_hand_out_what_later_stages_read_too(
    schedule: str, num_microbatches: int
) -> None:
    """A value may come back to the device that made it, and is dropped there by the later stage."""
    torch.manual_seed(0)
    reference = EarlyLoss().double()
    batch = torch.randn(8, 8, dtype=torch.float64), torch.randint(3, (8,))
    num_stages = 2 if schedule == "1f1b" else 4
    optimizer = sgd(reference.parameters())
    with autopar.compile(
        copy.deepcopy(reference), 2, batch, optimizer=sgd, schedule=schedule,
        num_stages=num_stages, num_microbatches=num_microbatches, profile_limit_s=0,
    ) as compiled:  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            reference(*batch)["loss"].backward()
            optimizer.step()
            compiled.train_step(*batch)
        with torch.no_grad():
            expected = reference(*batch)
            assert_equal_outputs(compiled(*batch), expected)
            compiled.eval()
            assert_equal_outputs(compiled(*batch), expected)
