"""Mixed precision on real processes: float32 outside, a low precision inside, scaled losses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import autopar
from autopar import Force, Precision
from autopar.base.errors import InputError, PlanError
from tests.runtime.conftest import Groups
from tests.runtime.processes import steps_on_shards

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CLUSTER = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
KINDS: dict[str, dict[str, Any]] = {
    "data parallel": {"constraints": Force("data_parallel")},
    "zero3": {"constraints": Force("zero3")},
    "tensor parallel": {"constraints": Force("tensor_parallel")},
    "late updates": {
        "constraints": Force("data_parallel"), "schedule": "conventional", "num_stages": 2,
    },
    "pipeline": {"num_stages": 2, "num_microbatches": 2},
    "clipped": {"constraints": Force("zero3"), "max_grad_norm": 0.5},
}  # fmt: skip


class Net(nn.Module):
    """One more linear layer than its non-linear ones; ``drop`` is the share that is dropped."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.drop = nn.Dropout(drop)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.head(self.norm(x))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)


def model_of(drop: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(drop)


@pytest.fixture
def compiled_for(reused_workers: None) -> Callable[..., Any]:
    """``autopar.compile`` onto the workers of the tests."""

    def make(model: nn.Module, **options: Any) -> autopar.Compiled:
        options = {"optimizer": SGD, "profile_limit_s": 0, **options}
        return autopar.compile(model, 2, example_inputs=batch(0), loss_fn=F.mse_loss, **options)

    return make


class Eager:
    """Eager training with float32 weights, every cast written out."""

    def __init__(self, dtype: torch.dtype, max_grad_norm: float | None = None) -> None:
        self.model, self.dtype, self.max_grad_norm = model_of(), dtype, max_grad_norm
        self.optimizer = SGD(self.model.parameters())

    def output(self, x: Tensor) -> Tensor:
        low = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, low, (x.to(self.dtype),))

    def step(self, batch: tuple[Tensor, Tensor], scaler: Any = None) -> float:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.output(batch[0]).float(), batch[1])
        if scaler is None:
            loss.backward()
            self.optimizer.step()
            return loss.item()
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        scaler.step(self.optimizer)
        scaler.update()
        return loss.item()


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in module.state_dict().items()}


def assert_near(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], share: float) -> None:
    """All weights together are off by at most ``share`` of their distance from the first ones."""
    first = state(model_of())
    off = sum((got[n] - x).square().sum() for n, x in expected.items())
    moved = sum((first[n] - x).square().sum() for n, x in expected.items())
    assert off <= share**2 * moved, f"{(off / moved) ** 0.5:.3g} of the way"


@pytest.mark.parametrize("kind", ["data parallel", "zero3", "tensor parallel", "pipeline"])
def test_five_steps_are_those_of_eager(compiled_for: Any, kind: str) -> None:
    eager, single = Eager(torch.bfloat16), Eager(torch.float32)
    compiled = compiled_for(model_of(), precision="bf16", **KINDS[kind])
    for seed in range(5):
        single.step(batch(seed))
        expected = eager.step(batch(seed))
        assert compiled.train_step(*batch(seed)).item() == pytest.approx(expected, rel=2e-3)
        assert {x.dtype for x in compiled.gradients().values()} == {torch.float32}
    got = compiled.full_state_dict()
    assert {x.dtype for x in got.values()} == {torch.float32}
    assert_near(got, state(eager.model), 0.02)
    assert compiled.loss_scale == 1
    output = compiled.eval()(batch(9)[0])
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, eager.output(batch(9)[0]), rtol=0.05, atol=0.05)


def test_sharded_parameters_are_those_of_fsdp(compiled_for: Any, groups: Groups) -> None:
    """The reference is ``fully_shard`` with a mixed-precision policy, on the same two processes."""
    compiled = compiled_for(model_of(), precision="bf16", **KINDS["zero3"])
    losses = [compiled.train_step(*batch(seed)).item() for seed in range(5)]
    got = compiled.full_state_dict()
    theirs, weights = groups(2).call("fsdp_steps", [batch(seed) for seed in range(5)])[0]
    assert losses == pytest.approx(theirs, rel=2e-3)
    assert_near(got, weights, 0.02)


