"""The runtime's tests on CUDA devices and NCCL."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.routed_product import routed_product
from autopar.lowering.program import lower
from autopar.lowering.streams import Datum, Issue, Part
from autopar.rules import batch_norm
from autopar.rules.batch_norm import _SynchronizedBatchNorm
from autopar.rules.context import LocalContext
from autopar.runtime.compiled import Compiled
from autopar.runtime.machine.streams import Streams, UpdateStream
from autopar.runtime.op_profile import PASSES, Pass
from autopar.runtime.options import RunOptions
from autopar.schedules import Resource
from autopar.sharding.strategy import Analysis, Strategy
from tests.equality.case import SINGLE_PRECISION
from tests.fusion.arrays import check_array
from tests.fusion.test_array import batches_of, mlp
from tests.models.zoo import MODELS, MORE_MODELS, build, optimizer_of
from tests.oracles import NUM_STEPS, loss_of, random_assignment, reference_steps, sgd, to_double
from tests.runtime.processes import lower_forward
from tests.runtime.test_precision import SGD, Eager, assert_near, batch, large, model_of, state
from tests.runtime.test_spmd import torchrun

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gpus() -> list[str]:
    return [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ["mlp", "lstm", "gpt2", "resnet"])
@pytest.mark.parametrize("seed", [0, 1])
def test_training_equals_eager(name: str, seed: int) -> None:
    num_devices = min(2, torch.cuda.device_count())
    model, make_batch = build(name)
    model = model.double()
    batches = [to_double(make_batch(seed)) for seed in range(NUM_STEPS)]
    captured = capture(model, batches[0])
    analysis = Analysis(captured.graph)
    mesh = Mesh(("a",), (num_devices,))
    strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
    expected = reference_steps(model, batches)
    with Compiled(
        captured=captured,
        program=lower(strategy, device_type="cuda"),
        forward_program=lambda: lower(strategy, device_type="cuda", training=False),
        lower_forward=lower_forward(mesh, seed, device_type="cuda"),
        plan=None,
        devices=[torch.device("cuda", index) for index in range(num_devices)],
        model=model,
        options=RunOptions(optimizer=sgd),
    ) as compiled:
        losses = [compiled.train_step(**batch).item() for batch in batches]
        state = compiled.full_state_dict()
        held = min(compiled.peak_tensor_bytes(**batches[0]))
        compiled.load_state_dict(state)  # as it was before two more steps
        evaluated = compiled.eval()(**batches[0])
    torch.testing.assert_close(losses, expected.losses, rtol=2e-6, atol=2e-6)
    for key, tensor in expected.weights.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=2e-6)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held > parameters / num_devices
    model.load_state_dict(state)
    expected_loss = loss_of(model.eval()(**batches[0])).detach()
    torch.testing.assert_close(loss_of(evaluated), expected_loss, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_compile_of_a_model_trains_as_eager(name: str, kernels: str) -> None:
    """On one GPU, with a searched plan and in the end replayed, against eager PyTorch on the CPU in
    float64."""
    model, make_batch = build(name)
    batches, tolerance = [make_batch(seed) for seed in range(5)], 1e-4
    if name not in SINGLE_PRECISION:
        model, batches, tolerance = model.double(), [to_double(x) for x in batches], 2e-6
    make_optimizer = optimizer_of(name)
    expected = reference_steps(model, batches, make_optimizer)
    with autopar.compile(
        model,
        ["cuda:0"],
        example_inputs=batches[0],
        optimizer=make_optimizer,
        kernels=kernels,
        profile_limit_s=5 if kernels == "eager" else 0,
    ) as compiled:
        losses = [compiled.train_step(**batch).item() for batch in batches]
        state, report = compiled.full_state_dict(), compiled.report()
        predicted = sum(compiled.plan.prediction.memory_bytes.values())
        counted = max(compiled.peak_tensor_bytes(**batches[0]))
    torch.testing.assert_close(losses, expected.losses, rtol=tolerance, atol=tolerance)
    for key, tensor in expected.weights.items():
        ours = state[key].cpu()
        torch.testing.assert_close(ours, tensor, rtol=5 * tolerance, atol=tolerance)
    waits = name == "mixtral"  # in float32 the host reads how many rows each expert has
    assert ("CUDA graphs: 1 of 1 programs are replayed" in report) is not waits
    if kernels == "eager":
        assert counted <= 1.1 * predicted + (1 << 20)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("expert", [[0, 3, 3, 1, 1, 3], [2, 2, 2, 2, 2, 2], [-1, 4, 0, 9, 0, 3]])
def test_products_of_experts_equal_those_of_the_cpu(expert: list[int]) -> None:
    """PyTorch's grouped kernel, in bfloat16, with experts without rows and rows without expert."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 16, generator=generator), torch.randn(4, 16, 24, generator=generator)
    cotangent, found = torch.randn(6, 24, generator=generator), []
    for device, dtype in [("cpu", torch.float32), ("cuda", torch.bfloat16)]:
        given = [t.bfloat16().to(device, dtype).requires_grad_() for t in (x, weight)]
        out = routed_product(*given, torch.tensor(expert, device=device))
        out.backward(cotangent.bfloat16().to(device, dtype))
        found.append([t.detach().cpu().float() for t in (out, *(g.grad for g in given))])
    for on_cpu, on_gpu in zip(*found):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ["attending", "resnet"])
def test_offloading_saves_memory_and_trains_the_same(name: str) -> None:
    """Two copy streams and pinned memory: the same losses, within the budget."""
    torch.manual_seed(0)
    if name == "attending":  # large beside the scratch memory of kernels, which nobody counts
        model, batches = Attending(), [token_batch_of(seed) for seed in range(NUM_STEPS)]
    else:
        model, make_batch = build(name)
        batches = [make_batch(seed) for seed in range(NUM_STEPS)]
    options: dict[str, Any] = {
        "example_inputs": batches[0], "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
        "recompute": "none", "update": "at_end", "profile_limit_s": 0,
    }  # fmt: skip
    with autopar.compile(model, ["cuda:0"], **options) as plain:
        needed = sum(plain.plan.prediction.memory_bytes.values())
        expected = [plain.train_step(**batch).item() for batch in batches]
    budget = autopar.MemoryBudget(int(0.7 * needed))
    with autopar.compile(model, ["cuda:0"], offload=True, constraints=budget, **options) as moved:
        assert moved.plan.offload is not None
        losses = [moved.train_step(**batch).item() for batch in batches]
        assert max(moved.peak_tensor_bytes(**batches[0])) <= 1.02 * budget.size_bytes
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("devices", [["cuda:0"], None], ids=["one", "two"])
def test_models_of_an_array_train_as_alone(devices: list[str] | None) -> None:
    """Also after they went back to a snapshot, with step counts on the GPU and on the host."""
    if devices is None and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.manual_seed(0)
    models: list[nn.Module] = [mlp() for _ in range(4)]
    batches = batches_of(5)
    with autopar.compile(
        models,
        devices or gpus(),
        example_inputs=batches[0],
        loss_fn=F.cross_entropy,
        optimizer=[
            functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
            functools.partial(torch.optim.Adam, lr=0.01),
            functools.partial(torch.optim.NAdam, lr=0.02),
            SGD,
        ],
        max_grad_norm=[0.5, None, 0.5, None],
        profile_limit_s=0,
    ) as array:
        first = {index: array.snapshot(index) for index in range(len(models))}
        array.train_step(*batches[4])
        array.restore(first)
        check_array(array, batches[:2], tolerance=1e-7)
        second = {index: array.snapshot(index) for index in range(len(models))}
        once = [array.train_step(*given) for given in batches[2:4]]
        array.restore(second)
        again = [array.train_step(*given) for given in batches[2:4]]
        torch.testing.assert_close(again, once, rtol=1e-9, atol=1e-9)
        array.leave(1)
        array.restore({index: second[index] for index in (0, 2, 3)})
        left = [array.train_step(*given) for given in batches[2:4]]
        torch.testing.assert_close(left, [x[[0, 2, 3]] for x in once], rtol=1e-7, atol=1e-7)


def eager_on_gpu(dtype: torch.dtype) -> Eager:
    eager = Eager(dtype)
    eager.model.cuda()  # the same parameters, which the optimizer has
    return eager


def cuda(given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return given[0].cuda(), given[1].cuda()


def compiled_on_gpus(**options: Any) -> autopar.Compiled:
    compiled = autopar.compile(
        model_of(), gpus(), example_inputs=batch(0), loss_fn=F.mse_loss, optimizer=SGD,
        profile_limit_s=0, **options,
    )  # fmt: skip
    assert isinstance(compiled, autopar.Compiled)
    return compiled


def on_cpu(eager: Eager) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in state(eager.model).items()}