def fsdp_steps(rank: int, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """Losses and whole weights of training under ``fully_shard``, on one of two ranks."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    return steps_on_shards(model, SGD(model.parameters()), rank, batches)


def large(factor: float) -> tuple[Tensor, Tensor]:
    """One row whose gradients are large, on one device and in one micro-batch alone."""
    x, y = torch.zeros(8, 16), torch.zeros(8, 8)
    x[7, 3], y[7] = 1.0, factor
    return x, y


def in_loop(compiled: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    """A training step, written as a loop of one's own."""
    loss: Tensor = compiled(*given)
    loss.backward()
    compiled.optimizer.step()
    compiled.optimizer.zero_grad()
    return loss.detach()


def in_one(compiled: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = compiled.train_step(*given)
    return loss


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("data parallel", in_one), ("late updates", in_one), ("pipeline", in_one),
        ("clipped", in_one), ("data parallel", in_loop), ("late updates", in_loop),
        ("pipeline", in_loop), ("clipped", in_loop),
    ],
)  # fmt: skip
def test_the_scale_of_the_loss_is_that_of_a_grad_scaler(
    compiled_for: Any, kind: str, step: Any, tmp_path: Path
) -> None:
    """Steps that overflow are left out and halve it; after three others it doubles."""
    precision = Precision(compute="fp16", loss_scale=2.0**14, growth_interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    eager = Eager(torch.float16, KINDS[kind].get("max_grad_norm"))
    compiled = compiled_for(model_of(), precision=precision, **KINDS[kind])
    batches = [batch(0), large(100.0), *map(batch, range(1, 5)), large(300.0), *map(batch, (5, 6))]
    scales, skipped = [], 0
    for given in batches:
        before = scaler.get_scale()
        expected = eager.step(given, scaler)
        skipped += scaler.get_scale() < before
        assert step(compiled, given).item() == pytest.approx(expected, rel=1e-3)
        assert compiled.loss_scale == scaler.get_scale()
        assert compiled.num_skipped_steps == skipped
        scales.append(compiled.loss_scale)
    assert skipped >= 2
    assert max(scales) > min(scales)
    assert_near(compiled.full_state_dict(), state(eager.model), 0.01)
    compiled.save(tmp_path / "saved")
    again = compiled_for(model_of(), precision=precision, **KINDS[kind])
    assert again.loss_scale == 2.0**14
    again.load(tmp_path / "saved")
    assert again.loss_scale == scales[-1]


def test_a_loss_that_is_not_finite_is_not_the_scales_fault(compiled_for: Any) -> None:
    compiled = compiled_for(model_of(), precision="fp16", **KINDS["data parallel"])
    x, y = batch(0)
    x[0, 0] = torch.inf
    with pytest.raises(autopar.NonFiniteError):
        compiled.train_step(x, y)
    assert compiled.loss_scale == 65536
    assert compiled.num_skipped_steps == 0


def test_dropout_passes_the_gradient_check_and_trains(compiled_for: Any) -> None:
    compiled = compiled_for(model_of(0.3), precision="bf16", **KINDS["data parallel"])
    losses = [compiled.train_step(*batch(0)).item() for _ in range(8)]
    assert losses[-1] < losses[0]


class Scaled(nn.Module):
    """Buffers and constants in float32 meet its values; ``casts`` says who casts them then."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.inner, self.casts = nn.Linear(16, 16), casts
        self.keys, self.conv = nn.Linear(16, 16), nn.Conv1d(16, 16, 1)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def low(self, x: Tensor) -> Tensor:
        """A value in the dtype of the parameters."""
        return x.to(self.inner.weight.dtype) if self.casts else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(x * self.scale)
        values = self.inner(x)
        queries, keys = values * self.scale, self.keys(x) * self.scale
        shares = torch.softmax(queries @ keys.transpose(0, 1), 0)
        mean = self.low(shares) @ values
        x = F.scaled_dot_product_attention(
            self.low(queries)[None], self.low(keys)[None], values[None]
        )[0]
        x = self.conv(self.low(x * self.scale).unsqueeze(-1)).squeeze(-1)
        return self.head(self.low(self.norm(self.low(x * self.scale)) * self.scale)) + mean[:, :8]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_values_that_buffers_made_float32_are_cast_by_the_next_product(precision: str) -> None:
    """As by a model that casts them itself, bit by bit."""
    losses = []
    for casts in (True, False):
        torch.manual_seed(0)
        with autopar.compile(
            Scaled(casts), 1, batch(0), loss_fn=F.mse_loss, optimizer=SGD, precision=precision,
            profile_limit_s=0,
        ) as compiled:  # fmt: skip
            losses.append([compiled.train_step(*batch(step)).item() for step in range(4)])
    assert losses[0] == losses[1]


def test_a_model_that_fails_in_the_low_precision_alone_is_told_so() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(16, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.lstm((x * torch.ones(16)).unsqueeze(0))
            return self.head(out[0])

    with pytest.raises(InputError, match=r"with precision='bf16', and not without it.*\.to\("):
        autopar.compile(
            Recurrent(), 1, batch(0), loss_fn=F.mse_loss, optimizer=SGD, precision="bf16",
            profile_limit_s=0,
        )  # fmt: skip


def test_a_plan_says_its_precision_and_is_replayed_with_it(
    compiled_for: Any, tmp_path: Path
) -> None:
    example: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": SGD}
    plan = autopar.plan(
        model_of(), CLUSTER, batch(0), precision=Precision(reduce="bf16"), **KINDS["zero3"],
        **example,
    )  # fmt: skip
    assert re.search("precision +bf16, gradients summed in bf16", plan.report("full"))
    plan.to_json(tmp_path / "plan.json")
    compiled = compiled_for(model_of(), plan=tmp_path / "plan.json")
    assert compiled.plan.to_json() == plan.to_json()
    with pytest.raises(InputError, match=r"precision is bf16, gradients summed in fp32, and the"):
        compiled_for(model_of(), plan=plan, precision="bf16")
    single = autopar.plan(model_of(), CLUSTER, batch(0), **KINDS["zero3"], **example)
    with pytest.raises(InputError, match="the plan was made with none"):
        compiled_for(model_of(), plan=single, precision="bf16")
    wrong = plan.to_json().replace('"compute": "bf16"', '"compute": "fp8"')
    with pytest.raises(PlanError, match="precision"):
        autopar.Plan.from_json(wrong)
    torn = plan.to_json().replace('"compute": "bf16"', '"compute": "fp16"')
    with pytest.raises(PlanError, match=r"at \$.graph.precision: .* summed in 'fp32'"):
        autopar.Plan.from_json(torn)


def test_what_travels_has_the_low_precision(compiled_for: Any) -> None:
    """Gathers of parameters half as much, reductions as much as in float32, or half as chosen."""

    def sent(precision: Any) -> dict[str, int]:
        program = compiled_for(model_of(), precision=precision, **KINDS["zero3"]).program
        found: dict[str, int] = {}
        for call in program.collectives():
            if call.where in {p.name for p in program.parameters}:
                found[call.kind] = found.get(call.kind, 0) + call.size_bytes
        return found

    single, mixed, low = sent(None), sent("bf16"), sent(Precision(reduce="bf16"))
    assert mixed["all_gather"] == low["all_gather"] == single["all_gather"] / 2
    assert mixed["reduce_scatter"] == single["reduce_scatter"] == 2 * low["reduce_scatter"]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"nonfinite": "ignore"}], ids=str)
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_gradients_that_outweigh_all_else_are_counted(
    precision: str | None, options: dict[str, Any]
) -> None:
    """Those of a low precision are released as they are cast, one block after another."""
    if precision == "fp16" and "nonfinite" in options:
        pytest.skip("overflows cannot be ignored")
    layers = [nn.Linear(512, 512) for _ in range(6)]
    given = torch.randn(2, 512), torch.randn(2, 512)
    with autopar.compile(
        nn.Sequential(*layers), 1, example_inputs=given, loss_fn=F.mse_loss, optimizer=SGD,
        precision=precision, profile_limit_s=0, **options,
    ) as compiled:  # fmt: skip
        compiled.train_step(*given)
        (held,) = compiled.peak_tensor_bytes(*given)
        counted = sum(compiled.plan.prediction.memory_bytes.values())
    assert counted == pytest.approx(held, rel=0.01)


def test_the_low_precision_is_priced_and_counted() -> None:
    """On GPUs its products are faster; optimizer and parameters take what they took."""
    cluster = autopar.Cluster.preset("h100-sxm", nodes=1, devices_per_node=2)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
        example = torch.empty(8192, 4096), torch.empty(8192, 4096)

    def planned(precision: Any) -> Any:
        return autopar.plan(
            model, cluster, example, loss_fn=F.mse_loss, precision=precision,
            constraints=Force("zero3"),
        ).prediction  # fmt: skip

    single, mixed = planned(None), planned("bf16")
    assert mixed.forward_s < 0.7 * single.forward_s
    for category in ("parameters", "optimizer_state"):
        assert mixed.memory_bytes[category] == single.memory_bytes[category]
    assert mixed.memory_bytes["activations"] < single.memory_bytes["activations"]


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp8", r"precision is 'fp8'; it is 'bf16', 'fp16', an autopar.Precision or None"),
        ("float32", r"precision is 'float32'; write precision='bf16'.* or precision=None"),
        (torch.bfloat16, r"precision is torch.bfloat16; write precision='bf16'"),
        (16, r"precision is 16; it is 'bf16'"),
    ],
)
def test_what_is_no_precision_is_refused(precision: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        autopar.plan(model_of(), CLUSTER, batch(0), loss_fn=F.mse_loss, precision=precision)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "fp32"}, "computes in 'fp32'; it is 'bf16' or 'fp16'"),
        ({"reduce": "fp16"}, "reduces gradients in 'fp16'"),
        ({"compute": "fp16", "reduce": "bf16"}, "summed in 'fp32', for sums in fp16 overflow"),
        ({"loss_scale": 0.5}, "loss_scale is 0.5; it is a finite number, at least 1"),
        ({"growth_interval": 0}, "growth_interval is 0; it is a whole number of steps"),
    ],
)
def test_what_no_precision_has_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Precision(**fields)


def test_overflows_cannot_be_ignored(compiled_for: Any) -> None:
    with pytest.raises(InputError, match="nonfinite is 'ignore' with precision='fp16'"):
        compiled_for(model_of(), precision="fp16", nonfinite="ignore")