@pytest.mark.gpu
@NEEDS_GPU
def test_bfloat16_is_that_of_eager() -> None:
    eager = eager_on_gpu(torch.bfloat16)
    with compiled_on_gpus(precision="bf16") as compiled:
        for seed in range(5):
            expected = eager.step(cuda(batch(seed)))
            assert compiled.train_step(*batch(seed)).item() == pytest.approx(expected, rel=2e-3)
        assert {x.dtype for x in compiled.gradients().values()} == {torch.float32}
        assert_near(compiled.full_state_dict(), on_cpu(eager), 0.02)
        assert compiled.eval()(batch(9)[0]).dtype is torch.bfloat16


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_float16_and_its_scale_are_those_of_a_grad_scaler(max_grad_norm: float | None) -> None:
    precision = autopar.Precision(compute="fp16", loss_scale=2.0**14, growth_interval=3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=3)
    eager = eager_on_gpu(torch.float16)
    eager.max_grad_norm = max_grad_norm
    with compiled_on_gpus(precision=precision, max_grad_norm=max_grad_norm) as compiled:
        for given in [batch(0), large(100.0), *map(batch, range(1, 5)), large(300.0), batch(5)]:
            expected = eager.step(cuda(given), scaler)
            assert compiled.train_step(*given).item() == pytest.approx(expected, rel=1e-3)
            assert compiled.loss_scale == scaler.get_scale()
        assert compiled.num_skipped_steps >= 2
        assert_near(compiled.full_state_dict(), on_cpu(eager), 0.01)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("group", ["own_group", "joined_here"])
def test_ranks_under_torchrun_train_as_eager(group: str) -> None:
    """In a process group that autopar joins, and in the user's own, of NCCL alone."""
    torchrun(len(gpus()), "tests.runtime.torchrun_gpu", group)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_exchange_messages_over_nccl(num_stages: int, schedule: str) -> None:
    """Receives are posted before their turn; from three stages on some rank has two neighbours."""
    if torch.cuda.device_count() < num_stages:
        pytest.skip(f"needs {num_stages} CUDA devices")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))).double()
    batches = [tuple(torch.randn(8, 16).double() for _ in "xy") for _ in range(3)]
    expected = reference_steps_of(model, batches)
    with autopar.compile(
        model,
        [f"cuda:{index}" for index in range(num_stages)],
        example_inputs=batches[0],
        loss_fn=F.mse_loss,
        optimizer=SGD,
        num_stages=num_stages,
        num_microbatches=4,
        schedule=schedule,
        profile_limit_s=0,
        call_timeout_s=120,
    ) as compiled:
        losses = [compiled.train_step(*given).item() for given in batches]
    assert losses == pytest.approx(expected, rel=1e-9)


class Attending(nn.Module):
    """A small transformer whose head is its embedding: a gradient that both streams add to."""

    def __init__(self, width: int = 256, num_layers: int = 6, num_tokens: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(num_layers)
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        scores = F.linear(x, self.embedding.weight).flatten(0, 1)
        return F.cross_entropy(scores, targets.flatten())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_weight_gradients_on_a_second_stream_equal_eager(
    num_devices: int, num_microbatches: int
) -> None:
    """Steps one behind the other, so that memory of one stream would be used again by the other."""
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"needs {num_devices} CUDA devices")
    torch.manual_seed(0)
    model = Attending().double()
    batches = [token_batch_of(seed) for seed in range(10)]
    expected = reference_steps(model.cuda(), [on_gpu(batch) for batch in batches], SGD)
    model.cpu()
    with autopar.compile(
        model,
        gpus()[:num_devices],
        example_inputs=batches[0],
        optimizer=SGD,
        schedule="multi_stream",
        num_stages=6,
        num_microbatches=num_microbatches,
        constraints=[autopar.Force("data_parallel")] if num_devices > 1 else [],
        profile_limit_s=0,
        call_timeout_s=120,
    ) as compiled:
        losses = [compiled.train_step(**batch).item() for batch in batches]
        weights = compiled.full_state_dict()
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(weights[name].cpu(), weight.cpu(), rtol=1e-8, atol=1e-8)


def token_batch_of(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {n: torch.randint(0, 1000, (8, 64), generator=made) for n in ("tokens", "targets")}


def on_gpu(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in batch.items()}


@pytest.mark.gpu
@NEEDS_GPU
def test_a_side_stream_runs_beside_the_main_one_and_behind_its_events() -> None:
    streams, device = Streams(torch.device("cuda", 0)), torch.device("cuda", 0)
    x = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    main, side = (
        functools.partial(Issue, action=None, part=Part.RUN, stream=stream)
        for stream in (Resource.MAIN, Resource.SIDE)
    )
    with streams.on(main(number=0, records=True)):
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
        x.fill_(1.0)
    with streams.on(side(number=1)):
        y = torch.full_like(x, 3.0)
        free = torch.cuda.current_stream(device).record_event()
    free.synchronize()
    asleep = torch.cuda.current_stream(device).record_event()
    assert not asleep.query(), "the side stream waited for the main one"
    with streams.on(side(number=2, waits=(0,), records=True, uses=(Datum("gradient", 0),))):
        streams.note(x)
        y += x
        del x
    with streams.on(main(number=3, waits=(2,))):
        filled = torch.full((1 << 20,), 9.0, device=device)  # may not be the memory of x yet
        total = y.sum()
    assert total.item() == 4.0 * (1 << 20)
    assert filled[0].item() == 9.0


@pytest.mark.gpu
@NEEDS_GPU
def test_an_update_runs_beside_the_main_stream_and_behind_its_gradient() -> None:
    device = torch.device("cuda", 0)
    updates = UpdateStream(device)
    weight, gradient = (torch.full((1 << 20,), number, device=device) for number in (1.0, 0.0))
    torch.cuda.synchronize()
    gradient.fill_(0.5)
    with updates.on([gradient]):
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
        weight -= gradient
    del gradient
    other = torch.full_like(weight, 7.0)
    assert not updates._end.query()
    beside = torch.cuda.current_stream(device).record_event()
    beside.synchronize()
    assert not updates._end.query(), "the main stream waited for the update"
    updates.join()
    assert weight.sum().item() == 0.5 * (1 << 20)
    assert other[0].item() == 7.0


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("clipping", [None, "second_pass", "last_norm"])
def test_early_updates_equal_eager(clipping: str | None) -> None:
    """Large linear layers, whose gradients are updated with by rows; clipping that changes none."""
    sizes = (256, 1024, 1024, 64)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2]).cuda()
    batches = [(torch.randn(32, 256).cuda(), torch.randn(32, 64).cuda()) for _ in range(4)]
    expected = reference_steps_of(model, batches)
    with autopar.compile(
        model, "cuda:0", example_inputs=batches[0], loss_fn=F.mse_loss, optimizer=SGD,
        update=autopar.Update(when="early", clipping=clipping), profile_limit_s=0,
        max_grad_norm=None if clipping is None else 1e6,
    ) as compiled:  # fmt: skip
        losses = [compiled.train_step(*each).item() for each in batches]
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
@NEEDS_GPU
def test_the_time_of_an_action_is_the_devices() -> None:
    """Launching these products takes far less than they do on the fastest device there is."""
    size, num_layers = 8192, 4
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(num_layers)))
    x = torch.randn(size, size)
    with autopar.compile(
        model, "cuda:0", example_inputs=(x, x), loss_fn=F.mse_loss, optimizer=SGD,
        profile_limit_s=0,
    ) as compiled:  # fmt: skip
        profile = compiled.profile(x, x, num_steps=2)
    (times,) = profile.times
    flops = 2 * num_layers * size**3
    passes = {
        each: sum(t.end_s - t.start_s for t in times.actions if t.action.kind in PASSES[each])
        for each in (Pass.FORWARD, Pass.BACKWARD)
    }
    assert passes[Pass.FORWARD] > flops / 2e15
    assert passes[Pass.BACKWARD] > (2 * flops - flops / num_layers) / 2e15


def reference_steps_of(model: nn.Module, batches: list[tuple[Tensor, ...]]) -> list[float]:
    """The losses of eager training; the model is trained and then as before."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    optimizer, losses = SGD(model.parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.load_state_dict(before)
    return losses


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_synchronized_batch_norm(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    check_synchronized_batch_norm("cuda", dtype, memory_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sums", ["its own", "that of GPUs"])
def test_synchronized_batch_norm_on_the_cpu(
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    sums: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sums == "that of GPUs":
        monkeypatch.setattr(batch_norm, "_sums", batch_norm._sums_of_products)
    check_synchronized_batch_norm("cpu", dtype, memory_format)


def check_synchronized_batch_norm(
    device: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    """The kernels of a device, in a group of one, against the device's own batch norm."""
    torch.manual_seed(0)
    like = {"device": device, "dtype": dtype}
    x = (torch.randn(8, 6, 5, 5, **like) * 3 + 1).contiguous(memory_format=memory_format)
    operands = [x, torch.rand(6, **like) + 0.5, torch.randn(6, **like)]
    gradient = torch.randn_like(x)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [operand.clone().requires_grad_() for operand in operands]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    context = LocalContext(
        op=None, space=None, choice=None, mesh=Mesh(("x",), (1,)), output_shapes=()
    )
    got = run(lambda *a: _SynchronizedBatchNorm.apply(*a, 1e-5, context, (0,))[0])
    expected = run(lambda *a: F.batch_norm(a[0], None, None, a[1], a[2], training=True, eps=1e-5))
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for ours, theirs in zip(got, expected):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
